"""What Triton's interpreter lacks for the kernels of vLLM and Liger: dtypes of numbers, functions of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import triton
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


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def fill_liger() -> None:
    """The two functions of CUDA's mathematical library that Liger's kernels call; includes `fill`."""
    from liger_kernel.ops import geglu, rms_norm

    fill()
    rms_norm.rsqrt = _rsqrt
    geglu.tanh = _tanh
