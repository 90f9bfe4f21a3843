"""What a rank knows about the other ranks of the run, by their heartbeats.

The ranks of a node read one another's heartbeats in the file of the node. One of them, the lowest that is
running, also reads the files of other nodes, a few at a time, and summarises them for the others of its node:

    rank 0 ─┐             ┌─ rank 8
    rank 1 ─┤ file ⇄ file ├─ rank 9      opens per interval: nodes × min(nodes − 1, `_FILES_AT_ONCE`)
    …       │ of node 0   │  …
    rank 7 ─┘   of node 1 └─ rank 15
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlctl.track.heartbeats import Beat, Names, NodeFile, Summary, beats_of_node

#: Seconds without a change of its heartbeat after which a rank counts as not running.
SILENT_S = 10.0
#: Files of other nodes that are opened in one interval.
_FILES_AT_ONCE = 16


@dataclass(slots=True)
class _Peer:
    """State of another rank; `seen`: when its heartbeat last changed, on the monotonic clock."""

    seen: float
    beat: Beat | None = None
    leftover: Beat | None = None  # first beat read, maybe of an earlier process: only a change counts

    def hear(self, beat: Beat, now: float) -> None:
        self.leftover = self.leftover or beat
        if beat not in {self.beat, self.leftover}:
            self.beat = beat
            self.seen = now


class Peers:
    """The other ranks of the run, as far as their heartbeats reach this one.

    Args:
        run_dir: where ranks exchange heartbeats.
        per_node: ranks of a node; those of one node have consecutive numbers.
        interval_s: seconds between two calls of `exchange`.
        now: the current time, on the monotonic clock.
    """

    def __init__(
        self, rank: int, world_size: int, run_dir: Path, *, per_node: int, interval_s: float, now: float
    ) -> None:
        self._rank = rank
        self._run_dir = run_dir
        self._size = per_node
        self._started = now
        self._node, self._slot = divmod(rank, per_node)
        own = range(self._node * per_node, min((self._node + 1) * per_node, world_size))
        self._near = {other: _Peer(now) for other in own if other != rank}
        self._far = {other: _Peer(now) for other in range(world_size) if other not in own}
        self._nodes = [node for node in range(math.ceil(world_size / per_node)) if node != self._node]
        self._next = 0
        self._speaks = False
        # Until the speaker of the node reports, lower nodes are assumed to run.
        self._told = Summary(idle_s=0.0, lowest=0 if self._node else -1) if self._far else Summary()
        self._told_number = -1
        self._told_at = now
        self._file = NodeFile(run_dir, self._node, len(own))
        self._number = 0
        self._silent_s = max(SILENT_S, 5 * interval_s)
        rounds = math.ceil(len(self._nodes) / _FILES_AT_ONCE)
        self._far_silent_s = max(self._silent_s, 5 * interval_s * rounds)

    def exchange(self, phases: int, place: str, idle_s: float, now: float) -> None:
        """Writes this rank's heartbeat and reads those of the others; see `Beat` for the arguments."""
        self._number += 1
        beat = Beat(
            number=self._number,
            phases=phases,
            place=place,
            idle_s=idle_s,
            host=platform.node(),
            pid=os.getpid(),
        )
        with contextlib.suppress(OSError):  # a full disk is reported elsewhere
            self._file.write(self._slot, beat)
            for slot, theirs in self._file.beats().items():
                near = self._near.get(self._node * self._size + slot)
                if near:
                    near.hear(theirs, now)
            if self._far:
                self._hear_other_nodes(now)

    def leave(self) -> None:
        """Removes this rank's heartbeat."""
        with contextlib.suppress(OSError):
            self._file.leave(self._slot)

    def known(self, now: float) -> Summary:
        """What is known about all other ranks."""
        near = _summary(self._near, now, self._silent_s, self._started)
        if not self._far or self._speaks:
            return near + _summary(self._far, now, self._far_silent_s, self._started)
        # Nothing is known of a time before the start.
        aged = min(self._told.idle_s + now - self._told_at, now - self._started)
        return near + replace(self._told, idle_s=aged)

    def _hear_other_nodes(self, now: float) -> None:
        """Reads the files of some other nodes, or what the speaker of this node says about them."""
        speaks = all(
            other > self._rank or now - peer.seen > self._silent_s for other, peer in self._near.items()
        )
        if not speaks:
            self._speaks = False
            found = self._file.summary()
            if found and found[0] != self._told_number:
                self._told_number, self._told = found
                self._told_at = now
            return
        if not self._speaks:
            self._speaks = True
            for peer in self._far.values():  # their time begins now: nobody has looked
                peer.seen = now
        for _ in range(min(_FILES_AT_ONCE, len(self._nodes))):
            node = self._nodes[self._next % len(self._nodes)]
            self._next += 1
            for slot, theirs in beats_of_node(self._run_dir, node, self._size).items():
                far = self._far.get(node * self._size + slot)
                if far:
                    far.hear(theirs, now)
        others = _summary(self._far, now, self._far_silent_s, self._started)
        self._file.write_summary(self._number, others)


def _summary(peers: Mapping[int, _Peer], now: float, silent_s: float, started: float) -> Summary:
    if not peers:
        return Summary()
    silent = {rank: peer for rank, peer in peers.items() if now - peer.seen > silent_s}
    beats = {rank: peer.beat for rank, peer in peers.items() if peer.beat}
    phases = min((beat.phases for beat in beats.values()), default=-1)
    behind = [f"{_name(r, beat)}, at {beat.place}" for r, beat in beats.items() if beat.phases == phases]
    unjoined = [peer for peer in silent.values() if not peer.beat]
    names = [_name(rank, peer.beat) for rank, peer in silent.items()]
    return Summary(
        idle_s=min(
            min(now - peer.seen + (peer.beat.idle_s if peer.beat else 0.0), now - started)
            for peer in peers.values()
        ),
        lowest=min((rank for rank in peers if rank not in silent), default=-1),
        silent=_names(names),
        silent_s=max((now - peer.seen for peer in silent.values()), default=0.0),
        unjoined=len(unjoined),
        left_over=any(peer.leftover for peer in unjoined),
        phases=phases,
        behind=_names(behind),
    )


def _names(names: list[str]) -> Names:
    return Names() + Names(tuple(names), len(names))


def _name(rank: int, beat: Beat | None) -> str:
    return f"rank {rank}" + (f" (pid {beat.pid} on {beat.host})" if beat else "")
