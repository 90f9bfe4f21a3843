"""From a path to a `RunLog`: a log is recognised by what it holds, not by its name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rlctl.diagnose.readers.build import OURS, Wanted, build, dialect_of
from rlctl.diagnose.readers.choose import Candidate, Worth, choose
from rlctl.diagnose.readers.collect import Collected, Collector
from rlctl.diagnose.readers.framework import Dialect
from rlctl.diagnose.readers.reading import Reading
from rlctl.diagnose.readers.source import Watch
from rlctl.diagnose.readers.streams import LOOKED_FOR, read_files
from rlctl.diagnose.table import STDIN, RunLog, facts_of
from rlctl.errors import SpecError, UsageError
from rlctl.spec.load import RUN_SPEC_FILE, load_spec
from rlctl.spec.run import RunSpec

_NAMES_SHOWN = 8
_ROWS_LOOKED_AT = 50


def read_run(path: Path, wanted: Collection[str], watch: Watch | None = None) -> RunLog:
    """Read one run's log, whoever wrote it.

    Args:
        path: a log file, plain or gzipped; a directory, of whose logs the one that says most is read; `-` for
            standard input. A `spec.yaml` beside the log is taken for the run's.
        wanted: canonical metrics to keep, `<…>` standing for any text; memory grows with these and the number
            of rows only.
        watch: told how far the file was read, in bytes.

    Raises:
        UsageError: no such file, not a log that is known, no step or no known metric in it.
    """
    wants = Wanted(wanted)
    notes: list[str] = []
    candidate = Candidate((path,), path)
    if path != STDIN and path.is_dir():
        candidate, notes = choose(path, _worth)
    elif path != STDIN and not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix="name a run directory, or a log")
    reading = Reading(Collector(wants.by_any_name), watch=watch)
    read_files(candidate.files, reading)
    collected = reading.collector.finish()
    spec, spec_notes = _spec_beside(candidate.shown)
    dialect = _dialect(collected, reading, candidate.shown)
    if spec is not None and dialect.uses_ours:
        dialect = OURS
    built = build(collected, dialect, wants, reading, facts_of(spec) if spec else None)
    return RunLog(
        path=candidate.shown,
        table=built.table,
        spec=spec,
        notes=tuple(dict.fromkeys((*notes, *reading.notes, *collected.notes, *spec_notes))),
        framework=built.framework,
        origins=built.origins,
        facts=built.facts,
    )


def _dialect(collected: Collected, reading: Reading, log: Path) -> Dialect:
    """Who wrote it.

    Raises:
        UsageError: there is no step, or no metric that is known.
    """
    found = dialect_of(collected.names, reading.hint)
    if not len(collected.steps):
        raise UsageError(
            "not a log that is known: no line or row with a step", where=str(log), fix=LOOKED_FOR
        )
    if found is None:
        names = sorted(collected.names)
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
        what = f"not a log that is known: no metric in it is, only {shown}"
        raise UsageError(what, where=str(log), fix=LOOKED_FOR)
    return found


def _worth(candidate: Candidate) -> Worth:
    """By a first look; all 0 for what is no log."""
    reading = Reading(Collector(lambda name: True), limit=_ROWS_LOOKED_AT)
    try:
        read_files(candidate.files, reading)
    except UsageError:
        return Worth(0, 0, 0)
    collected = reading.collector.finish()
    dialect = dialect_of(collected.names, reading.hint)
    if dialect is None or not reading.collector.num_rows:
        return Worth(0, 0, 0)
    known = {named.key for name in collected.names if (named := dialect.translate(name))}
    rows = min(reading.collector.num_rows, _ROWS_LOOKED_AT)
    return Worth(len(known), rows, reading.collector.last_step)


def _spec_beside(log: Path) -> tuple[RunSpec | None, tuple[str, ...]]:
    """The run's spec, if it lies where `rlctl train` puts it; a broken one is noted, not fatal."""
    path = log.parent / RUN_SPEC_FILE
    if log == STDIN or not path.is_file():
        return None, ()
    try:
        return load_spec([], [path], []).spec, ()
    except SpecError as error:
        first = error.problems[0]
        return None, (f"{path} is left out: {first.key or first.where or ''} {first.what}",)
