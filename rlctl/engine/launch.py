"""Starts and monitors the ranks of this machine, and reports which one failed and why.

Ranks are started by torch's elastic agent, on which torchrun is based: if one rank dies, the agent stops
the others within seconds.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, UsageError, memory_failure, visible
from rlctl.leftovers import temporary_directory
from rlctl.processes import end_with_parent

_KINDS = {kind.exit_code: kind for kind in (RunFailure, UsageError, EnvironmentFailure)}
_ERRORS = "RLCTL_RANK_ERRORS"
_STOPPING_S = 3600
_WATCH_S = 0.5
_OWN_FAULT, _BUG, _LOST = range(3)


class LostRank(RunFailure):
    """Another rank ended or cannot be reached; the error of that rank is the cause."""


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
    what = "every rank imports this script, which would start the run again"
    fix = 'call rlctl.train under `if __name__ == "__main__":`'
    error = UsageError(what, where=sys.argv[0], fix=fix)
    if _ERRORS in os.environ:
        _report_error(error, _OWN_FAULT)
    raise error


def run_ranks(count: int, target: Callable[..., int], *args: object) -> int:
    """Runs `target(*args)` on `count` ranks of this machine.

    Args:
        target: a module-level function; an `RlctlError` that it raises on any rank is raised here.

    Returns:
        The return value of the target on rank 0: the run's exit code.

    Raises:
        RlctlError: the error that a rank raised, with the number of the rank.
        RunFailure: a rank died without an error message (killed, out of memory).
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Suppress the agent's long report on a failed rank; the rank's own error is clearer.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # On a stop signal, ranks finish their step and save, which may take long; by default torch kills them
    # after half a minute.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_STOPPING_S))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id=f"rlctl-{os.getpid()}",
        max_restarts=0,
        monitor_interval=_WATCH_S,
    )
    with temporary_directory("ranks") as directory:
        os.environ[_ERRORS] = str(directory)
        try:
            codes: dict[int, int] = elastic_launch(config, _rank_main)(os.getpid(), target, *args)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            # A killed rank reports nothing; other ranks may already have reported that they lost it.
            reported = _reported(directory, but_lost=failure.exitcode < 0)
            if reported is None and failure.exitcode > 128:  # the rank ended itself on a signal
                return int(failure.exitcode)
            raise reported or RunFailure(
                f"rank {rank} ended without an error message (exit code {failure.exitcode}); "
                "the others were stopped",
                fix="check the system log for an out-of-memory kill; resume with --resume",
            ) from error
        except SignalException as stop:
            if reported := _reported(directory):  # such as no disk space for the last checkpoint
                raise reported from None
            return 128 + int(stop.sigval)
        finally:
            os.environ.pop(_ERRORS, None)
    return codes[0]


def _rank_main(launcher: int, target: Callable[..., int], *args: object) -> int:
    """Runs one rank; writes an error where the parent reads it, then exits so that the others are stopped."""
    # A killed launcher releases the run's lock, so its ranks must end with it or not start at all.
    end_with_parent(signal.SIGKILL, launcher)
    try:
        code = target(*args)
        if code > 128:  # on a signal; the agent got it too and ignores return values
            sys.stdout.flush()
            os._exit(code)
        return code
    except LostRank as error:
        time.sleep(4 * _WATCH_S)  # let the agent detect the lost rank first
        _report_error(error, _LOST)
    except RlctlError as error:
        _report_error(error, _OWN_FAULT)
    except Exception as error:  # a bug: otherwise the parent would only see that a rank ended
        time.sleep(4 * _WATCH_S)  # a killed rank may be the cause: let the agent detect it first
        if failure := memory_failure(error):
            _report_error(failure, _OWN_FAULT)
        what = f"{type(error).__name__}: {error}"
        _report_error(RunFailure(what, fix=f"this is a bug; {_keep_traceback()}"), _BUG)


def end_rank(error: RlctlError) -> NoReturn:
    """Ends this process from any thread; reports the error to the launcher, or to the terminal."""
    if _ERRORS in os.environ:
        _report_error(error, _OWN_FAULT)
    sys.stderr.write(visible(f"error: {error}\n"))
    sys.stderr.flush()
    os._exit(error.exit_code)


def _report_error(error: RlctlError, order: int) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    record = {
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
        "code": error.exit_code,
        "rank": int(rank),
        "order": order,
    }
    (Path(os.environ[_ERRORS]) / f"{rank}.json").write_text(json.dumps(record))
    sys.stdout.flush()
    os._exit(error.exit_code)


def _keep_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="rlctl-traceback-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    return f"the traceback is in {file.name}"


def _reported(directory: Path, *, but_lost: bool = False) -> RlctlError | None:
    """The lowest rank's `RlctlError`; else a bug; else a `LostRank`; None if no rank reported an error.

    Args:
        directory: where ranks write their errors.
        but_lost: ignore `LostRank`.
    """
    records = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    records = [record for record in records if not but_lost or record["order"] != _LOST]
    if not records:
        return None
    record = min(records, key=lambda record: (record["order"], record["rank"]))
    kind = _KINDS.get(record["code"], RunFailure)
    return kind(f"{record['what']} (rank {record['rank']})", where=record["where"], fix=record["fix"])
