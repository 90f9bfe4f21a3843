"""Ranks that no longer go on, as the others see them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.errors import RlctlError
from rlctl.processes import note_progress, progress
from rlctl.track.heartbeats import Beat, NodeFile
from rlctl.track.open_run import phase_of
from rlctl.train import peers, stop
from rlctl.train.peers import Peers
from rlctl.train.stop import Watchdog


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The main thread does not progress, independent of the test."""
    monkeypatch.setattr(stop, "_stacks", lambda trains: "the same")
    monkeypatch.setattr(peers, "SILENT_S", 0.2)
    return iter([None])


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def watch(rank: int, ranks: int, place: Path, timeout: float) -> tuple[Watchdog, list[RlctlError], list[str]]:
    ended: list[RlctlError] = []
    told: list[str] = []
    dog = Watchdog(rank, ranks, place, timeout, end=ended.append)
    dog.show = told.append
    return dog, ended, told


def test_the_rank_that_is_waited_for_is_named_with_the_stacks_of_the_waiting(
    tmp_path: Path, idle: None
) -> None:
    zero, ended, told = watch(0, 2, tmp_path, timeout=3.0)
    one, _, _ = watch(1, 2, tmp_path, timeout=3.0)
    with zero:
        with one:
            until(lambda: zero._peers._near[1].beat)
            for dog in (zero, one):
                dog.begin_phase("gen")
            zero.begin_phase("update_actor")
            one.__exit__()  # it stops in the middle of sampling
        until(lambda: ended)
    assert "step 1, updating: no progress for" in ended[0].what
    assert "waiting for rank 1 (pid" in ended[0].what
    assert "stopped or cannot be reached" in ended[0].what
    assert "_watch" in (tmp_path / "stacks-rank0.txt").read_text()
    assert any(text.startswith("warning: step 1, updating") for text in told)
    assert not (tmp_path / ".ranks").exists()


def test_a_rank_that_is_behind_is_named(tmp_path: Path, idle: None) -> None:
    zero, ended, _ = watch(0, 2, tmp_path, timeout=2.0)
    one, _, _ = watch(1, 2, tmp_path, timeout=600.0)
    one._interval = 0.02
    with zero, one:
        for dog in (zero, one):
            dog.begin_phase("gen")
        zero.begin_phase("update_actor")
        until(lambda: ended)
    assert "at step 1, sampling" in ended[0].what


def test_a_rank_that_never_joined_is_named(tmp_path: Path, idle: None) -> None:
    zero, ended, _ = watch(0, 2, tmp_path, timeout=1.0)
    with zero:
        zero.begin_phase("waiting for all 2 ranks")
        until(lambda: ended)
    assert ended[0].what.endswith(": it never joined")


def test_a_single_heartbeat_may_be_of_this_run_or_of_an_earlier_one(tmp_path: Path, idle: None) -> None:
    """Stopped after the first one, or never started: the file may be left from the run that was resumed."""
    NodeFile(tmp_path, 0, size=2).write(1, Beat(1, 1, "starting", 0.0, "a", 1))
    zero, ended, _ = watch(0, 2, tmp_path, timeout=1.0)
    with zero:
        zero.begin_phase("waiting for all 2 ranks")
        until(lambda: ended)
    assert ended[0].what.endswith(": it is stopped or never joined")


def test_while_another_rank_works_nobody_is_ended(tmp_path: Path, idle: None) -> None:
    zero, ended, _ = watch(0, 2, tmp_path, timeout=1.0)
    one, _, _ = watch(1, 2, tmp_path, timeout=1.0)
    with zero, one:
        for _ in range(15):  # hashes a large checkpoint, say
            one.begin_phase("save_checkpoint")
            time.sleep(0.1)
        assert ended == []


@pytest.mark.slow
def test_a_main_thread_that_computes_is_not_idle(tmp_path: Path) -> None:
    dog, ended, _ = watch(0, 1, tmp_path, timeout=6.0)  # a busy machine may not run a thread for seconds
    with dog:
        deadline = time.monotonic() + 7.0
        while time.monotonic() < deadline:
            sum(i for i in range(999))
        assert ended == []
        for _ in range(70):  # a run that waits for healthy servers is not reported either
            note_progress()
            threading.Event().wait(0.1)
        assert ended == []
        until(lambda: ended)  # and one that waits is


