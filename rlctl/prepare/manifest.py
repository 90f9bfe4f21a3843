"""`manifest.json`: what a prepared directory was made from, so that it can be made, or recognised, again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.files import sha256_of
from rlctl.track.run_dir import version_of

MANIFEST = "manifest.json"
FORMAT = 3


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a prepared directory was made from, and what it holds."""

    made_from: Mapping[str, Any]  # all that the output depends on: hashes of inputs, recipe, split, versions
    counts: Mapping[str, int]  # rows in, in each split, quarantined, and dropped for each reason
    report: Mapping[str, Any]  # what was found: duplicates, leakage, lengths, findings
    splits: Mapping[str, list[str]]  # split → its Parquet files
    outputs: Mapping[str, str]  # file name → sha256

    def write(self, directory: Path) -> None:
        """Write it, without dates: equal work gives equal bytes."""
        text = json.dumps({"format": FORMAT} | asdict(self), indent=2, ensure_ascii=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")

    def matches(self, directory: Path) -> bool:
        """Whether the directory still holds exactly the files described."""
        return all(
            (directory / name).is_file() and sha256_of(directory / name) == digest
            for name, digest in self.outputs.items()
        )


def read_manifest(directory: Path) -> Manifest | None:
    """The directory's manifest; None where there is none that this version wrote."""
    try:
        content = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        return Manifest(*(content[field.name] for field in fields(Manifest)))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_replaceable(out: Path) -> None:
    """Refuse to replace anything but the output of an earlier run.

    Raises:
        UsageError: `out` is a file, or holds something else.
    """
    if out.exists() and not out.is_dir():
        raise UsageError("the output is a file, not a directory", where=str(out), fix="choose another --out")
    entries = {entry.name for entry in out.iterdir()} if out.exists() else set()
    manifest = read_manifest(out)
    foreign = entries - {MANIFEST, *(manifest.outputs if manifest else ())}
    if foreign or (entries and manifest is None):
        raise UsageError(
            f"the directory holds what prepare-data did not write ({min(foreign or entries)})",
            where=str(out),
            fix="choose another --out",
        )


def describe_inputs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size and hash of each input; names without folders, so that moving the data changes nothing."""
    return [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths]


def describe_versions() -> dict[str, str]:
    """What the bytes of the output depend on."""
    return {package: version_of(package) or "unknown" for package in ("rlctl", "pyarrow", "math-verify")}
