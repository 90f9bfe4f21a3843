"""Lazy import of modules that load slowly, torch and numpy, and lazy compilation of regular expressions.

The parts in `rlctl.registry` are registered where they are defined, and the spec, `--help` and the docs read
their names and formulas. With `from rlctl.lazy import torch` they do so without importing torch, which takes
seconds. The graders' hundreds of patterns would take a quarter of the start of every command.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, ClassVar, cast

__all__ = ["LazyModule", "compile_patterns", "lazy_pattern", "numpy", "torch"]


class LazyModule:
    """Imports the module at the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)  # found directly the next time
        return value


class _LazyPattern:
    """A regular expression that is compiled at the first access to an attribute."""

    #: those that are not compiled yet
    waiting: ClassVar[set[_LazyPattern]] = set()

    def __init__(self, text: str, flags: int) -> None:
        self._arguments = text, flags
        self.waiting.add(self)

    def compiled(self) -> re.Pattern[str]:
        """The pattern; later accesses to its attributes find them directly."""
        pattern = re.compile(*self._arguments)
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(pattern, name))
        self.waiting.discard(self)
        return pattern

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.compiled(), attribute)


_ATTRIBUTES = [name for name in dir(re.Pattern) if not name.startswith("_")]


def lazy_pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Like `re.compile`, at the first use: an error in the pattern is only found then.

    The functions of `re` do not take it; call its methods.
    """
    return cast("re.Pattern[str]", _LazyPattern(text, flags))


def compile_patterns() -> None:
    """Compiles all that wait for their first use, so that forks of this process need not."""
    for pattern in list(_LazyPattern.waiting):
        pattern.compiled()


if TYPE_CHECKING:
    import numpy
    import torch
else:
    numpy = LazyModule("numpy")
    torch = LazyModule("torch")
