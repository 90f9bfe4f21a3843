"""What Triton's interpreter lacks for the kernels of vLLM and Liger: numbers that have a dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Index(int):
    """A number of `tl.range`: compiled kernels have a tensor there, the interpreter a number of Python."""

    def to(self, dtype: tl.dtype) -> tl.tensor:
        return tl.full((), int(self), dtype)


def fill() -> None:
    """Fills the gaps, once; vLLM calls it in each of its processes, as a plugin."""
    if getattr(interpreter, "_rlctl_filled", False):
        return
    convert, patch_language = interpreter._implicit_cvt, interpreter._patch_lang_core

    def convert_floats_too(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    def patch_language_and_range(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        plain = language.range

        def counted(*args: Any, **kwargs: Any) -> Iterator[_Index]:
            return map(_Index, plain(*args, **kwargs))

        scope.set_attr(language, "range", counted)

    interpreter._implicit_cvt = convert_floats_too
    interpreter._patch_lang_core = patch_language_and_range
    interpreter._rlctl_filled = True
