"""Reads paths as `RunLog`s; format and framework are recognized by the content, not by the file's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.readers import binary_formats as binary
from rlctl.diagnose.readers import text_formats as text
from rlctl.diagnose.readers.collect import Collected, Collector, is_step_or_time
from rlctl.diagnose.readers.reader_files import (
    BUILT_IN,
    MetricFilter,
    Reader,
    Readers,
)
from rlctl.diagnose.readers.reading import LogReading, canonical_table
from rlctl.diagnose.readers.runs import Log, Preview, runs_in
from rlctl.diagnose.readers.source import LogSource, is_archive, opened, unpacked
from rlctl.diagnose.table import STDIN, RunLog
from rlctl.errors import UsageError
from rlctl.run_spec.load import RUN_SPEC_FILE
from rlctl.track.trust import spec_or_note

_KNOWN_LOGS = (
    "name a run directory, or a log: metrics.jsonl, trainer_state.json, files of TensorBoard or W&B, what "
    "verl, TRL, ms-swift, LLaMA-Factory, OpenRLHF, slime, prime-rl, NeMo-RL, SkyRL, AReaL, torchforge, "
    "ROLL, Oat, open-instruct or Tinker print, or a table of steps (CSV, JSONL, Parquet, or with pipes)"
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
_CONFIG_FILES = ("config.yaml", "args.json", ".hydra/config.yaml")
_CONTROLS = bytes({*range(1, 8), *range(14, 27), *range(28, 32)})
_BINARY_SHARE = 0.02
#: More rows with the same step are samples, not a log.
_MOST_PER_STEP = 8


def read_runs(
    path: Path,
    wanted: Collection[str],
    readers: Readers = BUILT_IN,
    on_unreadable: Callable[[UsageError], object] | None = None,
) -> Iterator[RunLog]:
    """Reads the logs of all runs at a path, of any framework, one after another.

    Args:
        path: a log file, plain or gzipped; a directory or a ZIP archive, searched to a depth of five for
            runs, of which the log with the most content is read; or `-` for standard input. A `spec.yaml`
            next to a log is taken as the spec of its run.
        wanted: canonical metrics to keep, where `<…>` stands for any text; memory grows only with the number
            of these and of rows.
        readers: the readers' files that apply.
        on_unreadable: is called with the error of each log in a directory or an archive that cannot be read,
            and the others are read; without it the error is raised.

    Raises:
        UsageError: the file does not exist, is not a known log, or contains no step and no error, or no known
            metric.
    """
    metrics = MetricFilter(wanted, readers)
    if path != STDIN and not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix="name a run directory, or a log")
    if path == STDIN or not (path.is_dir() or is_archive(path)):
        yield _read_log(Log((path,), path), metrics, ())
        return
    with unpacked(path) as directory:
        for log, notes in runs_in(directory, path, partial(_preview, readers=readers)):
            try:
                run = _read_log(log, metrics, notes)
            except UsageError as error:
                if on_unreadable is None:
                    raise
                on_unreadable(error)
                continue
            yield run


def read_run(
    path: Path,
    wanted: Collection[str],
    readers: Readers = BUILT_IN,
) -> RunLog:
    """Reads the log of the only run at a path, as `read_runs` does.

    Raises:
        UsageError: as `read_runs`; or there are several runs.
    """
    runs = read_runs(path, wanted, readers)
    first = next(runs)
    second = next(runs, None)
    if second is not None:
        shown = f"{first.path}, {second.path}"
        raise UsageError(f"several runs, such as {shown}", where=str(path), fix="name one of them")
    return first


def _read_log(log: Log, metrics: MetricFilter, notes: Sequence[str]) -> RunLog:
    readers = metrics.readers
    reading = LogReading(Collector(metrics.by_any_name, readers.step_keys), readers)
    _read_files(log.files, reading)
    collected = reading.collector.finish()
    run_spec = log.files[0].parent / RUN_SPEC_FILE
    has_spec = log.shown != STDIN and run_spec.is_file()
    spec, spec_notes = spec_or_note(run_spec) if has_spec else (None, [])
    reading.config = reading.config or _config_next_to(log.files[0])
    framework = _recognized(collected, reading, log.shown)
    if spec is not None and framework.uses_rlctl_names:
        framework = readers.named("rlctl")
    known = facts_of(spec) if spec else None
    unread = tuple(
        name
        for name in sorted(collected.names)
        if not (framework.translate(name) or is_step_or_time(name) or _USAGE.search(name))
    )
    own_notes = [] if len(collected.steps) else ["the log contains no step, only an error"]
    own_notes += [f"unknown metric names: {_some(unread)}"] if log.shown == STDIN and unread else []
    table, origins, facts, fact_origins = canonical_table(collected, framework, metrics, reading, known)
    return RunLog(
        path=log.shown,
        table=table,
        spec=spec,
        notes=tuple(dict.fromkeys((*notes, *own_notes, *reading.notes, *collected.notes, *spec_notes))),
        framework=framework.framework,
        origins=origins,
        facts=facts,
        fact_origins=fact_origins,
        exception=reading.exception,
        warnings=tuple(reading.warnings),
        unread=unread,
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")


def _recognized(collected: Collected, reading: LogReading, log: Path) -> Reader:
    """The framework that wrote the log; that of a log with an error only may be unknown.

    Raises:
        UsageError: the log contains no step and no error, or no known metric.
    """
    reader = reading.readers.of(collected.names, reading.hint)
    if not len(collected.steps) and reading.exception is not None:
        return reader or reading.readers.unknown
    if not len(collected.steps):
        message = "not a known log format: no line or row with a step, and no error"
        raise UsageError(message, where=str(log), fix=_PASTED if log == STDIN else _KNOWN_LOGS)
    if reader is None:
        message = f"not a known log format: it has no known metric, only {_some(sorted(collected.names))}"
        fix = f"{_PASTED if log == STDIN else _KNOWN_LOGS}; name your own metrics with --map FILE"
        raise UsageError(message, where=str(log), fix=fix)
    return reader


def _preview(files: Sequence[Path], readers: Readers) -> Preview | None:
    """The beginning of a log; None where it is no log."""
    reading = LogReading(
        Collector(MetricFilter(("<any>",), readers).by_any_name, readers.step_keys),
        readers,
        limit=_FIRST_ROWS,
    )
    try:
        _read_files(files, reading)
    except UsageError:
        return None
    num_rows = reading.collector.num_rows
    last_step = reading.collector.last_step
    collected = reading.collector.finish()
    if not num_rows:
        return Preview((0, 0, 0), {}) if reading.exception else None
    framework = readers.of(collected.names, reading.hint)
    if framework is None or num_rows > _MOST_PER_STEP * len(collected.steps):
        return None
    columns = {
        named.key: named.scale * values[np.isfinite(values)]
        for name, values in collected.columns.items()
        if (named := framework.translate(name))
    }
    known = {named.key for name in collected.names if (named := framework.translate(name))}
    return Preview((len(known), min(num_rows, _FIRST_ROWS), last_step), columns)


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
        with opened(files[0]) as source:
            _read(source, reading)
            reading.notes += source.notes
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(files[0])) from error


def _read(source: LogSource, reading: LogReading) -> None:
    head = source.head
    where = str(source.path)
    if not head.strip():
        message = "nothing in this compressed file can be read" if source.notes else "the log is empty"
        raise UsageError(message, where=where, fix=_KNOWN_LOGS)
    if head.startswith(binary.PARQUET_MARK):
        try:
            has_steps = binary.read_parquet(source.file, reading)
        except ValueError as error:
            raise UsageError(f"a Parquet file that cannot be read: {error}", where=where) from error
        if not has_steps:
            raise UsageError("a table without a step column", where=where, fix=_KNOWN_LOGS)
    elif binary.EVENTS_MARK in head[:64]:
        binary.read_events([source.file], reading)
    elif not head.startswith(binary.WANDB_MARK) and _is_binary(head):
        raise UsageError("not a known log format: a binary file", where=where, fix=_KNOWN_LOGS)
    else:
        with source.file.open("rb") as stream:
            if head.startswith(binary.WANDB_MARK):
                binary.read_wandb(stream, reading)
            elif header := text.csv_header(head, reading.collector.step_keys):
                text.read_csv(stream, *header, reading)
            elif not (text.may_be_document(head) and text.read_document(stream, reading)):
                stream.seek(0)
                text.read_lines(stream, reading)


def _is_binary(head: bytes) -> bool:
    """Whether the bytes contain more control characters than a text; any log may contain some NUL bytes."""
    rest = head.replace(b"\0", b"")
    controls = len(rest) - len(rest.translate(None, _CONTROLS))
    return controls > _BINARY_SHARE * len(head) or 0 < len(rest) < len(head) // 2
