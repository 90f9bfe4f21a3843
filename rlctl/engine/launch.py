"""Start the ranks of this machine, watch them, and say which one failed and why.

Ranks are started by torch's own elastic agent, the machinery behind torchrun: one that dies takes
the others with it within seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, UsageError, memory_failure
from rlctl.leftovers import temporary_directory
from rlctl.processes import end_with_parent

_KINDS: dict[int, type[RlctlError]] = {1: RunFailure, 2: UsageError, 4: EnvironmentFailure}
_ERRORS = "RLCTL_RANK_ERRORS"
_STOPPING_S = 3600
_WATCH_S = 0.5
_OWN_FAULT, _BUG, _LOST = range(3)


class LostRank(RunFailure):
    """Another rank has ended or cannot be reached: that rank's error is the cause, not this one."""


def under_torchrun() -> bool:
    """Whether this process is already one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(count: int, target: Callable[..., int], *args: object) -> int:
    """Run `target(*args)` on `count` ranks of this machine.

    Args:
        count: ranks.
        target: a module-level function; an `RlctlError` it raises on any rank is raised here.

    Returns:
        What the target returned on rank 0: the run's exit code.

    Raises:
        RlctlError: as a rank raised it, naming the rank.
        RunFailure: a rank died without a word (killed, out of memory).
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent reports a failed rank with pages of its own; the rank's error says it better.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # Asked to stop, ranks finish their step and save, however long that takes; torch would kill them
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
            # A killed rank reports nothing; the others may have reported meanwhile that they lost it.
            reported = _reported(directory, but_lost=failure.exitcode < 0)
            if reported is None and failure.exitcode > 128:  # stopped by a signal, and said so itself
                return int(failure.exitcode)
            raise reported or RunFailure(
                f"rank {rank} ended without an error message (exit code {failure.exitcode}); "
                "the others were stopped",
                fix="look for an out-of-memory kill in the system log; resume with --resume",
            ) from error
        except SignalException as stop:
            if reported := _reported(directory):  # such as a last checkpoint that found no room
                raise reported from None
            return 128 + int(stop.sigval)
        finally:
            os.environ.pop(_ERRORS, None)
    return codes[0]


def _rank_main(launcher: int, target: Callable[..., int], *args: object) -> int:
    """One rank: leave the error where the parent finds it, then end so that the others are stopped."""
    # A killed launcher frees the run's lock: no rank may go on, nor begin if it was killed meanwhile.
    end_with_parent(signal.SIGKILL, launcher)
    try:
        code = target(*args)
        if code > 128:  # stopped by a signal: so is the agent, which no longer takes return values
            sys.stdout.flush()
            os._exit(code)
        return code
    except LostRank as error:
        time.sleep(4 * _WATCH_S)  # let the agent notice the lost one first
        _leave_word(error, _LOST)
    except RlctlError as error:
        _leave_word(error, _OWN_FAULT)
    except Exception as error:  # a bug: without this the parent would only see that a rank is gone
        time.sleep(4 * _WATCH_S)  # it may come of a killed rank: let the agent notice that one first
        if failure := memory_failure(error):
            _leave_word(failure, _OWN_FAULT)
        what = f"{type(error).__name__}: {error}"
        _leave_word(RunFailure(what, fix=f"this is a bug; {_keep_traceback()}"), _BUG)


def end_rank(error: RlctlError) -> NoReturn:
    """End this process from any thread: the error reaches the launcher, or the terminal if there is none."""
    if _ERRORS in os.environ:
        _leave_word(error, _OWN_FAULT)
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(error.exit_code)


def _leave_word(error: RlctlError, order: int) -> NoReturn:
    rank = os.environ["RANK"]
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
    """The error of the lowest rank that knew what was wrong; else a bug; else that ranks lost one another.

    Args:
        directory: where ranks leave their errors.
        but_lost: leave out that ranks lost one another.
    """
    records = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    records = [record for record in records if not but_lost or record["order"] != _LOST]
    if not records:
        return None
    record = min(records, key=lambda record: (record["order"], record["rank"]))
    kind = _KINDS.get(record["code"], RunFailure)
    return kind(f"{record['what']} (rank {record['rank']})", where=record["where"], fix=record["fix"])
