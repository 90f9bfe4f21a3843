"""Ends a run on a signal, or if its ranks hang.

The first signal finishes the step and saves, the second ends the process at once.

Hanging ranks: reports which rank is waited for, writes all thread stacks, then ends the run.

A thread of each rank monitors its main thread (and the thread that samples ahead): while their Python stacks
change or phases begin, the rank makes progress. Each rank writes its phase and its idle time to the file of
its node in the run directory, see `rlctl.train.peers`; `rlctl watch` reads it, too. The run ends only if
every rank was idle for the whole timeout.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from rlctl.engine.launch import end_rank
from rlctl.errors import RlctlError, RunFailure, visible
from rlctl.files import open_to_append
from rlctl.processes import handling_stops, progress
from rlctl.track.console import activities
from rlctl.track.heartbeats import Summary
from rlctl.train.peers import Peers

#: Seconds. A signal this soon after the first is a duplicate: a terminal and Slurm signal every process,
#: and the launcher also forwards the signal to its ranks.
_DUPLICATE_S = 1.0
_STOPPING = b"\nstopping after this step is saved; press Ctrl-C again to exit now\n"
#: Fractions of the timeout after which the user is warned, and after which stacks are written.
_WARN, _WRITE_STACKS = 1 / 20, 1 / 4
_INTERVAL_S = 2.0


@dataclass
class StopRequest:
    """Whether the run is to end.

    Attributes:
        signal_number: the signal that requested it; 0: none.
        at_once: end the process at the first signal: while ranks wait for one another there is nothing to
            save.
        is_shown: a live display shows that the run is stopping: an additional printed line would corrupt it.
    """

    signal_number: int = 0
    at_once: bool = False
    is_shown: bool = False


def end_process(signal_number: int) -> None:
    """Ends the process at once, with the exit code that a shell reports for the signal."""
    os._exit(128 + signal_number)


@contextlib.contextmanager
def catching_signals(on_second: Callable[[int], None] = end_process) -> Iterator[StopRequest]:
    """Context in which SIGINT and SIGTERM set a `StopRequest`; the second signal calls `on_second`.

    Only the main thread can handle signals: in another thread no signal stops the run.
    """
    request = StopRequest()
    first_signal_at = 0.0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal first_signal_at
        if request.at_once:
            os._exit(128 + number)
        if not request.signal_number:
            request.signal_number = number
            first_signal_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0" and not request.is_shown:  # one rank prints
                # A handler must not use buffered output. stderr may be closed, with its ssh session.
                with contextlib.suppress(OSError):
                    os.write(2, _STOPPING)
        elif time.monotonic() - first_signal_at > _DUPLICATE_S:
            on_second(number)

    with handling_stops(on_signal):
        yield request


#: Phases in which the main thread waits for no sampling, which may go on meanwhile.
_TRAINING = frozenset(
    {"old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "save_checkpoint"}
)


class Watchdog:
    """Monitors this rank: a context manager, and a tracker sink that receives steps and phases.

    Args:
        rank, world_size: index of this rank, number of ranks.
        run_dir: where ranks exchange heartbeats.
        timeout_s: seconds without progress on any rank after which the run is ended.
        per_node: ranks of a node; None: all ranks are on this one.
        end: ends this process with the error.
    """

    name = "watchdog"

    def __init__(
        self,
        rank: int,
        world_size: int,
        run_dir: Path,
        timeout_s: float,
        per_node: int | None = None,
        end: Callable[[RlctlError], None] = end_rank,
    ) -> None:
        self._rank = rank
        self._run_dir = run_dir
        self._timeout = timeout_s
        self._end = end
        self._interval = min(_INTERVAL_S, timeout_s / 60)
        self._place = "starting"
        self._step = 0
        self._phases = 0
        self._moved = time.monotonic()
        self._signature: object = None
        self._peers = Peers(
            rank,
            world_size,
            run_dir,
            per_node=per_node or world_size,
            interval_s=self._interval,
            now=self._moved,
        )
        self._warned = self._dumped = self._trains = False
        self.show: Callable[[str], None] = _print
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def begin_phase(self, phase: str) -> None:
        """Records that a phase begins: free text, or a name of `timing_s/*`."""
        self._phases += 1
        activity = activities().get(phase)
        self._place = f"step {self._step + 1}, {activity}" if activity else phase
        self._trains = phase in _TRAINING
        self._moved = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a completed step."""
        del metrics
        self._step = step

    def close(self, status: str) -> None:
        """Does nothing: the tracker closes before the engines; monitoring lasts until the context ends."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._peers.leave()

    def _watch(self) -> None:
        last = time.monotonic()
        self._exchange(0.0, last)  # before the first interval, for `rlctl watch`
        while not self._is_over.wait(self._interval):
            now = time.monotonic()
            if (stopped := now - last - 2 * self._interval) > 0:
                # this thread did not run either, so the whole process was suspended
                self._moved = min(now, self._moved + stopped)
            signature = _stacks(self._trains)
            if signature != self._signature:
                self._signature = signature
                self._moved = now
            idle = now - self._moved
            self._exchange(idle, now)
            self._react(idle, self._peers.known(now))
            last = time.monotonic()

    def _exchange(self, idle: float, now: float) -> None:
        self._peers.exchange(self._phases, self._place, idle, now)

    def _react(self, own_idle: float, others: Summary) -> None:
        """Warns, writes stacks or ends the run, by the seconds since any rank made progress."""
        idle = min(own_idle, others.idle_s)
        if idle < self._timeout * _WARN:
            self._warned = self._dumped = False
            return
        words = f"{self._place}: no progress for {idle:.0f} s{self._awaited(others)}"
        if not self._warned:
            self._warned = True
            if not 0 <= others.lowest < self._rank:  # the lowest running rank prints for all
                self.show(f"warning: {words}")
        if not self._dumped and idle >= self._timeout * _WRITE_STACKS:
            self._dumped = True
            self._write_stacks()
        if idle >= self._timeout:
            self._end(
                RunFailure(
                    words,
                    where=str(self._stacks_file),
                    fix="see the stacks of all threads in that file; continue with --resume RUN_DIR; if a "
                    "step takes that long, set trainer.hang_timeout higher",
                )
            )
            self._is_over.set()

    def _awaited(self, others: Summary) -> str:
        """Names the ranks that the others wait for, if they can be determined."""
        if others.silent.count:
            message = "is stopped or cannot be reached"
            if others.unjoined:
                message = "is stopped or never joined" if others.left_over else "never joined"
            return f"; waiting for {others.silent}, no heartbeat for {others.silent_s:.0f} s: it {message}"
        if 0 <= others.phases < self._phases:
            return f"; waiting for {others.behind}"
        return ""

    @property
    def _stacks_file(self) -> Path:
        return self._run_dir / f"stacks-rank{self._rank}.txt"

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError), open_to_append(self._stacks_file, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self._place}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def _stacks(trains: bool) -> object:
    """Stack positions of the main and the sampling threads, and the count of `processes.progress`.

    In training nothing waits for the sampling threads, so that their progress is none of the run.
    """
    frames = sys._current_frames()
    signature = [(progress(of_main=trains), 0)]
    for thread in threading.enumerate():
        samples = thread.name.startswith("rollouts") and not trains
        if thread is not threading.main_thread() and not samples:
            continue
        frame = frames.get(thread.ident or 0)
        while frame:
            signature.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
    return signature


def _print(text: str) -> None:
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()
