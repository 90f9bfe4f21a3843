"""Dynamic sampling: what the filter and the curriculum do to the expected gradient, by enumeration.

Prompts whose responses are right with different probabilities; every group of n is enumerated. The policy has
one logit per prompt and token, so that a gradient says which prompt it is of.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlctl.algos.estimators import has_spread, spread_probability
from rlctl.batch import Group, TokenBatch
from rlctl.data.prompts import PromptDataset
from rlctl.data.schema import Message, Row
from rlctl.engine.ranks import Ranks
from rlctl.environment.build import EpisodeSource
from rlctl.reward.build import Reward
from rlctl.reward.protocol import Failure, Graded, RewardResult, Scorer
from rlctl.rollout.protocol import sampling_of
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model import RECIPE
from rlctl.run_spec.rollout import OverlongSpec
from rlctl.tiny.model import build_tokenizer
from rlctl.train.filter_groups import _summaries, draw_next_prompts, filtered_groups
from rlctl.train.score_batch import with_advantages
from rlctl.train.settings import EstimatorSettings
from rlctl.train.step_metrics import StepTimer, episode_sums
from rlctl.train.stream import PromptDraws
from tests.episodes import RandomEngine, flat, groups_of, same
from tests.properties.batches import estimate

ONE_RANK = Ranks(0, 1, torch.device("cpu"))

#: Probabilities of three responses per prompt, of which the first is right: easy, medium, hard.
POLICIES = np.array([[0.95, 0.03, 0.02], [0.5, 0.3, 0.2], [0.04, 0.5, 0.46]])
REWARDS = torch.tensor([1.0, 0.0, 0.0])
ESTIMATORS = ["rloo", "grpo"]


@dataclass(frozen=True)
class Enumerated:
    """Of one prompt: probability of a group with spread, and means over groups, each (prompts · 3,)."""

    spread: float
    gradient: np.ndarray  # of the policy gradient's estimate
    spread_gradient: np.ndarray  # the same, over groups with spread alone
    entropy: np.ndarray  # of what every group adds, such as the gradient of an entropy bonus


def enumerated(prompt: int, n: int, estimator: str) -> Enumerated:
    policy, found = POLICIES[prompt], np.zeros(9)
    alive, total = 0.0, np.zeros(9)
    for group in itertools.product(range(3), repeat=n):
        chance = float(np.prod(policy[list(group)]))
        scores, ids = REWARDS[list(group)], torch.zeros(n, dtype=torch.int64)
        advantages = estimate(estimator, scores, ids).numpy()
        gradient = np.zeros(9)
        for response, advantage in zip(group, advantages, strict=True):
            score = (np.arange(3) == response) - policy  # ∇ log softmax
            gradient[3 * prompt : 3 * prompt + 3] += advantage * score / n
        total += chance * gradient
        if has_spread(scores, ids).all():
            alive += chance
            found += chance * gradient
        else:
            assert not advantages.any()
    entropy = np.zeros(9)
    entropy[3 * prompt : 3 * prompt + 3] = -policy * (np.log(policy) - (policy * np.log(policy)).sum())
    return Enumerated(alive, total, found / alive, entropy)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("n", [2, 4])
def test_the_filter_only_enlarges_the_step(estimator: str, n: int) -> None:
    """Groups of a filtered batch are drawn from those with spread: prompts by how often theirs have it. Both
    effects cancel: the mean gradient is the plain one over the share of groups with spread."""
    prompts = [enumerated(prompt, n, estimator) for prompt in range(3)]
    plain = np.mean([each.gradient for each in prompts], 0)
    shares = np.array([each.spread for each in prompts])
    filtered = sum(
        share * each.spread_gradient for share, each in zip(shares / shares.sum(), prompts, strict=True)
    )
    np.testing.assert_allclose(filtered, plain / shares.mean(), rtol=1e-6, atol=1e-12)


def test_terms_that_dead_groups_have_too_change_direction() -> None:
    """An entropy bonus (or a KL loss) is then taken mostly on prompts of medium difficulty."""
    prompts = [enumerated(prompt, 4, "rloo") for prompt in range(3)]
    plain = np.mean([each.entropy for each in prompts], 0)
    filtered = sum(each.spread * each.entropy for each in prompts)
    assert cosine(plain, filtered) < 0.9


def measured() -> PromptDraws:
    """An easy, a medium and a hard prompt."""
    draws = PromptDraws()
    for prompt, mean in enumerate((1.0, 0.5, 0.0)):
        draws.note(prompt, mean, 4)
    return draws


def test_a_curriculum_without_its_weights_would_change_direction() -> None:
    chances = [measured().chance(prompt, 4, 0.2) for prompt in range(3)]
    assert chances[0] == chances[2] < 0.6 < chances[1]
    prompts = [enumerated(prompt, 4, "rloo").gradient for prompt in range(3)]
    drawn = np.mean([chance * each for chance, each in zip(chances, prompts, strict=True)], 0)
    assert cosine(np.mean(prompts, 0), drawn) < 0.999


@pytest.mark.slow
def test_prompts_are_drawn_with_the_chance_that_their_advantages_are_divided_by() -> None:
    """So Σ 1/chance over the times that a prompt was drawn tends to the times that it was its turn."""
    dataset = SimpleNamespace(row_at=lambda position, **_: position % 3)
    spec = load_spec([], [], ["algorithm.filter_groups.curriculum=true", "rollout.n=4"]).spec
    draws = measured()
    drawn = draw_next_prompts(SimpleNamespace(spec=spec, train_prompts=dataset), draws, 6000)
    turns = draws.position / 3
    for prompt in range(3):
        chances = [chance for row, chance in drawn if row == prompt]
        assert set(chances) == {draws.chance(prompt, 4, 0.2)}
        spread = (turns * (1 / chances[0] - 1)) ** 0.5
        assert len(chances) / chances[0] == pytest.approx(turns, abs=4 * spread + 1)


def test_advantages_are_multiplied_by_the_weights_of_their_prompts() -> None:
    algorithm = load_spec([], [], []).spec.algorithm
    groups = groups_of(sizes=(3, 2, 4))

    def advantages(weights: list[float]) -> torch.Tensor:
        episodes = [
            replace(episode, task=replace(episode.task, weight=weight))
            for group, weight in zip(groups, weights, strict=True)
            for episode in group
        ]
        batch = TokenBatch.of(episodes)
        scores = batch.units.episode.sum(-batch.rollout_log_probs)
        columns = {"rewards": -batch.rollout_log_probs, "old_log_probs": batch.rollout_log_probs}
        batch = replace(batch, **columns).with_columns(scores=scores)
        return with_advantages(batch, EstimatorSettings.of(algorithm), ONE_RANK).advantages

    plain, found = advantages([1.0] * 3), advantages([1.0, 2.5, 4.0])
    tokens = [sum(episode.num_sampled for episode in group) for group in groups]
    assert plain.any()
    factors = torch.tensor([1.0, 2.5, 4.0]).repeat_interleave(torch.tensor(tokens))
    torch.testing.assert_close(found, plain * factors)


def test_picked_episodes_are_those_of_the_whole_batch() -> None:
    episodes = [episode for group in groups_of(with_kept=True, num_most_likely=3) for episode in group]
    whole = TokenBatch.of(episodes)
    assert same(whole.pick(range(4)), TokenBatch.of(episodes[:4]))
    assert same(whole.pick([5, 4]), TokenBatch.of([episodes[5], episodes[4]]))


@pytest.mark.parametrize("score", [0.0, 1.0, 1 / 3, 0.1, 1e-3, -0.7])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_groups_are_compared_without_the_length_penalty(score: float, factor: float) -> None:
    """Equal grades have no spread, however long the responses are; unequal ones have."""
    terms = {"first": (0.7, Worth(score)), "second": (0.2, Worth(score))}
    reward = Reward(terms, OverlongSpec(buffer_length=4, penalty_factor=factor), 6)
    [group] = groups_of(sizes=(12,))
    for words in ("a" * 12, "aabbabaabaab"):
        is_mixed = "b" in words
        told = tuple(replace(episode, response=word) for episode, word in zip(group, words, strict=True))
        graded = reward.score(told)
        assert graded.scores.unique().numel() > 2  # the penalties differ
        [summary] = _summaries(flat([told]), graded, 12)
        assert summary.has_spread == is_mixed
        assert summary.mean == pytest.approx(0.9 * (score + 0.25 * words.count("b") / 12), abs=1e-6)
        assert summary.tokens == sum(episode.num_sampled for episode in told)
        sums = episode_sums(Graded(flat([told]), graded, None, {}), 0, 99)
        assert sums["flat_groups"] == (0.0 if is_mixed else 1.0)
        halves = [graded.pick(range(6)), graded.pick(range(6, 12))]
        assert torch.equal(RewardResult.joined(halves).graded, graded.graded)


def test_only_graded_episodes_count() -> None:
    """One that the engine aborted, or that could not be graded, neither makes spread nor changes the mean."""
    [group] = groups_of(sizes=(4,))
    told = (replace(group[0], stop_reason="aborted"), *group[1:])
    graded = RewardResult(torch.tensor([9.0, 1.0, 0.0, 1.0]), torch.tensor([True, True, False, True]))
    [summary] = _summaries(flat([told]), graded, 4)
    assert (summary.has_spread, summary.mean, summary.graded, summary.failed) == (False, 1.0, 2, 1)
    nothing = RewardResult(torch.zeros(4), torch.zeros(4, dtype=torch.bool))
    [summary] = _summaries(flat([told]), nothing, 4)
    assert (summary.has_spread, summary.mean, summary.graded, summary.failed) == (False, 0.0, 0, 3)


class Together:
    """One of several ranks, each of which is a thread."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, values: list) -> None:
        self.rank, self.world_size = rank, world_size
        self._barrier, self._values = barrier, values

    def exchange(self, values: list) -> list:
        self._values[self.rank] = values
        self._barrier.wait(60)
        found = list(chain(*self._values))
        self._barrier.wait(60)
        return found


