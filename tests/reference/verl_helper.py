"""verl 0.9.1 as an oracle: its modules, installed outside the project's environment.

`make test` installs `verl_requirements.txt` without dependencies into `.venv/verl`; by hand:

    pip install --no-deps --target .venv/verl -r tests/reference/verl_requirements.txt

That directory is on `sys.path`, and its modules are in `sys.modules`, only while verl is imported:
other code cannot import them. Modules that verl imports and no test runs (ray, transformers, …) come from the
project's environment, or are replaced by stand-ins for that time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

#: Where `make test` installs it: inside the environment that runs the tests.
SIDE = Path(sys.prefix) / "verl"
#: Modules that the helper runs; never replaced by stubs.
_NEEDED = {"verl", "torch", "tensordict", "omegaconf", "numpy"}
#: Modules of the side environment, imported before: a second import would be other classes.
_imported: dict[str, ModuleType] = {}
_errors: dict[str, str] = {}


class _Anything(type):
    """A class of which any attribute is again such a class, and which decorates by doing nothing."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else super().__call__()

    def __getitem__(cls, item):
        return cls

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
    """One of verl's modules; None where it cannot be imported (`why_not` says why)."""
    added: list[str] = []
    with _side_environment():
        try:
            while True:
                try:
                    return importlib.import_module(name)
                except ModuleNotFoundError as error:
                    missing = error.name or ""
                    if missing.partition(".")[0] in _NEEDED or missing in sys.modules:
                        raise
                    sys.modules[missing] = _StandIn(missing)
                    added.append(missing)
        except ImportError as error:
            _errors[name] = str(error)
            return None
        finally:
            for stand_in in added:
                sys.modules.pop(stand_in, None)


class Lazy:
    """One of verl's modules, imported when a test first uses it; that test is skipped where it cannot be.

    Imported with its test module, it would cost seconds in every process that collects tests.
    """

    def __init__(self, name: str = "verl.trainer.ppo.rollout_corr_helper") -> None:
        self._name = name

    @cached_property
    def _module(self) -> ModuleType:
        return load(self._name) or pytest.skip(why_not(self._name))

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # pytest looks for marks of fixtures
            raise AttributeError(attribute)
        return getattr(self._module, attribute)


def why_not(name: str = "verl.trainer.ppo.rollout_corr_helper") -> str:
    """Why a test that needs this module is skipped."""
    return f"{_errors.get(name, name)}: verl 0.9.1 is not in {SIDE} (`make verl` installs it, if it can)"


@contextmanager
def _side_environment() -> Iterator[None]:
    """Its directory comes last: what the project's environment has is taken from there."""
    sys.path.append(str(SIDE))
    sys.modules.update(_imported)
    try:
        yield
    finally:
        sys.path.remove(str(SIDE))
        for name, module in list(sys.modules.items()):
            if SIDE in Path(getattr(module, "__file__", None) or "/").parents:
                _imported[name] = sys.modules.pop(name)
