"""Reads a path as a `RunLog`; format and framework are recognized by the content, not by the file's name."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.readers import binary_formats as binary
from rlctl.diagnose.readers import text_formats as text
from rlctl.diagnose.readers.collect import Collected, Collector, LogReading, is_step_or_time
from rlctl.diagnose.readers.framework_names import (
    RLCTL,
    FrameworkNames,
    MetricFilter,
    canonical_table,
    framework_of,
)
from rlctl.diagnose.readers.source import LogSource, OpenFile, opened
from rlctl.diagnose.table import STDIN, RunLog
from rlctl.errors import UsageError
from rlctl.spec.load import RUN_SPEC_FILE, spec_or_note
from rlctl.track.jsonl import DISCARDED_FILE, METRICS_FILE

_KNOWN_LOGS = (
    "name a run directory, or a log: metrics.jsonl, trainer_state.json, files of TensorBoard or W&B, what "
    "verl, TRL, ms-swift, LLaMA-Factory, OpenRLHF, slime, prime-rl, NeMo-RL, SkyRL or AReaL print, or a "
    "table of steps (CSV, JSONL, Parquet, or with pipes)"
)
_PASTED = (
    "paste a line of metrics as the trainer prints it, a printed dictionary, `name: value` lines, or a table "
    "of numbers with its header line"
)
_NAMES_SHOWN = 8
_FIRST_ROWS = 50
#: Names of times, speeds and memory, which are not metrics.
_USAGE = re.compile(
    r"time|timing|speed|throughput|per_(?:sec|gpu)|memory|mfu|seqlen|percentage|epoch|episode", re.I
)
_ANY_METRIC = MetricFilter(("<any>",))
_CONFIG_FILES = ("config.yaml", "args.json", ".hydra/config.yaml")
_CONTROLS = bytes({*range(1, 8), *range(14, 27), *range(28, 32)})
_BINARY_SHARE = 0.02
#: Suffixes of the files in a directory that may be logs.
_SUFFIXES = frozenset(
    {".jsonl", ".wandb", ".json", ".csv", ".tsv", ".parquet", ".log", ".txt", ".out", ".err", ".gz"}
)
_EVENTS = "tfevents"
_DEEPEST = 5
#: Maximum number of logs of a directory that are examined; logs in deeper directories are left out first.
_MOST = 200


class _Candidate(NamedTuple):
    """One log."""

    files: tuple[Path, ...]  # its files: several for TensorBoard, one otherwise
    shown: Path  # the path to report


def read_run(path: Path, wanted: Collection[str], open_file: OpenFile = io.FileIO) -> RunLog:
    """Reads one run's log, of any framework.

    Args:
        path: a log file, plain or gzipped; a directory, searched to a depth of five for the log with the most
            content; or `-` for standard input. A `spec.yaml` next to the log is taken as the spec of the run.
        wanted: canonical metrics to keep, where `<…>` stands for any text; memory grows only with the number
            of these and of rows.
        open_file: opens a text log for reading, for example to show the progress.

    Raises:
        UsageError: the file does not exist, is not a known log, or contains no step or no known metric.
    """
    metrics = MetricFilter(wanted)
    notes: list[str] = []
    candidate = _Candidate((path,), path)
    if path != STDIN and path.is_dir():
        candidate, notes = _chosen(path)
    elif path != STDIN and not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix="name a run directory, or a log")
    reading = LogReading(Collector(metrics.by_any_name), open_file)
    _read_files(candidate.files, reading)
    collected = reading.collector.finish()
    run_spec = candidate.shown.parent / RUN_SPEC_FILE
    has_spec = candidate.shown != STDIN and run_spec.is_file()
    spec, spec_notes = spec_or_note(run_spec) if has_spec else (None, [])
    reading.config = reading.config or _config_next_to(candidate.shown)
    framework = _recognized(collected, reading, candidate.shown)
    if spec is not None and framework.uses_rlctl_names:
        framework = RLCTL
    known = facts_of(spec) if spec else None
    unread = tuple(
        name
        for name in sorted(collected.names)
        if not (framework.translate(name) or is_step_or_time(name) or _USAGE.search(name))
    )
    if candidate.shown == STDIN and unread:
        notes.append(f"unknown metric names: {_some(unread)}")
    table, origins, facts, fact_origins = canonical_table(collected, framework, metrics, reading, known)
    return RunLog(
        path=candidate.shown,
        table=table,
        spec=spec,
        notes=tuple(dict.fromkeys((*notes, *reading.notes, *collected.notes, *spec_notes))),
        framework=framework.framework,
        origins=origins,
        facts=facts,
        fact_origins=fact_origins,
        exception=reading.exception,
        unread=unread,
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")


def _recognized(collected: Collected, reading: LogReading, log: Path) -> FrameworkNames:
    """The framework that wrote the log.

    Raises:
        UsageError: the log contains no step, or no known metric.
    """
    found = framework_of(collected.names, reading.hint)
    if not len(collected.steps):
        what = "not a known log format: no line or row with a step"
    elif found is None:
        what = f"not a known log format: it has no known metric, only {_some(sorted(collected.names))}"
    else:
        return found
    if error := reading.exception:
        where = f" in {error.where}" if error.where else ""
        what += f"; it ends with {error.text}{where} (line {error.line})"
    raise UsageError(what, where=str(log), fix=_PASTED if log == STDIN else _KNOWN_LOGS)


def _chosen(directory: Path) -> tuple[_Candidate, list[str]]:
    """The log with the most content, the newest of several with equally much, and notes that name it.

    A `metrics.jsonl` next to a `spec.yaml` directly in the directory is always chosen, without a note.

    Raises:
        UsageError: there is no log in the directory.
    """
    log = directory / METRICS_FILE
    if log.is_file() and (directory / RUN_SPEC_FILE).is_file():
        return _Candidate((log,), log), []
    candidates = sorted(_candidates(directory), key=lambda one: len(one.shown.parts))[:_MOST]
    known = [(content, _age(one), one) for one in candidates if (content := _content(one))]
    if not known:
        what = f"no log in this directory: it holds no {METRICS_FILE} and no other known log"
        raise UsageError(what, where=str(directory), fix="name a run directory, or a log")
    best = max(known, key=lambda found: found[:2])[2]
    if len(known) == 1:
        return best, [f"read: {best.shown}"]
    return best, [f"{len(known)} logs in {directory}: {best.shown} was read; to read another one, name it"]


def _candidates(directory: Path) -> Iterator[_Candidate]:
    depth = len(directory.parts)
    for root, folders, names in os.walk(directory):
        here = Path(root)
        is_deepest = len(here.parts) - depth >= _DEEPEST
        folders[:] = [] if is_deepest else sorted(f for f in folders if not f.startswith("."))
        events = tuple(here / name for name in sorted(names) if _EVENTS in name)
        if events:
            yield _Candidate(events, here if len(events) > 1 else events[0])
        for name in sorted(names):
            if Path(name).suffix in _SUFFIXES and name != DISCARDED_FILE and _EVENTS not in name:
                yield _Candidate((here / name,), here / name)


def _age(candidate: _Candidate) -> float:
    return max(file.stat().st_mtime for file in candidate.files if file.exists())


def _content(candidate: _Candidate) -> tuple[int, int, int] | None:
    """Number of metrics and of rows at a log's begin, and the newest step there; None where it is no log."""
    reading = LogReading(Collector(_ANY_METRIC.by_any_name), limit=_FIRST_ROWS)
    try:
        _read_files(candidate.files, reading)
    except UsageError:
        return None
    collected, num_rows = reading.collector.finish(), reading.collector.num_rows
    framework = framework_of(collected.names, reading.hint)
    if framework is None or not num_rows:
        return None
    known = {named.key for name in collected.names if (named := framework.translate(name))}
    return len(known), min(num_rows, _FIRST_ROWS), reading.collector.last_step


