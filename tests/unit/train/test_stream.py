"""Groups sampled ahead: which weights sampled what, where sampling ends, and what a resumed run finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.batch import Episode, Task, TokenLists, TokenSequence
from rlctl.episodes import Episodes
from rlctl.errors import RunFailure
from rlctl.train.stream import RolloutStream
from tests.episodes import flat, groups_of, same

LAST = 7


class Sampler:
    """Records its calls; `version` is the number of updates so far."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []

    def __call__(self, step: int, index: int = 0) -> Episodes:
        self.asked.append(step)
        return flat(groups_of(seed=step, version=self.version))


def stream_of(sampler: Sampler, staleness: int, last_step: int = LAST) -> RolloutStream:
    return RolloutStream(sampler, ahead=staleness, last_step=last_step)


def version_of(episodes: Episodes) -> int:
    [version] = set(episodes.tokens.versions.tolist())
    return version


@pytest.mark.parametrize("staleness", [0, 1, 3, LAST - 1, 20])
def test_a_batch_is_as_old_as_asked(staleness: int) -> None:
    """Before step s there were s − 1 updates; its batch was sampled after s − 1 − k of them (fewer at the
    start)."""
    sampler = Sampler()
    stream = stream_of(sampler, staleness)
    for step in range(1, LAST + 1):
        sampler.version = step - 1
        episodes = stream.take(step)
        assert same(episodes, flat(groups_of(seed=step, version=version_of(episodes))))  # in order
        assert version_of(episodes) == max(0, step - 1 - staleness)
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
    resumed.resume(stop, tmp_path, 3)
    already = len(sampler.asked)
    for step in range(stop + 1, LAST + 1):
        sampler.version = other.version = step - 1
        assert same(resumed.take(step), whole.take(step))
    assert other.asked == sampler.asked[already:]


def test_what_tokens_were_sampled_from_waits_with_them(tmp_path: Path) -> None:
    def sample(step: int, _: int) -> Episodes:
        return flat(groups_of(seed=step, with_kept=True, num_most_likely=3))

    stream, resumed = (RolloutStream(sample, ahead=1, last_step=LAST) for _ in range(2))
    stream.take(1)
    stream.save(tmp_path, rank=0)
    resumed.resume(1, tmp_path, 0)
    before, after = stream.take(2), resumed.take(2)
    [sequence] = after[0].sequences
    assert sequence.kept.ids.any()
    assert sequence.most_likely.log_probs.any()
    assert same(before, after)


def test_whatever_an_environment_makes_waits_unchanged(tmp_path: Path) -> None:
    """Several sequences and turns, versions and rewards per token, an error, a group without members."""
    turns = torch.tensor([0, 0, 1])
    sequence = TokenSequence(
        token_ids=torch.arange(6),
        sampled=torch.tensor([0, 1, 1, 0, 0, 1]).bool(),
        log_probs=torch.tensor([-0.5, float("nan"), -float("inf")]),
        versions=torch.tensor([7, 7, 9]),
        turns=turns,
        rewards=torch.tensor([0.0, 0.25, 1.0]).double(),
        kept=TokenLists(torch.tensor([1, 0, 2]).int(), torch.tensor([1, 5, 6]).int()),
    )
    task = Task((0,), "p", 3, 5, "s", "t", {"a": {"b": [1, None, "é"]}}, ({"role": "user"},), 1.5)
    whole = Episode(task, 0, (sequence, replace(sequence, turns=turns + 1)), "r", "max_turns", 0.5)
    failed = Episode(task, 1, (), "", "error", error="no", metrics={"calls": 2.0}, messages=({"role": "x"},))
    episodes = flat([(whole, failed)])
    stream = RolloutStream(lambda *_: episodes, ahead=1, last_step=LAST)
    stream.take(1)
    stream.save(tmp_path, rank=0)
    stream.resume(1, tmp_path, 0)
    found, other = stream.take(2)
    assert repr((found, other)) == repr((whole, failed))
    assert found.sequences[1].log_probs.isnan().tolist() == [False, True, False]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_meanwhile_it_is_never_older_than_asked(executor: ThreadPoolExecutor, ahead: int) -> None:
    """Independent of timing: trainer and sampler are slowed down alternately."""
    sampler = Sampler()

    def sample(step: int, _: int) -> Episodes:
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

    def sample(step: int, _: int) -> Episodes:
        if step == 2:
            began.set()
        return flat(groups_of(seed=step))

    RolloutStream(sample, ahead=1, last_step=LAST, executor=executor).take(1)
    assert began.wait(60)  # batch 2 has not been requested yet


def test_what_was_being_sampled_at_a_checkpoint_is_sampled_again_and_counted(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    sampler, began, may_go = Sampler(), threading.Event(), threading.Event()

    def sample(step: int, _: int) -> Episodes:
        if step == 3:
            began.set()
            may_go.wait(60)
        return sampler(step)

    stream = RolloutStream(sample, ahead=4, last_step=LAST, executor=executor)
    stream.take(1)
    assert began.wait(60)
    stream.save(tmp_path, rank=0)  # the second is ready, the third at work, the others have not begun
    may_go.set()
    for step in range(2, LAST + 1):
        stream.take(step)
        assert stream.num_restarted == 0
    assert sampler.asked == list(range(1, LAST + 1))

    other = Sampler()
    resumed = RolloutStream(other, ahead=4, last_step=LAST, executor=executor)
    resumed.resume(1, tmp_path, 0)
    for step in range(2, LAST + 1):
        episodes = resumed.take(step)
        assert same(episodes, flat(groups_of(seed=step)))
        assert resumed.num_restarted == (len(episodes) if step in {3, 4, 5} else 0)
    assert other.asked == list(range(3, LAST + 1))


def test_a_batch_that_could_not_be_sampled_is_heard_of_when_it_is_due(executor: ThreadPoolExecutor) -> None:
    def sample(step: int, _: int) -> Episodes:
        if step == 2:
            raise RunFailure("the engine is gone")
        return flat(groups_of(seed=step))

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


@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "garbage", "padded", "another rank's"])
def test_waiting_groups_that_cannot_be_read(tmp_path: Path, fault: str) -> None:
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
    elif fault == "padded":  # as before the records were flat
        records = {(2, 0): [[{"responses": torch.zeros(2, 3)}]]}
        torch.save({"started": 4, "waiting": records, "open": []}, path)
    with pytest.raises(RunFailure, match="waiting to be trained on") as caught:
        stream_of(Sampler(), 2).resume(1, tmp_path, int(fault == "another rank's"))
    assert str(tmp_path) in str(caught.value.where)


def test_no_code_is_run_from_a_file(tmp_path: Path) -> None:
    stream = stream_of(Sampler(), 1)
    stream.take(1)
    stream.save(tmp_path, rank=0)
    [path] = tmp_path.iterdir()
    state = torch.load(path, weights_only=False)
    torch.save({**state, "started": Sampler()}, path)  # an object: needs a pickle's freedom
    with pytest.raises(RunFailure, match="waiting to be trained on"):
        stream_of(Sampler(), 1).resume(1, tmp_path, 0)
