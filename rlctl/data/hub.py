"""Hugging Face datasets as the Arrow files they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlctl.errors import EnvironmentFailure, UsageError

HUB = "hf:"
STATE, SPLITS = "state.json", "dataset_dict.json"
INSTALL = 'pip install "rlctl[datasets]"'


def is_dataset(path: Path) -> bool:
    """Whether a directory was written by `save_to_disk`."""
    return (path / STATE).is_file() or (path / SPLITS).is_file()


def saved_files(path: Path) -> list[Path]:
    """The Arrow files of one split, in order.

    Raises:
        UsageError: there are several splits, or a file is missing.
    """
    if (path / SPLITS).is_file():
        splits = _read(path / SPLITS).get("splits", [])
        named = [f"{path / name}" for name in splits if isinstance(name, str)]
        raise UsageError(
            f"the dataset has the splits {', '.join(map(str, splits))}: reading all of them would mix them",
            where=str(path),
            fix=f"name {' or '.join(named)}" if named else None,
        )
    listed = _read(path / STATE).get("_data_files")
    names = [str(entry.get("filename")) for entry in listed or [] if isinstance(entry, dict)]
    files = [path / Path(name).name for name in names]
    missing = next((file for file in files if not file.is_file()), None)
    if not files or missing:
        what = f"{missing.name} is missing" if missing else "it names no data files"
        raise UsageError(f"the dataset is not complete: {what}", where=str(path), fix="save it again")
    return files


def hub_files(name: str) -> tuple[list[Path], str]:
    """The cached Arrow files of `hf:organisation/name[:split]` (the split is `train` unless given), and the
    dataset's name; downloads it where it is not cached.

    Raises:
        UsageError: there is no such dataset or split.
        EnvironmentFailure: `datasets` is not installed, or the hub cannot be reached.
    """
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFailure(
            "datasets of the hub are read by the package `datasets`, which is missing",
            where=name,
            fix=INSTALL,
        ) from error
    dataset, _, split = name.removeprefix(HUB).partition(":")
    if not dataset or "[" in split:  # a slice is a view of files that hold more
        what = "a slice of a split cannot be read" if dataset else "no dataset is named"
        raise UsageError(what, where=name, fix="write hf:organisation/name or hf:organisation/name:split")
    try:
        loaded = datasets.load_dataset(dataset, split=split or "train")
    except ValueError as error:  # an unknown split, or a dataset of several configurations
        raise UsageError(str(error).splitlines()[0], where=name, fix="see its page for its splits") from error
    except Exception as error:  # network, cache and hub errors of several libraries, with no common base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EnvironmentFailure(
            f"the dataset cannot be had: {reason}",
            where=name,
            fix="check its name and the network, or download its files and name them",
        ) from error
    files = [Path(file["filename"]) for file in loaded.cache_files]
    if not files:
        raise UsageError("the dataset has no rows", where=name)
    return files, dataset


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {error}", where=str(path)) from error
    return content if isinstance(content, dict) else {}