def test_time_in_which_the_whole_process_was_stopped_is_not_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: None
) -> None:
    now = 0.0
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: now, strftime=time.strftime))
    dog, ended, _ = watch(0, 1, tmp_path, timeout=60.0)  # looks once a second
    waits = iter([*[1.0] * 2, 5000.0, *[1.0] * 70])  # SIGSTOP or a suspended machine

    def wait(interval: float) -> bool:
        nonlocal now
        assert interval == 1.0
        now += next(waits)
        assert ended == [] or now > 5055.0
        return bool(ended)

    monkeypatch.setattr(dog, "_is_over", SimpleNamespace(wait=wait, set=lambda: None))
    dog._watch()
    assert "no progress for 60 s" in ended[0].what


@pytest.mark.parametrize(
    ("phase", "ends"), [("update_actor", True), ("save_checkpoint", True), ("gen", False)]
)
def test_sampling_ahead_hides_no_hang_in_training(tmp_path: Path, phase: str, ends: bool) -> None:
    """Sampling threads go on, and note progress, while the main thread hangs."""
    over = threading.Event()

    def samples() -> None:
        while not over.is_set():
            note_progress()
            over.wait(0.01)

    others = [threading.Thread(target=samples, name=f"rollouts{kind}") for kind in ("_0", "-http")]
    for thread in others:
        thread.start()
    dog, ended, _ = watch(0, 1, tmp_path, timeout=0.6)
    try:
        with dog:
            dog.begin_phase(phase)
            over.wait(2.0)  # the main thread does nothing else
        assert bool(ended) == ends
    finally:
        over.set()
        for thread in others:
            thread.join()


def test_progress_that_the_main_thread_notes_counts_in_training(tmp_path: Path, idle: None) -> None:
    before = progress(of_main=True), progress()
    note_progress()
    thread = threading.Thread(target=note_progress)
    thread.start()
    thread.join()
    assert (progress(of_main=True) - before[0], progress() - before[1]) == (1, 2)


def test_the_phase_of_a_single_rank_is_there_for_others_from_its_start_to_its_end(tmp_path: Path) -> None:
    dog, _, _ = watch(0, 1, tmp_path, timeout=600.0)
    assert phase_of(tmp_path) == "starting"
    dog.begin_phase("loading a model")
    with dog:
        until(lambda: phase_of(tmp_path) == "loading a model")
    assert list(tmp_path.iterdir()) == []


# --- many ranks ---------------------------------------------------------------------------------------


class Fleet:
    """Ranks of many nodes, whose watchdogs look once per simulated interval."""

    def __init__(self, run_dir: Path, nodes: int, per_node: int) -> None:
        self.now, self.opened = 0.0, 0
        ranks = range(nodes * per_node)
        self.ranks = {
            rank: Peers(rank, len(ranks), run_dir, per_node=per_node, interval_s=2.0, now=0.0)
            for rank in ranks
        }
        self.phases = dict.fromkeys(ranks, 1)
        self.idle = dict.fromkeys(ranks, 0.0)
        self._run_dir = str(run_dir)
        _fleets[self._run_dir] = self

    def intervals(self, count: int, stopped: Collection[int] = ()) -> None:
        for _ in range(count):
            self.now += 2.0
            for rank, peer in self.ranks.items():
                if rank not in stopped:
                    peer.exchange(self.phases[rank], "step 1, sampling", self.idle[rank], self.now)


#: Every file that is opened below a directory counts for the fleet there.
_fleets: dict[str, Fleet] = {}
_hooked: list[bool] = []


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _fleets:
        path = str(arguments[0])
        for run_dir, fleet in _fleets.items():
            fleet.opened += path.startswith(run_dir)


@pytest.fixture
def fleet_of(tmp_path: Path) -> Iterator[Callable[[int, int], Fleet]]:
    if not _hooked:
        sys.addaudithook(_count)  # cannot be removed; it sees nothing when no fleet is there
        _hooked.append(True)
    yield lambda nodes, per_node: Fleet(tmp_path, nodes, per_node)
    _fleets.clear()


