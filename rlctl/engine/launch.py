"""Starts and monitors the ranks of this machine, and reports which one failed and why.

The ranks form their process group through a file in a directory that only their user can read, so that the
launcher opens no port. If one rank fails, the others are stopped within seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rlctl.errors import (
    EnvironmentFailure,
    LostRank,
    RlctlError,
    RunFailure,
    UsageError,
    memory_failure,
    visible,
)
from rlctl.files import write_text
from rlctl.leftovers import lasting_directory, temporary_directory
from rlctl.processes import (
    STOPS,
    end_with_parent,
    handling_stops,
    restore_import_path,
    safe_import_path,
)

_KINDS = {kind.exit_code: kind for kind in (RunFailure, UsageError, EnvironmentFailure)}
_ERRORS = "RLCTL_RANK_ERRORS"
#: Environment variable with the file through which ranks that were started here form their process group.
STORE = "RLCTL_RANK_STORE"
_START_METHOD = "spawn"
#: Seconds: after a failure, in which other ranks may end by themselves; then, after SIGTERM.
_SETTLE_S, _STOP_S = 1.0, 30.0
_OWN_FAULT, _BUG, _LOST = range(3)


def under_torchrun() -> bool:
    """Whether this process is already one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def refuse_in_import() -> None:
    """Ends this process if it is a rank that imports the script which started it.

    A script that starts ranks where it is imported would start ranks in every rank.

    Raises:
        UsageError: as above, if the script was not started by `run_ranks`.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    message = "every rank imports this script, which would start the run again"
    fix = 'call rlctl.train under `if __name__ == "__main__":`'
    error = UsageError(message, where=sys.argv[0], fix=fix)
    if _ERRORS in os.environ:
        _report_error(error, _OWN_FAULT)
    raise error


def run_ranks(count: int, target: Callable[..., int], *args: object) -> int:
    """Runs `target(*args)` on `count` ranks of this machine.

    SIGINT and SIGTERM are passed on to the ranks, which save and end.

    Args:
        target: a module-level function; an `RlctlError` that it raises on any rank is raised here.

    Returns:
        The return value of the target on rank 0: the run's exit code; or 128 + the signal that stopped it.

    Raises:
        RlctlError: the error that a rank raised, with the number of the rank.
        RunFailure: a rank died without an error message (killed, out of memory).
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    with temporary_directory("ranks") as directory, _passing_signals() as (ranks, signals):
        sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared = sizes | {_ERRORS: str(directory), STORE: str(directory / "store")}
        context: Any = multiprocessing.get_context(_START_METHOD)
        # Also blocked in a rank until `_rank_main`: Ctrl-C must not end its imports with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            for number in range(count):
                os.environ |= shared | {"RANK": str(number), "LOCAL_RANK": str(number)}
                rank = context.Process(target=_rank_main, args=(os.getpid(), target, *args))
                with safe_import_path():
                    rank.start()
                ranks.append(rank)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            for name in (*shared, "RANK", "LOCAL_RANK"):
                os.environ.pop(name, None)
        codes = _wait(ranks)
        records = {int(path.stem): json.loads(path.read_text()) for path in directory.glob("*.json")}
    return _outcome(codes, records, signals)


@contextmanager
def _passing_signals() -> Iterator[tuple[list[BaseProcess], list[int]]]:
    """Context in which SIGINT and SIGTERM reach the ranks as SIGTERM; ranks that are left are killed.

    Yields:
        The ranks, to be filled by the caller, and the signals received.
    """
    ranks: list[BaseProcess] = []
    signals: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        signals.append(number)
        for rank in ranks:
            rank.terminate()

    with handling_stops(on_signal):
        try:
            yield ranks, signals
        finally:
            for rank in ranks:
                rank.kill()


