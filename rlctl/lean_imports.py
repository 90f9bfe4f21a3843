"""Imports transformers and DeepSpeed without packages that they import only because these are installed.

Together these packages take 110 MiB of a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rlctl.lazy import torch

#: transformers imports functions of them, for losses of object detection and for assisted generation.
_DEFERRED = ("scipy.optimize", "sklearn", "sklearn.metrics")
#: torch's tracer, which transformers imports, reads its types; DeepSpeed has kernels for mixtures of experts.
_ABSENT_WITHOUT_GPU = ("triton",)
#: Modules whose functions remember whether packages are installed.
_CHECKS = ("transformers.utils.import_utils", "torch.utils._triton")


def import_tokenizers() -> None:
    """Imports transformers' `AutoTokenizer`, and with it `generate`, by `lean_import`."""
    lean_import("transformers.models.auto.tokenization_auto")


def import_models() -> None:
    """Imports the base of transformers' models and its auto classes, by `lean_import`."""
    lean_import("transformers.modeling_utils", "transformers.models.auto.modeling_auto")


def lean_import(*names: str) -> None:
    """Imports those of these modules that can be imported, without packages that no training uses.

    What is imported already stays as it is. Afterwards all packages can be imported, and functions of them
    that these modules have imported work; they import no classes of them. No other thread should import
    them meanwhile.
    """
    if all(name in sys.modules for name in names):
        return
    # By NVML, where it can: after `is_available` the forks of this process could not use CUDA.
    needs_triton = torch.cuda.device_count() > 0 or os.environ.get("TRITON_INTERPRET") == "1"
    replaced: dict[str, Any] = {} if needs_triton else dict.fromkeys(_ABSENT_WITHOUT_GPU)
    replaced |= {name: _Deferred(name) for name in _DEFERRED if find_spec(name.partition(".")[0])}
    with _replaced(replaced):
        for name in names:
            with suppress(ImportError):  # its next import raises it
                import_module(name)


class _Deferred(ModuleType):
    """Stands for a module of functions: each of them imports the module when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = find_spec(name.partition(".")[0])  # it is installed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return call


@contextmanager
def _replaced(modules: dict[str, Any]) -> Iterator[None]:
    """Context in which imports find these modules, unless they are imported already; None: not installed."""
    added = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(added)
    _forget_checks()
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                sys.modules.pop(name, None)
        _forget_checks()


def _forget_checks() -> None:
    for name in _CHECKS:
        with suppress(ImportError):
            for check in vars(import_module(name)).values():
                if hasattr(check, "cache_clear"):
                    check.cache_clear()