@pytest.mark.parametrize(("nodes", "per_node", "most"), [(1, 8, 0), (8, 8, 56), (32, 8, 512)])
def test_files_opened_grow_with_the_nodes(
    fleet_of: Callable[[int, int], Fleet], nodes: int, per_node: int, most: int
) -> None:
    fleet = fleet_of(nodes, per_node)
    fleet.intervals(1)  # each rank opens the file of its node once
    fleet.opened = 0
    fleet.intervals(4)
    assert fleet.opened <= 4 * most


@pytest.mark.parametrize("stopped", [11, 8, 3, 0])
def test_a_rank_that_stopped_is_named_on_every_node(
    fleet_of: Callable[[int, int], Fleet], stopped: int
) -> None:
    """Also one that speaks for its node."""
    fleet = fleet_of(3, 4)
    fleet.intervals(5)
    fleet.intervals(12, stopped=[stopped])
    for rank in set(fleet.ranks) - {stopped}:
        known = fleet.ranks[rank].known(fleet.now)
        assert str(known.silent).startswith(f"rank {stopped} (pid {os.getpid()} on ")
        assert (known.silent.count, known.unjoined) == (1, 0)
        assert known.idle_s <= 4.0  # the others go on
        running = min(set(fleet.ranks) - {stopped, rank})
        assert known.lowest == running


def test_a_node_that_is_lost_is_named_by_its_ranks(fleet_of: Callable[[int, int], Fleet]) -> None:
    fleet = fleet_of(3, 16)
    fleet.intervals(5)
    fleet.intervals(12, stopped=range(16))
    known = fleet.ranks[40].known(fleet.now)
    assert known.silent.count == 16
    assert str(known.silent).startswith("rank 0 (pid ")
    assert str(known.silent).endswith(" and 8 more")
    assert known.lowest == 16


def test_a_rank_of_another_node_that_is_behind_is_named(fleet_of: Callable[[int, int], Fleet]) -> None:
    fleet = fleet_of(20, 2)  # more nodes than are read at a time
    fleet.intervals(8)
    fleet.phases = dict.fromkeys(fleet.ranks, 2) | {37: 1}
    fleet.idle = dict.fromkeys(fleet.ranks, 100.0)
    fleet.intervals(8)
    for rank in (0, 1, 36):
        known = fleet.ranks[rank].known(fleet.now)
        assert known.phases == 1
        assert str(known.behind).startswith("rank 37 (pid ")
        assert str(known.behind).endswith(", at step 1, sampling")
    assert fleet.ranks[0].known(fleet.now).idle_s >= fleet.now - 2.0  # nobody has made progress


def test_a_rank_of_another_node_that_works_keeps_all_alive(fleet_of: Callable[[int, int], Fleet]) -> None:
    fleet = fleet_of(3, 2)
    fleet.idle = dict.fromkeys(fleet.ranks, 1000.0) | {5: 0.5}
    fleet.now = 2000.0
    fleet.intervals(4)
    for rank in range(5):
        assert fleet.ranks[rank].known(fleet.now).idle_s <= 5.0


def test_heartbeats_of_a_run_that_was_set_aside_are_written_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    own = Peers(0, 1, run, per_node=1, interval_s=2.0, now=0.0)
    own.exchange(1, "starting", 0.0, 2.0)
    (run / ".ranks").rename(tmp_path / "aside")
    own.exchange(1, "loading", 0.0, 4.0)
    assert phase_of(run) == "loading"
    own.leave()
    assert list(run.iterdir()) == []


def test_a_record_that_is_half_written_is_no_heartbeat(tmp_path: Path) -> None:
    node = NodeFile(tmp_path, 0, size=2)
    node.write(0, Beat(1, 1, "\u0001" * 300, 0.0, "h\u00f6st" * 50, 1))
    node.write(1, Beat(1, 1, "sampling", 0.0, "host", 1))
    assert node.beats()[0].place == "\u0001" * 100
    [file] = (tmp_path / ".ranks").iterdir()
    content = bytearray(file.read_bytes())
    content[1024 + 40 : 1024 + 44] = b"\0\0\0\0"
    file.write_bytes(content)
    assert list(node.beats()) == [0]
