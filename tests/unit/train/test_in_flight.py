"""The queue of groups in flight: what is taken when, how old it is, and what 20 kills lose: nothing."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rlctl.batch import Group, Turn
from rlctl.episodes import Episodes
from rlctl.train.stream import RolloutStream
from tests.episodes import episode_of, flat, task_of

PLACES, LAST, AHEAD = (1, 4, 6), 60, 2
PER_STEP = len(PLACES)


class Sampler:
    """Samples one group per call, of the row at its place in the order of the data; some take longer.

    Attributes:
        version: number of updates so far; a group's tokens have those before and after it was sampled.
        asked: rows, in the order in which their sampling began.
    """

    def __init__(self, seed: int = 0) -> None:
        self.version, self.asked, self._seed = 0, list[int](), seed

    def __call__(self, step: int, index: int) -> Episodes:
        row, first = (step - 1) * PER_STEP + index, self.version
        self.asked.append(row)
        time.sleep(random.Random(f"{self._seed} {row}").choice([0.0, 0.0, 0.001, 0.008]))
        versions = torch.tensor([first, self.version])
        turn = Turn(torch.tensor([3, 4]), torch.zeros(2), versions, "length")
        return flat([[episode_of(task_of(PLACES[index], row=row), 0, turn)]])


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(PER_STEP * (1 + AHEAD)) as threads:
        yield threads


def stream_of(sampler: object, executor: ThreadPoolExecutor, *, in_order: bool = False) -> RolloutStream:
    given = {"executor": executor, "places": PLACES, "in_order": in_order}
    return RolloutStream(sampler, ahead=AHEAD, last_step=LAST, **given)  # type: ignore[arg-type]


def rows_of(groups: list[Group]) -> list[int]:
    return [group[0].task.row for group in groups]


def test_twenty_kills_lose_no_prompt_and_repeat_none(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    """A killed run continues after its last checkpoint; every prompt is used as often as without kills."""
    draw, used, step, kills, restarted = random.Random(3), dict[int, list[int]](), 0, 0, 0
    saved = 0
    while step < LAST:
        sampler = Sampler(seed=kills)
        stream = stream_of(sampler, executor)
        if saved:
            stream.resume(saved, tmp_path / str(saved), 0)
        step, killed_at = saved, saved + draw.randint(1, 4) if kills < 20 else LAST + 1
        while step < min(killed_at, LAST):
            step += 1
            used[step] = rows_of(stream.take(step).groups)
            restarted += stream.num_restarted
            sampler.version = step
            if draw.random() < 0.4 or step - saved > 2:
                (tmp_path / str(step)).mkdir(exist_ok=True)
                stream.save(tmp_path / str(step), rank=0)
                saved = step
        kills += step < LAST
    assert kills >= 20
    assert restarted > 0
    assert all(len(rows) == PER_STEP for rows in used.values())
    assert Counter(row for rows in used.values() for row in rows) == Counter(range(LAST * PER_STEP))


def test_groups_that_are_ready_overtake_a_slow_one(executor: ThreadPoolExecutor) -> None:
    may_go, sampler = threading.Event(), Sampler()

    def sample(step: int, index: int) -> list[Group]:
        if (step, index) == (1, 1):
            may_go.wait(60)
        return sampler(step, index)

    stream = stream_of(sample, executor)
    taken = []
    for step in range(1, LAST):
        groups = stream.take(step).groups
        assert [group[0].task.group_id for group in groups] == list(PLACES)  # its places in this batch
        taken += rows_of(groups)
        assert stream.num_open >= 1
    assert 1 not in taken
    may_go.set()
    assert 1 in rows_of(stream.take(LAST).groups)
    assert sorted(sampler.asked) == list(range(LAST * PER_STEP))  # none beyond the end


def test_paced_groups_are_taken_in_order_and_bound_their_age(executor: ThreadPoolExecutor) -> None:
    """However long some take: their first token is at most `ahead` steps old."""
    sampler = Sampler()
    stream = stream_of(sampler, executor, in_order=True)
    ages = []
    for step in range(1, LAST + 1):
        groups = stream.take(step).groups
        assert rows_of(groups) == list(range((step - 1) * PER_STEP, step * PER_STEP))
        ages += [sampler.version - int(group[0].sequences[0].versions.min()) for group in groups]
        sampler.version += 1
    assert max(ages) == AHEAD
    assert min(ages) >= 0


def test_at_most_so_many_groups_are_open_or_wait(executor: ThreadPoolExecutor) -> None:
    sampler = Sampler()
    stream = stream_of(sampler, executor)
    for step in range(1, LAST + 1):
        stream.take(step)
        assert len(sampler.asked) <= (step + AHEAD) * PER_STEP
