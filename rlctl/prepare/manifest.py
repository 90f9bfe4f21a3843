"""`manifest.json`: inputs, settings and contents of a prepared directory, to reproduce or reuse it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.files import sha256_of

MANIFEST = "manifest.json"
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Manifest:
    """Inputs, settings and contents of a prepared directory."""

    made_from: Mapping[str, Any]  # everything the output depends on: input hashes, recipe, split, versions
    counts: Mapping[str, int]  # rows of the input, per split, quarantined, and dropped per reason
    report: Mapping[str, Any]  # statistics: duplicates, leakage, lengths, findings
    splits: Mapping[str, list[str]]  # split → its Parquet files
    outputs: Mapping[str, str]  # file name → sha256

    def write(self, directory: Path) -> None:
        """Writes `manifest.json`, without dates: equal inputs and settings give identical bytes."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2, ensure_ascii=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def matches(self, directory: Path) -> bool:
        """Whether the directory still contains every file of the manifest, unchanged."""
        return all(
            (directory / name).is_file() and sha256_of(directory / name) == digest
            for name, digest in self.outputs.items()
        )


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None if it is missing, unreadable or of another format version."""
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        return Manifest(*(content[field.name] for field in fields(Manifest)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_replaceable(out: Path) -> None:
    """Checks that replacing `out` would delete nothing but the output of an earlier run.

    Raises:
        UsageError: `out` is a file, or contains other files.
    """
    if out.exists() and not out.is_dir():
        raise UsageError("the output is a file, not a directory", where=str(out), fix="choose another --out")
    entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    manifest = read_manifest(out)
    foreign = entries - {MANIFEST, *(manifest.outputs if manifest else ())}
    if foreign or (entries and manifest is None):
        raise UsageError(
            f"the directory contains files that prepare-data did not write ({min(foreign or entries)})",
            where=str(out),
            fix="choose another --out",
        )


def describe_inputs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size and hash of each input; names have no directory, so that data may be moved."""
    return [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths]
