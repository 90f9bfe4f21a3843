"""Finds the runs in a directory: the logs in it, and which of them are of one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.run_spec.load import RUN_SPEC_FILE
from rlctl.track.dropped import DROPPED_FILE
from rlctl.track.jsonl import DISCARDED_FILE, METRICS_FILE

#: Suffixes of the files in a directory that may be logs, and names of files that repeat a part of one or list
#: episodes.
_SUFFIXES = frozenset(
    {".jsonl", ".wandb", ".json", ".csv", ".tsv", ".parquet", ".log", ".txt", ".out", ".err", ".md", ".gz"}
)
_REPEATS = frozenset({DISCARDED_FILE, DROPPED_FILE, "wandb-summary.json"})
_EVENTS = "tfevents"
_DEEPEST = 5
#: Maximum number of logs of a directory that are examined; logs in deeper directories are left out first.
_MOST = 1000
#: Two logs are of one run if this share of the values of one are in the other, except for rounding.
_SAME_SHARE = 0.8
_ROUNDING = 1e-3
#: Multiple of the rounding that values must spread over to tell runs apart.
_LEAST_SPREAD = 20


class Log(NamedTuple):
    """One log."""

    files: tuple[Path, ...]  # its files: several for TensorBoard, one otherwise
    shown: Path  # the path to report


class Preview(NamedTuple):
    """The beginning of a log."""

    content: tuple[
        int, int, int
    ]  # number of metrics and of rows, and the newest step; zeros for an error only
    columns: Mapping[str, NDArray[np.float64]]  # canonical metric → its finite values


class _Known(NamedTuple):
    log: Log
    preview: Preview

    @property
    def rank(self) -> tuple[tuple[int, int, int], float]:
        """Order by content, and then by age."""
        return self.preview.content, max(file.stat().st_mtime for file in self.log.files)


def runs_in(
    directory: Path, shown: Path, preview: Callable[[Sequence[Path]], Preview | None]
) -> Iterator[tuple[Log, list[str]]]:
    """Yields of every run the log with the most content, the newest of equal ones, and notes on the choice.

    Logs are of one run if they hold the same values; if they have no metric in common, where only one of the
    runs is next to the log, with another suffix, or in a directory above or below it. A `metrics.jsonl` next
    to a `spec.yaml` is always chosen.

    Args:
        directory: the directory to search, to a depth of five.
        shown: the directory's path in what is reported.
        preview: reads the beginning of a log from its files; None for anything else.

    Raises:
        UsageError: there is no log in the directory.
    """
    logs = sorted(_logs(directory), key=lambda one: (len(one.shown.parts), one.shown))
    known = [_Known(log, found) for log in logs[:_MOST] if (found := preview(log.files))]
    if not known:
        message = f"no log in this directory: it holds no {METRICS_FILE} and no other known log"
        raise UsageError(message, where=str(shown), fix="name a run directory, or a log")
    left_out = (
        [f"{len(logs) - _MOST} of {len(logs)} logs in {shown} were not read"] if len(logs) > _MOST else []
    )
    for run in _by_run(known):
        best = max(run, key=lambda one: one.rank).log
        path = shown / best.shown.relative_to(directory)
        is_own = best.files[0].parent == directory and (directory / RUN_SPEC_FILE).is_file()
        notes: list[str] = []
        if len(run) > 1:
            notes.append(f"{len(run)} logs of this run: {path} was read; to read another one, name it")
        elif not is_own:
            notes.append(f"read: {path}")
        yield Log(best.files, path), notes + left_out


def _logs(directory: Path) -> Iterator[Log]:
    depth = len(directory.parts)
    for root, folders, files in os.walk(directory):
        here = Path(root)
        # No pipe or device, which may never end; unlike `Path.is_file`, False where access is denied.
        names = [name for name in files if os.path.isfile(here / name)]  # noqa: PTH113
        if {METRICS_FILE, RUN_SPEC_FILE} <= set(names):  # a run of rlctl
            folders.clear()
            yield Log((here / METRICS_FILE,), here / METRICS_FILE)
            continue
        is_deepest = len(here.parts) - depth >= _DEEPEST
        folders[:] = [] if is_deepest else sorted(f for f in folders if not f.startswith("."))
        events = tuple(here / name for name in sorted(names) if _EVENTS in name)
        if events:
            yield Log(events, here if len(events) > 1 else events[0])
        for name in sorted(names):
            if Path(name).suffix in _SUFFIXES and name not in _REPEATS and _EVENTS not in name:
                yield Log((here / name,), here / name)


def _by_run(known: Sequence[_Known]) -> list[list[_Known]]:
    """The logs by run, in the order of the first log of each."""
    runs: list[list[_Known]] = []
    for log in sorted(known, key=lambda each: each.preview.content, reverse=True):
        same = [_is_same(run[0].preview.columns, log.preview.columns) for run in runs]
        near = [index for index, run in enumerate(runs) if _is_near(run[0], log)]
        if True in same:
            runs[same.index(True)].append(log)
        elif len(near) == 1 and same[near[0]] is None:
            runs[near[0]].append(log)
        else:
            runs.append([log])
    return sorted(runs, key=lambda run: known.index(run[0]))


def _is_same(a: Mapping[str, NDArray[np.float64]], b: Mapping[str, NDArray[np.float64]]) -> bool | None:
    """Whether the values of one log are in the other; None where they have no metric in common.

    Steps are not compared, because a log may count them otherwise.
    """
    common = [sorted((a[key], b[key]), key=len) for key in a if key in b and len(a[key]) and len(b[key])]
    if not common:
        return None
    least = _LEAST_SPREAD * _ROUNDING
    varied = [pair for pair in common if all(np.ptp(one) > least * (1 + np.abs(one).max()) for one in pair)]
    num_same = num_values = 0
    for values, others in varied or common:
        rounding = (_ROUNDING if varied else 0.0) + _ROUNDING * np.abs(values)
        ordered = np.sort(others)
        places = np.searchsorted(ordered, values)
        below = ordered[np.maximum(places - 1, 0)]
        above = ordered[np.minimum(places, len(ordered) - 1)]
        nearest = np.minimum(np.abs(values - below), np.abs(values - above))
        num_same += int((nearest <= rounding).sum())
        num_values += len(values)
    return num_same >= _SAME_SHARE * num_values


def _is_near(one: _Known, other: _Known) -> bool:
    """Whether two logs may be of one run by their places."""
    a = one.log.files[0]
    b = other.log.files[0]
    if a.parent == b.parent:
        return a.suffix != b.suffix
    return a.parent in b.parents or b.parent in a.parents
