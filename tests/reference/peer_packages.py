"""OpenRLHF, SkyRL and AReaL as oracles: their loss and correction code, installed outside the environment.

`make conformance` installs `peers_requirements.txt` without dependencies into `.venv/peers`; by hand:

    pip install --no-deps --target .venv/peers -r tests/reference/peers_requirements.txt

Their packages import serving and training libraries that no test needs. Therefore a package's `__init__` is
not run: each directory is a namespace package. Missing modules are replaced by stubs during an import.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tests.reference import verl_helper

PEERS = Path(sys.prefix) / "peers"
#: Package → the version whose code the tests run.
PACKAGES = {"openrlhf": "0.11.2", "skyrl": "0.3.0", "areal": "1.0.4"}
_NEEDED = {*PACKAGES, "torch", "numpy"}
_errors: dict[str, str] = {}
_loaded: dict[str, ModuleType] = {}


class _Bare(Loader):
    """Creates a package that imports submodules on access and replaces every other attribute by a stub."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> object:
            below = PEERS / module.__name__.replace(".", "/") / name
            if name.startswith("__"):
                raise AttributeError(name)
            if below.is_dir() or below.with_suffix(".py").is_file():
                return importlib.import_module(f"{module.__name__}.{name}")
            return verl_helper._Anything(name, (), {})

        module.__getattr__ = attribute


class _BarePackages:
    """Finds the packages' directories without running their `__init__`."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        directory = PEERS / name.replace(".", "/")
        if name.partition(".")[0] not in PACKAGES or not directory.is_dir():
            return None
        spec = ModuleSpec(name, _Bare(), is_package=True)
        spec.submodule_search_locations = [str(directory)]
        return spec


def load(name: str) -> ModuleType | None:
    """One module of a package; None where it cannot be imported (`why_not` says why)."""
    if name in _loaded:
        return _loaded[name]
    stand_ins: list[str] = []
    before = set(sys.modules)
    sys.meta_path.insert(0, _BarePackages)
    try:
        with verl_helper._side_environment():  # omegaconf is installed there
            while name not in _loaded:
                try:
                    _loaded[name] = importlib.import_module(name)
                except ModuleNotFoundError as error:
                    missing = error.name or ""
                    if missing.partition(".")[0] in _NEEDED or missing in sys.modules:
                        raise
                    sys.modules[missing] = verl_helper._StandIn(missing)
                    stand_ins.append(missing)
    except (ImportError, AttributeError, TypeError) as error:
        _errors[name] = f"{type(error).__name__}: {error}"
        return None
    finally:
        sys.meta_path.remove(_BarePackages)
        peers = [module for module in set(sys.modules) - before if module.partition(".")[0] in PACKAGES]
        for module in [*stand_ins, *peers]:
            sys.modules.pop(module, None)
    return _loaded[name]


def why_not(name: str) -> str:
    """Why a test that needs this module is skipped."""
    return f"{_errors.get(name, name)}: not in {PEERS} (`make conformance` installs it, if it can)"
