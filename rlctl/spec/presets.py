"""The shipped presets: directory, names, descriptions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import rlctl
from rlctl.errors import EnvironmentFailure
from rlctl.spec.yaml_source import read_yaml_file

#: Top-level key of a preset that `rlctl presets list` shows; not part of the RunSpec.
DESCRIPTION = "description"


@dataclass(frozen=True, slots=True)
class Preset:
    """A shipped spec fragment; `kind` is its sub-folder (algorithms, examples, models…)."""

    name: str
    kind: str
    path: Path

    @property
    def description(self) -> str:
        """One line, read from the preset's file."""
        leaf = read_yaml_file(self.path, ()).leaves.get(DESCRIPTION)
        return str(leaf.value) if leaf else ""


@cache
def presets_dir() -> Path:
    """The shipped presets: inside the package when installed, at the root of a checkout.

    Raises:
        EnvironmentFailure: neither directory exists.
    """
    package = Path(rlctl.__file__).parent
    for candidate in (package / "presets", package.parent / "presets"):
        if candidate.is_dir():
            return candidate
    raise EnvironmentFailure(
        "the shipped presets are missing", where=str(package / "presets"), fix="reinstall rlctl"
    )


@cache
def all_presets() -> dict[str, Preset]:
    """Bare name → preset, ordered by folder and name."""
    root = presets_dir()
    found = [
        Preset(path.stem, path.parent.relative_to(root).as_posix(), path) for path in root.rglob("*.yaml")
    ]
    return {preset.name: preset for preset in sorted(found, key=lambda preset: (preset.kind, preset.name))}