def _wait(ranks: list[BaseProcess]) -> dict[int, int]:
    """Waits until all ranks have ended; after a failure stops the others.

    Returns:
        Rank → exit code, of the ranks that were not stopped.
    """
    deadline = None
    while running := [rank for rank in ranks if rank.exitcode is None]:
        if deadline is None and any(rank.exitcode for rank in ranks):
            deadline = time.monotonic() + _SETTLE_S
        seconds = None if deadline is None else deadline - time.monotonic()
        if seconds is not None and seconds <= 0:
            break
        connection.wait([rank.sentinel for rank in running], seconds)
    codes = {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode is not None}
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + _STOP_S
    for rank in running:
        rank.join(max(0.0, deadline - time.monotonic()))
    return codes


def _outcome(codes: dict[int, int], records: dict[int, dict[str, Any]], signals: list[int]) -> int:
    """The run's exit code.

    Args:
        codes: see `_wait`.
        records: rank → what it returned or raised.
        signals: those that the launcher received.

    Raises:
        RlctlError: in this order: the first own error of a rank; a rank that was killed; a bug; a `LostRank`.
    """
    failed = {rank: each for rank, each in records.items() if "what" in each}
    first = min(failed, key=lambda rank: (failed[rank]["order"], failed[rank]["at"]), default=None)
    has_own = first is not None and failed[first]["order"] == _OWN_FAULT
    silent = {rank: code for rank, code in codes.items() if code and rank not in records}
    killed = {rank: code for rank, code in silent.items() if code <= 128 and not (signals and -code in STOPS)}
    if killed and not has_own:
        rank, code = next(iter(killed.items()))
        raise RunFailure(
            f"rank {rank} ended without an error message (exit code {code}); the others were stopped",
            fix="check the system log for an out-of-memory kill; resume with --resume",
        )
    if first is not None and (has_own or not silent):
        record = failed[first]
        kind = _KINDS.get(record["code"], RunFailure)
        message = f"{record['what']} (rank {first})"
        raise kind(message, where=record["where"], fix=record["fix"])
    if silent:  # by a signal, before they could save
        return 128 + signals[0] if signals else max(silent.values())
    code = int(records[0]["code"])
    return 128 + signals[0] if signals and code > 128 else code


def _rank_main(launcher: int, target: Callable[..., int], *args: object) -> None:
    """Runs one rank; writes what it returns or raises where the launcher reads it."""
    # A killed launcher releases the run's lock, so its ranks must end with it or not start at all.
    end_with_parent(signal.SIGKILL, launcher)
    restore_import_path()
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        code = target(*args)
    except LostRank as error:
        _report_error(error, _LOST)
    except RlctlError as error:
        _report_error(error, _OWN_FAULT)
    except Exception as error:  # a bug: otherwise the launcher would only see that a rank ended
        failure = memory_failure(error)
        if failure:
            _report_error(failure, _OWN_FAULT)
        message = f"{type(error).__name__}: {error}"
        _report_error(RunFailure(message, fix=f"this is a bug; {_keep_traceback()}"), _BUG)
    _record({"code": code})


def end_rank(error: RlctlError) -> NoReturn:
    """Ends this process from any thread; reports the error to the launcher, or to the terminal."""
    if _ERRORS in os.environ:
        _report_error(error, _OWN_FAULT)
    sys.stderr.write(visible(f"error: {error}\n"))
    sys.stderr.flush()
    os._exit(error.exit_code)


def _report_error(error: RlctlError, order: int) -> NoReturn:
    words = {"what": error.what, "where": error.where, "fix": error.fix}
    _record(words | {"code": error.exit_code, "order": order, "at": time.monotonic()})
    sys.stdout.flush()
    os._exit(error.exit_code)


def _record(record: dict[str, Any]) -> None:
    write_text(Path(os.environ[_ERRORS]) / f"{os.environ.get('RANK', '0')}.json", json.dumps(record))


def _keep_traceback() -> str:
    names: dict[str, Any] = {"prefix": "rlctl-traceback-", "suffix": ".txt", "dir": lasting_directory()}
    with tempfile.NamedTemporaryFile("w", delete=False, **names) as file:
        traceback.print_exc(file=file)
    return f"the traceback is in {file.name}"