@dataclass
class Filtered:
    """Some steps of a run with dynamic sampling: by step, the groups of all ranks in order, with scores."""

    groups: list[list[tuple[Group, list[float]]]]
    costs: list[dict[str, float]]  # by rank and step
    draws: list[PromptDraws]  # by rank
    rewards: list[RewardResult]  # by rank and step


def filtered(world_size: int, batch_size: int = 4) -> Filtered:
    steps = range(1, 4)
    options = [f"algorithm.filter_groups.{name}" for name in ("enable=true", "curriculum=true")]
    options += [f"{key}={batch_size}" for key in ("data.train_batch_size", "actor.ppo_mini_batch_size")]
    options += ["rollout.n=3", "data.max_response_length=5", "reward.max_error_fraction=0.9"]
    spec = load_spec([], [], options).spec
    rows = [Row("s", (Message("user", f"{place + 10}+1="),), str(place)) for place in range(47)]
    tokenizer = build_tokenizer(RECIPE)
    prompts = PromptDataset(rows, tokenizer, max_prompt_length=50, filter_overlong=True)
    barrier, values = threading.Barrier(world_size), [[]] * world_size

    def work(rank: int) -> tuple[list, PromptDraws]:
        run = SimpleNamespace(
            spec=spec,
            sampling=sampling_of(spec),
            ranks=Together(rank, world_size, barrier, values),
            rollout=RandomEngine(),
            episodes=EpisodeSource.of(spec, tokenizer),
            train_prompts=prompts,
            reward=Reward({"long": (1.0, Long())}, OverlongSpec(), 5),
            policy_version=0,
        )
        draws, timer = PromptDraws(), StepTimer(torch.device("cpu"))
        for row in range(0, len(rows), 2):
            draws.note(row, row % 3 / 2, 3)
        return [filtered_groups(run, step, draws, timer) for step in steps], draws

    with ThreadPoolExecutor(world_size) as threads:
        found, draws = zip(*threads.map(work, range(world_size)), strict=True)
    for of_ranks in zip(*found, strict=True):  # what is not used is listed
        cost, unused = of_ranks[0][2], [one for _, _, _, listed in of_ranks for one in listed]
        generated, used = (cost[f"filter_groups/samples_{name}"] for name in ("generated", "used"))
        assert len(unused) == generated - used
        assert {one.group_id for one in unused} <= {-1}
    of_steps = [[pair for episodes, rewards, *_ in of_ranks for pair in _by_group(episodes.groups, rewards)]
                for of_ranks in zip(*found, strict=True)]  # fmt: skip
    for of_step in of_steps:
        of_step.sort(key=lambda pair: pair[0][0].task.group_id)
    costs, rewards = ([part[index] for of_rank in found for part in of_rank] for index in (2, 1))
    return Filtered(of_steps, costs, list(draws), rewards)


