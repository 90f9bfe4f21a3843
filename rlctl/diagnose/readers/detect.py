"""From a path to a `RunLog`: the file is recognised by what it holds, not by its name."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from pathlib import Path

from rlctl.diagnose.readers import own
from rlctl.diagnose.table import Facts, Origin, RunLog, facts_of
from rlctl.errors import SpecError, UsageError
from rlctl.spec.load import RUN_SPEC_FILE, load_spec
from rlctl.spec.run import RunSpec

LOG_FILE = "metrics.jsonl"
_LINES_LOOKED_AT = 50


def read_run(path: Path, wanted: Collection[str]) -> RunLog:
    """Read a run directory, or a log file.

    Args:
        path: a run directory (its `metrics.jsonl` is read), or a log file; a `spec.yaml` beside the log is
            taken for the run's.
        wanted: metrics to keep; memory grows with these and the number of steps only.

    Raises:
        UsageError: no such file, not a log that is known, or no step in it.
    """
    log = path / LOG_FILE if path.is_dir() else path
    if not log.is_file():
        what = (
            f"not a run directory: it holds no {LOG_FILE}" if path.is_dir() else "no such file or directory"
        )
        raise UsageError(what, where=str(path), fix="name a run directory, or a metrics.jsonl")
    try:
        with log.open("rb") as file:
            is_ours = own.recognises(islice(file, _LINES_LOOKED_AT))
            file.seek(0)
            if not is_ours:
                _refuse(log)
            table, notes = own.read(file, wanted)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=str(log)) from error
    spec, spec_notes = _spec_beside(log)
    return RunLog(
        log,
        table,
        spec,
        notes + spec_notes,
        origins={key: Origin(key) for key in table.columns},
        facts=facts_of(spec) if spec else Facts(),
    )


def _refuse(log: Path) -> None:
    what = "the log is empty" if log.stat().st_size == 0 else "not a log that is known"
    raise UsageError(what, where=str(log), fix=f"name a run directory of rlctl, or its {LOG_FILE}")


def _spec_beside(log: Path) -> tuple[RunSpec | None, tuple[str, ...]]:
    """The run's spec, if it lies where `rlctl train` puts it; a broken one is noted, not fatal."""
    path = log.parent / RUN_SPEC_FILE
    if not path.is_file():
        return None, ()
    try:
        return load_spec([], [path], []).spec, ()
    except SpecError as error:
        first = error.problems[0]
        return None, (f"{path} is left out: {first.key or first.where or ''} {first.what}",)
