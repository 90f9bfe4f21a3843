"""Batches sampled ahead: which weights sampled what, where sampling ends, and what a resumed run finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from rlctl.batch import Rollouts, TokenLists
from rlctl.errors import RunFailure
from rlctl.train.stream import RolloutStream
from tests.unit.train.scored import rollouts_of

CPU = torch.device("cpu")
LAST = 7


class Sampler:
    """Records its calls; `version` is the number of updates so far."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []

    def __call__(self, step: int) -> Rollouts:
        self.asked.append(step)
        return rollouts_of(seed=step, policy_version=self.version)


def stream_of(sampler: Sampler, staleness: int, last_step: int = LAST) -> RolloutStream:
    return RolloutStream(sampler, ahead=staleness, last_step=last_step)


def version_of(rollouts: Rollouts) -> int:
    [version] = set(rollouts.policy_version.tolist())
    return version


def same(a: Rollouts, b: Rollouts) -> bool:
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Rollouts)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("staleness", [0, 1, 3, LAST - 1, 20])
def test_a_batch_is_as_old_as_asked(staleness: int) -> None:
    """Before step s there were s − 1 updates; its batch was sampled after s − 1 − k of them (fewer at the
    start)."""
    sampler = Sampler()
    stream = stream_of(sampler, staleness)
    for step in range(1, LAST + 1):
        sampler.version = step - 1
        rollouts = stream.take(step)
        assert same(rollouts, rollouts_of(seed=step, policy_version=version_of(rollouts)))  # in order
        assert version_of(rollouts) == max(0, step - 1 - staleness)
        assert sampler.asked == list(range(1, min(step + staleness, LAST) + 1))  # and none beyond the end


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("stop", [1, 4, LAST - 1])
def test_resumed_it_goes_on_with_the_same_batches(tmp_path: Path, staleness: int, stop: int) -> None:
    sampler = Sampler()
    whole = stream_of(sampler, staleness)
    for step in range(1, stop + 1):
        sampler.version = step - 1
        whole.take(step)
    whole.save(tmp_path, rank=3)

    other = Sampler()
    resumed = stream_of(other, staleness)
    resumed.resume(stop, tmp_path, 3, CPU)
    already = len(sampler.asked)
    for step in range(stop + 1, LAST + 1):
        sampler.version = other.version = step - 1
        assert same(resumed.take(step), whole.take(step))
    assert other.asked == sampler.asked[already:]


def test_what_tokens_were_sampled_from_waits_with_them(tmp_path: Path) -> None:
    def sample(step: int) -> Rollouts:
        rollouts = rollouts_of(seed=step)
        counts = rollouts.response_mask.int() * step
        ids = torch.arange(int(counts.sum()), dtype=torch.int32)
        return replace(
            rollouts, kept=TokenLists(counts, ids), most_likely=TokenLists(counts, ids, -ids.float())
        )

    stream, resumed = (RolloutStream(sample, ahead=1, last_step=LAST) for _ in range(2))
    stream.take(1)
    stream.save(tmp_path, rank=0)
    resumed.resume(1, tmp_path, 0, CPU)
    before, after = stream.take(2), resumed.take(2)
    assert torch.equal(before.kept.counts, after.kept.counts)
    assert torch.equal(before.kept.ids, after.kept.ids)
    assert before.most_likely.log_probs.any()
    assert torch.equal(before.most_likely.log_probs, after.most_likely.log_probs)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_meanwhile_it_is_never_older_than_asked(executor: ThreadPoolExecutor, ahead: int) -> None:
    """Independent of timing: trainer and sampler are slowed down alternately."""
    sampler = Sampler()

    def sample(step: int) -> Rollouts:
        time.sleep(0.02 * (step % 2))
        return sampler(step)

    stream = RolloutStream(sample, ahead=ahead, last_step=LAST, executor=executor)
    ages = []
    for step in range(1, LAST + 1):
        sampler.version = step - 1
        ages.append(step - 1 - version_of(stream.take(step)))
        time.sleep(0.02 * (step % 3))
    assert all(0 <= age <= ahead for age in ages)
    assert any(age > 0 for age in ages)  # it did sample ahead
    assert sampler.asked == list(range(1, LAST + 1))


