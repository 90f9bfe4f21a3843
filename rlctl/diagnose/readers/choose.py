"""Chooses which log of a directory is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlctl.errors import UsageError
from rlctl.spec.load import RUN_SPEC_FILE

LOG_FILE = "metrics.jsonl"

_SUFFIXES = frozenset(
    {".jsonl", ".wandb", ".json", ".csv", ".tsv", ".parquet", ".log", ".txt", ".out", ".err", ".gz"}
)
_EVENTS = "tfevents"
_DEEPEST = 5
#: Maximum number of logs that are examined; logs in deeper directories are left out first.
_MOST = 200


@dataclass(frozen=True, slots=True)
class Candidate:
    """One log."""

    files: tuple[Path, ...]  # its files: several for TensorBoard, one otherwise
    shown: Path  # the path to report


class LogContent(NamedTuple):
    """Amount of content in a log's first rows; compared field by field, in this order."""

    metrics: int  # number of canonical metrics
    rows: int  # number of rows read
    last_step: int  # the newest step read


def choose(directory: Path, content: Callable[[Candidate], LogContent]) -> tuple[Candidate, list[str]]:
    """Returns the log with the most content, and notes that name it.

    A `metrics.jsonl` next to a `spec.yaml` directly in the directory is always chosen, without a note.

    Args:
        directory: searched to a depth of five.
        content: returns the content of a log; of logs with equal content the newest is chosen.

    Raises:
        UsageError: there is no log in the directory.
    """
    log = directory / LOG_FILE
    if log.is_file() and (directory / RUN_SPEC_FILE).is_file():
        return Candidate((log,), log), []
    candidates = sorted(_candidates(directory), key=lambda one: len(one.shown.parts))
    examined = [(content(one), _age(one), one) for one in candidates[:_MOST]]
    known = [found for found in examined if found[0].metrics]
    if not known:
        what = f"no log in this directory: it holds no {LOG_FILE} and no other known log"
        raise UsageError(what, where=str(directory), fix="name a run directory, or a log")
    best = max(known, key=lambda found: found[:2])[2]
    if len(known) == 1:
        return best, [f"read: {best.shown}"]
    return best, [f"{len(known)} logs in {directory}: {best.shown} was read; name another to have it read"]


def _candidates(directory: Path) -> Iterator[Candidate]:
    depth = len(directory.parts)
    for root, folders, names in os.walk(directory):
        here = Path(root)
        is_deepest = len(here.parts) - depth >= _DEEPEST
        folders[:] = [] if is_deepest else sorted(f for f in folders if not f.startswith("."))
        events = tuple(here / name for name in sorted(names) if _EVENTS in name)
        if events:
            yield Candidate(events, here if len(events) > 1 else events[0])
        for name in sorted(names):
            is_log = Path(name).suffix in _SUFFIXES and name != LOG_FILE.replace(".", ".discarded.")
            if is_log and _EVENTS not in name:
                yield Candidate((here / name,), here / name)


def _age(candidate: Candidate) -> float:
    return max(file.stat().st_mtime for file in candidate.files if file.exists())
