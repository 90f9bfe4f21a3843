"""Ranks that no longer go on, as the others see them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.errors import RlctlError
from rlctl.processes import note_progress, progress
from rlctl.track.open_run import phase_of
from rlctl.train import stop
from rlctl.train.stop import Watchdog


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The main thread does not progress, independent of the test."""
    monkeypatch.setattr(stop, "_stacks", lambda trains: "the same")
    monkeypatch.setattr(stop, "_SILENT_S", 0.2)
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
            until(lambda: zero._peers[1].beat)
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
    (tmp_path / ".ranks").mkdir()
    zero, ended, _ = watch(0, 2, tmp_path, timeout=1.0)
    with zero:
        zero.begin_phase("waiting for all 2 ranks")
        until(lambda: ended)
    assert ended[0].what.endswith(": it never joined")


def test_a_single_heartbeat_may_be_of_this_run_or_of_an_earlier_one(tmp_path: Path, idle: None) -> None:
    """Stopped after the first one, or never started: the file may be left from the run that was resumed."""
    (tmp_path / ".ranks").mkdir()
    left = {"number": 1, "phases": 1, "place": "starting", "idle_s": 0.0, "host": "a", "pid": 1}
    (tmp_path / ".ranks" / "00001.json").write_text(json.dumps(left))
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
