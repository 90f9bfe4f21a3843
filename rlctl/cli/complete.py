"""Shell completion of presets, spec keys and run directories. Heavy imports happen only during completion."""

from __future__ import annotations

from pathlib import Path


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Presets whose names begin with the text, with their descriptions."""
    from rlctl.spec.presets import all_presets

    found = all_presets().values()
    return [(each.name, each.description) for each in found if each.name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys that begin with the text."""
    from rlctl.spec.keys import known_leaves

    return [key for key in known_leaves() if key.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """`key=` for keys that begin with the text, and such spec files in the working directory."""
    files = [str(path) for path in Path().glob("*.y*ml") if path.name.startswith(incomplete)]
    return [f"{key}=" for key in complete_key(incomplete)] + files


def complete_run(incomplete: str) -> list[str]:
    """Run directories below `runs/` whose paths begin with the text."""
    found = sorted(path.parent for path in Path("runs").glob("*/*/spec.yaml"))
    return [str(path) for path in found if str(path).startswith(incomplete)]
