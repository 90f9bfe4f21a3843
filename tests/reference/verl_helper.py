"""verl's rollout correction as an oracle, wherever verl's sources can be imported.

    pip install --no-deps verl==0.9.1
    pip install tensordict omegaconf codetiming hydra-core

Of all that verl imports, its correction helper runs only torch, tensordict and omegaconf. Modules
that are missing (transformers, ray, …) are stood in for while it is imported, and removed again.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import ClassVar

#: What the helper really runs: never stood in for.
_NEEDED = {"verl", "torch", "tensordict", "omegaconf", "numpy"}


class _Anything(type):
    """A class of which any attribute is again such a class, and which decorates by doing nothing."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__()

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class _StandIn(ModuleType):
    """A module that has everything."""

    __path__: ClassVar[list[str]] = []
    __version__ = "99.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def load(name: str = "verl.trainer.ppo.rollout_corr_helper") -> ModuleType | None:
    """One of verl's modules; None where verl, or what it needs to run, is missing."""
    added: list[str] = []
    try:
        for _ in range(100):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = error.name or ""
                if missing.partition(".")[0] in _NEEDED or missing in sys.modules:
                    return None
                sys.modules[missing] = _StandIn(missing)
                added.append(missing)
        return None
    finally:
        for stand_in in added:
            sys.modules.pop(stand_in, None)
