"""Optional parts of training, one folder each: everything about one of them stands in its folder.

A folder has `section.py`, whose `SECTION` says what a spec must know (a `CapabilitySection`; no torch), and
`run.py`, imported only if a spec uses the capability, whose `capability(spec)` returns a `Capability` of
`rlctl.train.capability`. The core calls all capabilities that are on and names none.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

import rlctl.capabilities
from rlctl.capabilities.base import CapabilitySection, FurtherModel

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


@cache
def sections() -> dict[str, CapabilitySection]:
    """Name of every capability → its section, in alphabetical order."""
    names = sorted(each.name for each in pkgutil.iter_modules(rlctl.capabilities.__path__) if each.ispkg)
    return {name: importlib.import_module(f"rlctl.capabilities.{name}.section").SECTION for name in names}


def sections_on(spec: RunSpec) -> dict[str, CapabilitySection]:
    """Those of the capabilities that a spec uses."""
    return {name: section for name, section in sections().items() if section.is_on(spec)}


def further_models(spec: RunSpec) -> tuple[FurtherModel, ...]:
    """Models of capabilities that score the policy's tokens."""
    return tuple(model for section in sections_on(spec).values() for model in section.models(spec))


def other_models(spec: RunSpec) -> dict[str, str | None]:
    """Key → directory or hub id of every other model of the policy's tokens that is loaded."""
    others = {"critic.path": spec.critic.path, "ref.path": spec.ref.path}
    return others | {model.key: model.path for model in further_models(spec)}