def test_it_samples_while_the_trainer_trains(executor: ThreadPoolExecutor) -> None:
    began = threading.Event()

    def sample(step: int) -> Rollouts:
        if step == 2:
            began.set()
        return rollouts_of(seed=step, policy_version=0)

    RolloutStream(sample, ahead=1, last_step=LAST, executor=executor).take(1)
    assert began.wait(60)  # batch 2 has not been requested yet


def test_drained_it_saves_what_is_sampled_and_repeats_or_skips_nothing(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    sampler, began, may_go = Sampler(), threading.Event(), threading.Event()

    def sample(step: int) -> Rollouts:
        if step == 3:
            began.set()
            may_go.wait(60)
        return sampler(step)

    stream = RolloutStream(sample, ahead=4, last_step=LAST, executor=executor)
    stream.take(1)
    assert began.wait(60)
    threading.Timer(0.05, may_go.set).start()
    stream.drain()  # the third is at work and finished, the fourth and fifth never begin
    assert sampler.asked == [1, 2, 3]
    stream.save(tmp_path, rank=0)
    taken = [version_of(stream.take(step)) for step in range(2, LAST + 1)]
    assert len(taken) == LAST - 1
    assert sampler.asked == list(range(1, LAST + 1))

    other = Sampler()
    resumed = RolloutStream(other, ahead=4, last_step=LAST, executor=executor)
    resumed.resume(1, tmp_path, 0, CPU)
    for step in range(2, LAST + 1):
        assert same(resumed.take(step), rollouts_of(seed=step, policy_version=0))
    assert other.asked == list(range(4, LAST + 1))


def test_a_batch_that_could_not_be_sampled_is_heard_of_when_it_is_due(executor: ThreadPoolExecutor) -> None:
    def sample(step: int) -> Rollouts:
        if step == 2:
            raise RunFailure("the engine is gone")
        return rollouts_of(seed=step)

    stream = RolloutStream(sample, ahead=2, last_step=LAST, executor=executor)
    stream.take(1)
    with pytest.raises(RunFailure, match="the engine is gone"):
        stream.take(2)


def test_fresh_batches_leave_nothing_behind(tmp_path: Path) -> None:
    stream = stream_of(Sampler(), 0)
    stream.take(1)
    stream.save(tmp_path, rank=0)
    assert list(tmp_path.iterdir()) == []


def test_nobody_gets_another_steps_batch() -> None:
    for staleness in (0, 2):
        stream = stream_of(Sampler(), staleness)
        with pytest.raises(ValueError, match="out of order"):
            stream.take(2)
        stream.take(1)
        with pytest.raises(ValueError, match="out of order"):
            stream.take(1)


@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "garbage", "another rank's"])
def test_waiting_batches_that_cannot_be_read(tmp_path: Path, fault: str) -> None:
    stream = stream_of(Sampler(), 2)
    stream.take(1)
    stream.save(tmp_path, rank=0)
    [path] = tmp_path.iterdir()
    if fault == "missing":
        path.unlink()
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif fault == "garbage":
        path.write_bytes(b"garbage" * 100)
    with pytest.raises(RunFailure, match="waiting to be trained on") as caught:
        stream_of(Sampler(), 2).resume(1, tmp_path, int(fault == "another rank's"), CPU)
    assert str(tmp_path) in str(caught.value.where)


def test_no_code_is_run_from_a_file(tmp_path: Path) -> None:
    stream = stream_of(Sampler(), 1)
    stream.take(1)
    stream.save(tmp_path, rank=0)
    [path] = tmp_path.iterdir()
    state = torch.load(path, weights_only=True)
    torch.save({**state, "next_step": rollouts_of()}, path)  # a record: needs a pickle's freedom
    with pytest.raises(RunFailure, match="waiting to be trained on"):
        stream_of(Sampler(), 1).resume(1, tmp_path, 0, CPU)