def _config_next_to(log: Path) -> dict[str, Any]:
    """The configuration that W&B, ms-swift or Hydra wrote next to a log; empty if there is none."""
    for name in _CONFIG_FILES if log != STDIN else ():
        try:
            content = yaml.safe_load((log.parent / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            continue
        if isinstance(content, dict):
            return {
                key: value["value"] if isinstance(value, dict) and "value" in value else value
                for key, value in content.items()
            }
    return {}


def _read_files(files: Sequence[Path], reading: LogReading) -> None:
    """Reads one log: a file, or the event files of one TensorBoard directory.

    Raises:
        UsageError: the log cannot be read, is empty or binary, or is a table without a step column.
    """
    try:
        if len(files) > 1:
            binary.read_events(files, reading)
            return
        with opened(files[0], reading.open_file) as source:
            _read(source, reading)
            reading.notes += source.notes
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(files[0])) from error


def _read(source: LogSource, reading: LogReading) -> None:
    head, where = source.head, str(source.path)
    if not head.strip():
        what = "nothing in this compressed file can be read" if source.is_gzip else "the log is empty"
        raise UsageError(what, where=where, fix=_KNOWN_LOGS)
    if head.startswith(binary.PARQUET_MARK):
        with source.on_disk() as path:
            try:
                has_steps = binary.read_parquet(path, reading)
            except ValueError as error:
                raise UsageError(f"a Parquet file that cannot be read: {error}", where=where) from error
        if not has_steps:
            raise UsageError("a table without a step column", where=where, fix=_KNOWN_LOGS)
    elif head.startswith(binary.WANDB_MARK):
        with source.open() as stream:
            binary.read_wandb(stream, reading)
    elif binary.EVENTS_MARK in head[:64]:
        with source.on_disk() as path:
            binary.read_events([path], reading)
    elif _is_binary(head):
        raise UsageError("not a known log format: a binary file", where=where, fix=_KNOWN_LOGS)
    else:
        _read_text(source, reading)


def _is_binary(head: bytes) -> bool:
    """Whether the bytes contain more control characters than a text; any log may contain some NUL bytes."""
    rest = head.replace(b"\0", b"")
    controls = len(rest) - len(rest.translate(None, _CONTROLS))
    return controls > _BINARY_SHARE * len(head) or 0 < len(rest) < len(head) // 2


def _read_text(source: LogSource, reading: LogReading) -> None:
    if header := text.csv_header(source.head):
        with source.open() as stream:
            text.read_csv(stream, *header, reading)
        return
    if text.may_be_document(source.head):
        with source.open() as stream:
            if text.read_document(stream, reading):
                return
    with source.open() as stream:
        text.read_lines(stream, reading)
