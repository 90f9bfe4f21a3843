"""Time limits that do not depend on how busy the machine is: waiting for a processor does not count.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from rlctl.processes import cpu_seconds, with_descendants

#: Elapsed time, in limits, after which something that gets too little processor time is ended: the machine is
#: too busy for it.
STALLED = 10.0
#: Looks at what waits, per time limit: a process that starts and waits between two looks is not seen.
LOOKS = 4
#: Threads of a process whose waiting for a processor is counted, and processes of an episode.
MAX_THREADS, _MAX_PROCESSES = 64, 64


class MachineBusy(Exception):
    """Something got so little processor time that its time limit says nothing."""

    def __init__(self) -> None:
        super().__init__("the machine was too busy: it got too little processor time")


def seconds_left(limit_s: float, elapsed_s: float, waited_s: float) -> float:
    """Seconds until a time limit for which waiting for a processor does not count.

    Raises:
        MachineBusy: it is not reached, but the elapsed time is `STALLED` limits.
    """
    left = limit_s - (elapsed_s - waited_s)
    if left > 0 and elapsed_s > STALLED * limit_s:
        raise MachineBusy
    return left


def thread_waits(pids: Iterable[int]) -> dict[str, float]:
    """Thread → seconds for which it has waited for a processor, for the first threads of each process."""
    waits = {}
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):  # it ended, or the kernel does not count
            for thread in islice(os.scandir(f"/proc/{pid}/task"), MAX_THREADS):
                waits[thread.name] = int(Path(thread.path, "schedstat").read_text().split()[1]) / 1e9
    return waits


class WaitMeter:
    """Measures for how long processes waited for a processor; each call of `look` measures since the last.

    The waits of several threads overlap, so the longest counts. If the kernel does not count them, nothing
    waited.

    Attributes:
        waited: seconds up to the last look.
    """

    def __init__(self, waits: Callable[[], dict[str, float]]) -> None:
        self._waits = waits
        self.restart()

    def restart(self) -> None:
        """Starts to measure again from zero."""
        self._counted_at, self.waited, self._before = time.monotonic(), 0.0, self._waits()

    def look(self, own_s: float = 0.0) -> None:
        """Updates `waited`.

        Args:
            own_s: elapsed seconds since the last wait that the processes took from themselves.
        """
        now = time.monotonic()
        before = self._before
        self._before = self._waits()
        waits = [wait - before[thread] for thread, wait in self._before.items() if thread in before]
        if any(waits):  # the kernel counts a wait when it ends
            self.waited += max(0.0, min(max(waits), now - self._counted_at - own_s))
            self._counted_at = now


class TreeMeter:
    """A `WaitMeter` of the thread that creates it, and of processes and their descendants; the first look
    starts it.

    Waiting that these processes cause themselves is not counted: what they use of all processors is their
    own time.
    """

    def __init__(self) -> None:
        self._roots = list[int]()
        self._thread = threading.get_native_id()
        self._used_s = 0.0
        self._meter: WaitMeter | None = None

    def watch(self, pid: int) -> None:
        """Measures this process, and what it starts, too."""
        self._roots.append(pid)

    @property
    def waited(self) -> float:
        """Seconds up to the last look."""
        return self._meter.waited if self._meter else 0.0

    def look(self) -> None:
        """Updates `waited`."""
        waited = self.waited
        used = self._used()
        if self._meter is None:
            self._meter = WaitMeter(self._waits)
            self._used_s = used
        self._meter.look(max(0.0, used - self._used_s) / len(os.sched_getaffinity(0)))
        if self.waited > waited or used < self._used_s:
            self._used_s = used

    def _waits(self) -> dict[str, float]:
        waits = thread_waits(self._processes())
        with contextlib.suppress(OSError, IndexError):
            own = Path(f"/proc/self/task/{self._thread}/schedstat").read_text().split()[1]
            waits[str(self._thread)] = int(own) / 1e9
        return waits

    def _used(self) -> float:
        return sum(map(cpu_seconds, self._processes()))

    def _processes(self) -> list[int]:
        return with_descendants(self._roots, max_threads=MAX_THREADS, max_processes=_MAX_PROCESSES)