def _by_group(groups: list[Group], rewards: RewardResult) -> list[tuple[Group, list[float]]]:
    parts = rewards.scores.split([len(group) for group in groups])
    return list(zip(groups, (part.tolist() for part in parts), strict=True))


class Long(Scorer):
    """Responses of at least three tokens are worth 1, others 0; some of the longest cannot be graded."""

    def grade(self, samples) -> list[float | Failure]:
        ids = [sample.response_ids for sample in samples]
        bad = [len(each) == 5 and each[0] < 6 for each in ids]
        return [Failure(f"bad {x}") if b else float(len(x) >= 3) for b, x in zip(bad, ids, strict=True)]


@pytest.mark.parametrize("batch_size", [4, 1])
def test_the_groups_are_the_same_on_any_number_of_ranks(batch_size: int) -> None:
    """A rank keeps what it sampled, also if that is nothing: it knows all terms, and its failures count."""
    alone, together = filtered(1, batch_size), filtered(3, batch_size)
    for of_step in alone.groups:
        assert [group[0].task.group_id for group, _ in of_step] == list(range(batch_size))
        for group, scores in of_step:
            assert len(set(scores)) == 2
            assert all(episode.task is group[0].task for episode in group)
    assert same(together.groups, alone.groups)
    assert together.costs == alone.costs * 3
    assert together.draws == alone.draws * 3
    assert max(group[0].task.weight for step in alone.groups for group, _ in step) > 1.0
    assert max(cost["filter_groups/rounds"] for cost in alone.costs) > 1
    assert any(not len(rewards.scores) for rewards in together.rewards) or batch_size > 1
    assert all(rewards.parts.keys() == {"long"} for rewards in together.rewards)
    failures = [
        sum(rewards.errors_by_term["long"] for rewards in all_of.rewards) for all_of in (alone, together)
    ]
    assert failures[0] == failures[1] > 0


