"""Lazy import of modules that load slowly, such as torch.

The parts in `rlctl.registry` are registered where they are defined, and the spec, `--help` and the docs read
their names and formulas. With `from rlctl.lazy import torch` they do so without importing torch, which takes
seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "torch"]


class LazyModule:
    """Imports the module at the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found directly the next time
        return value


if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")
