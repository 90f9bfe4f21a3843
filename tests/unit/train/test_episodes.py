"""Episodes as columns are what they are record by record, for random episodes of all kinds."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields, replace

import pytest
import torch

from rlctl.batch import Episode, Task, TokenLists, TokenSequence, Turn
from rlctl.environment.protocol import STOP_REASONS
from rlctl.episodes import Episodes, Turns, joined_turns
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.train.step_metrics import age_sums, environment_sums, episode_sums
from tests.episodes import RandomEngine, episode_of, same, task_of
from tests.unit.train.slow import SLOW_COLUMNS, slow_columns, slow_sums

SEEDS = range(12)


def lists_of(draw: random.Random, count: int) -> TokenLists:
    sizes = [draw.randint(0, 3) for _ in range(count)]
    ids = [draw.randrange(50) for _ in range(sum(sizes))]
    return TokenLists(torch.tensor(sizes, dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))


def sequence_of(draw: random.Random) -> TokenSequence:
    length = draw.randint(1, 9)
    sampled = [False, *(draw.random() < 0.5 for _ in range(length - 1))]
    count = sum(sampled)
    return TokenSequence(
        token_ids=torch.tensor([draw.randrange(50) for _ in sampled]),
        sampled=torch.tensor(sampled),
        log_probs=torch.tensor([-draw.random() for _ in range(count)]),
        versions=torch.tensor([draw.randrange(7) for _ in range(count)], dtype=torch.int64),
        turns=torch.tensor(sorted(draw.randrange(4) for _ in range(count)), dtype=torch.int64),
        rewards=torch.tensor([draw.random() for _ in range(count)], dtype=torch.float64),
        kept=lists_of(draw, count),
        experts=torch.tensor([[[draw.randrange(8)] * 2] * 3 for _ in sampled], dtype=torch.int16),
    )


def episodes_of(seed: int) -> list[Episode]:
    """Groups with several sequences, failed members without any, weights, and messages."""
    draw = random.Random(seed)
    episodes = []
    for group in range(draw.randint(1, 5)):
        task = task_of(group, weight=draw.choice([1.0, 2.5]))
        for member in range(draw.randint(1, 4)):
            is_failed = draw.random() < 0.2
            sequences = () if is_failed else tuple(sequence_of(draw) for _ in range(draw.randint(1, 3)))
            stop_reason = "environment_error" if is_failed else draw.choice(STOP_REASONS[:10])
            reward, error = draw.choice([None, 0.5]), "refused" if is_failed else ""
            about = ({"calls": draw.random()} if draw.random() < 0.5 else {}, ({"role": "user"},))
            answer = f"r{group}{member}"
            episodes.append(Episode(task, member, sequences, answer, stop_reason, reward, error, *about))
    return episodes


def columns_of(episodes: Episodes) -> dict[str, list]:
    tokens = episodes.tokens
    columns = {name: tokens.column(name).tolist() for name in SLOW_COLUMNS if name != "kept"}
    kept, ids = tokens.column("kept"), iter(tokens.column("kept").ids.tolist())
    return columns | {"kept": [[next(ids) for _ in range(n)] for n in kept.counts.tolist()]}


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_and_records_are_the_same(seed: int) -> None:
    records, draw = episodes_of(seed), random.Random(seed)
    episodes = Episodes.of(records)
    assert same([*episodes], records)
    if any(record.sequences for record in records):
        assert columns_of(episodes) == slow_columns(records)
    assert episodes.num_sampled.tolist() == [record.num_sampled for record in records]
    assert episodes.num_prompt.tolist() == [record.num_prompt for record in records]
    assert episodes.aborted.tolist() == [record.aborted for record in records]
    assert episodes.failed.tolist() == [bool(record.error) for record in records]
    order = draw.sample(range(len(records)), draw.randint(1, len(records)))
    assert same([*episodes.pick(order)], [records[place] for place in order])
    assert same([*Episodes.joined([episodes.pick(order), episodes])], [*episodes.pick(order), *records])
    assert same([*pickle.loads(pickle.dumps(episodes))], records)
    assert same([*map(list, episodes.groups)], [[*g] for g in Episodes.of([*episodes]).groups])


@pytest.mark.parametrize("seed", SEEDS)
def test_figures_are_those_of_the_records(seed: int) -> None:
    records, draw = episodes_of(seed), random.Random(seed)
    valid = torch.tensor([draw.random() < 0.8 and not record.error for record in records])
    scores = torch.tensor([draw.choice([0.0, 1.0]) for _ in records])
    graded = Graded(Episodes.of(records), RewardResult(scores, valid), None, {})
    sums = episode_sums(graded, 5, 3) | environment_sums(graded, ["calls"])
    expected = slow_sums(records, 5, 3)
    assert {name: float(sums[name]) for name in expected} == pytest.approx(expected)
    trained = [record for record, is_valid in zip(records, graded.valid.tolist(), strict=True) if is_valid]
    versions = [{int(v) for s in record.sequences for v in s.versions} for record in trained]
    ages = age_sums(graded, 5, None)
    assert (ages["aged"], ages["mixed"]) == (len(trained), sum(len(each) > 1 for each in versions))
    assert ages["age.x"] == sum(float((5 - s.versions).sum()) for record in trained for s in record.sequences)


@pytest.mark.parametrize("seed", SEEDS)
def test_single_turns_are_those_of_sequences(seed: int) -> None:
    """With prompts of several lengths, kept sets, and experts of some of the tokens that were read."""
    draw = random.Random(seed)
    members: list[tuple[Task, int]] = []
    turns: list[Turn] = []
    for group in range(4):
        prompt = [draw.randrange(50) for _ in range(draw.randint(1, 5))]
        for member in range(3):
            count = draw.randint(1, 4)
            members.append((Task(prompt, "", group, weight=2.0), member))
            experts = torch.full((draw.randint(1, len(prompt) + count - 1), 2, 1), group).short()
            columns = torch.arange(count), -torch.rand(count), torch.full((count,), draw.randrange(5))
            turns.append(Turn(*columns, "stop", lists_of(draw, count), None, experts))
    if draw.random() < 0.5:
        turns[2] = Turn(turns[2].token_ids, turns[2].log_probs, turns[2].versions, "abort", turns[2].kept)
    answers = [f"a{place}" for place in range(len(turns))]
    flat = Turns.of(turns)
    assert same([*flat], turns)
    assert same([*joined_turns([Turns.of(turns[:5]), Turns.of(turns[5:])])], turns)
    records = [
        episode_of(task, member, turn, answer)
        for (task, member), turn, answer in zip(members, turns, answers, strict=True)
    ]
    episodes = Episodes.of_turns(members, flat, answers)
    assert same(Episodes.of(records), episodes)


def test_a_task_in_another_group_is_the_same_row() -> None:
    own = {each.name: object() for each in fields(Task)}
    assert Task(**own).in_group(7) == replace(Task(**own), group_id=7)


def test_nothing_and_engines_that_return_nothing() -> None:
    assert len(Episodes.of([])) == len(Turns.of([])) == 0
    assert [*Episodes.joined([])] == [*Episodes.of([]).groups] == []
    assert Episodes.of([]).num_prompt.tolist() == []
    assert not len(Turns.of(RandomEngine().sample([], None)))  # type: ignore[arg-type]
