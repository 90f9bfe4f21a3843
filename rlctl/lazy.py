"""Modules that are imported when they are first used: torch, and others that take long.

The parts in `rlctl.registry` are registered where they are defined, and the spec, `--help` and the docs read
their names and formulas. `from rlctl.lazy import torch` lets them do so without the seconds that torch takes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "torch"]


class LazyModule:
    """Imports the module at the first attribute asked of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")