class Worth(Scorer):
    """`b` is worth 0.25 more than any other response."""

    def __init__(self, score: float) -> None:
        self._score = score

    def grade(self, samples) -> list[float]:
        return [self._score + 0.25 * (sample.response == "b") for sample in samples]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_probability_of_a_live_group(n: int) -> None:
    for rate in (0.0, 0.1, 0.5, 1.0):
        each = [np.prod([rate if r else 1 - rate for r in g]) for g in itertools.product((0, 1), repeat=n)]
        mixed = sum(
            p for p, g in zip(each, itertools.product((0, 1), repeat=n), strict=True) if len(set(g)) > 1
        )
        assert spread_probability(rate, n) == pytest.approx(mixed)


def test_a_prompt_that_was_never_tried_is_never_passed_over(tmp_path) -> None:
    draws = PromptDraws()
    assert draws.chance(3, 4, 0.2) == 1.0
    draws.note(3, 0.0, 4)
    assert draws.chance(3, 4, 0.2) == 1.0  # no other score is known: 0 may be all there is
    draws.note(4, 1.0, 4)
    assert draws.chance(3, 4, 0.2) == pytest.approx(spread_probability(1 / 6, 4))
    assert draws.chance(3, 2, 0.9) == 0.9
    draws.position = 17
    draws.save(tmp_path / "prompts.json")
    assert PromptDraws.load(tmp_path / "prompts.json") == draws
