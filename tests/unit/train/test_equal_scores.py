"""Groups of equal scores give no advantage, whatever the parts that the scores are the sum of."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs, estimate, has_spread
from rlctl.algos.segments import Segments, Units
from rlctl.batch import Episode, TokenSequence
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.reward.build import Reward
from rlctl.reward.protocol import Grade, Graded, Sample, Scorer, exact_sum
from rlctl.run_spec.rollout import OverlongSpec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.score_batch import train_batch, with_advantages
from rlctl.train.settings import EstimatorSettings
from tests.episodes import flat, task_of
from tests.unit.train.updates import alone

#: Estimators that compare the episodes of a group and nothing else.
OF_GROUPS = [
    part.name
    for part in ADVANTAGE_ESTIMATORS.parts()
    if "group_ids" in part.needs and part.needs <= {"group_ids"} and part.params is None
]


def episode(member: int, turn_rewards: list[float], reward: float | None = None) -> Episode:
    """Two tokens per turn, with the turn's reward at the second one."""
    count = 2 * len(turn_rewards)
    rewards = torch.zeros(count, dtype=torch.float64)
    rewards[1::2] = torch.tensor(turn_rewards, dtype=torch.float64)
    sequence = TokenSequence(
        token_ids=torch.arange(count + 1),
        sampled=torch.arange(count + 1) > 0,
        log_probs=torch.full((count,), -1.0),
        versions=torch.zeros(count, dtype=torch.int64),
        turns=torch.arange(len(turn_rewards)).repeat_interleave(2),
        rewards=rewards,
    )
    whole = exact_sum(turn_rewards) if reward is None else reward
    return Episode(task_of(), member, (sequence,), "", reward=whole)


class Fixed(Scorer):
    """Gives the scores of a list."""

    def __init__(self, scores: list[float]) -> None:
        self._scores = scores

    def grade(self, samples: list[Sample]) -> list[Grade]:
        return list(self._scores)


def graded(episodes: list[Episode], terms: dict[str, tuple[float, list[float]]] | None = None) -> Graded:
    scorers = {name: (weight, Fixed(scores)) for name, (weight, scores) in (terms or {}).items()}
    return Graded(flat([tuple(episodes)]), Reward(scorers, OverlongSpec(), 16).score(episodes), None, {})


@cache
def spec_of(estimator: str, n: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "algorithm": {"adv_estimator": estimator},
            "data": {"train_batch_size": 1},
            "actor": {"ppo_mini_batch_size": 1},
            "rollout": {"n": n},
        }
    )


def advantages(found: Graded, estimator: str) -> Tensor:
    spec = spec_of(estimator, len(found.episodes))
    batch = with_advantages(
        train_batch(spec, alone(), found, 0), EstimatorSettings.of(spec.algorithm), alone()
    )
    assert batch.advantages is not None
    return batch.units.episode.mean(batch.advantages)


def turns_that_sum_to(total: float, scale: float, draw: random.Random) -> list[float]:
    """Rewards of some turns with two decimals."""
    parts = [round(draw.gauss(0, scale), 2) for _ in range(draw.randint(0, 5))]
    hundredths = round(100 * total) - sum(round(100 * part) for part in parts)
    return [*parts, hundredths / 100]


@pytest.mark.parametrize("estimator", OF_GROUPS)
@pytest.mark.parametrize("total", [0.0, 0.7, -3.0, 70.0, 0.01])
@pytest.mark.parametrize("scale", [0.3, 30.0, 1e6])
def test_equal_sums_of_turn_rewards(estimator: str, total: float, scale: float) -> None:
    draw = random.Random(f"{total} {scale}")
    for _ in range(2):
        group = [episode(member, turns_that_sum_to(total, scale, draw)) for member in range(8)]
        found = graded(group)
        assert advantages(found, estimator).tolist() == [0.0] * 8
        assert not has_spread(found.rewards.scores, torch.zeros(8, dtype=torch.int64)).any()


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_equal_sums_of_rewards_in_float32(estimator: str) -> None:
    """As environments give them that compute with NumPy or torch: 0.1 is 0.10000000149."""
    for parts in ([[0.1, 0.2, 0.3], [0.6], [0.45, 0.15]], [[70.7, -30.3], [40.4], [-0.6, 41.0]]):
        group = [
            episode(member, torch.tensor(turns, dtype=torch.float32).tolist())
            for member, turns in enumerate(parts)
        ]
        assert advantages(graded(group), estimator).tolist() == [0.0] * 3


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_equal_sums_of_the_environment_itself(estimator: str) -> None:
    """Summed by its own code in floating point."""
    rewards = [0.1 + 0.2 - 0.3, 0.7 + 0.1 - 0.8, 0.0, 1e-17]
    found = graded([episode(member, [0.0], reward) for member, reward in enumerate(rewards)])
    assert advantages(found, estimator).tolist() == [0.0] * 4


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_equal_weighted_sums_of_terms(estimator: str) -> None:
    """0.1 + 0.2 + 0.4, and 0.7 from one term or two; 0.15 + 0.65 + 0.2, and 1."""
    terms = {
        "a": (1.0, [0.1, 0.7, 0.0, 0.35]),
        "b": (1.0, [0.2, 0.0, 0.3, 0.35]),
        "c": (1.0, [0.4, 0.0, 0.4, 0.0]),
    }
    found = graded([episode(member, [0.0]) for member in range(4)], terms)
    assert advantages(found, estimator).tolist() == [0.0] * 4
    terms = {"a": (0.15, [1.0, 2.0]), "b": (0.65, [1.0, 1.0]), "c": (0.2, [1.0, 0.25])}
    found = graded([episode(member, [0.0]) for member in range(2)], terms)
    assert advantages(found, estimator).tolist() == [0.0] * 2


@pytest.mark.parametrize("estimator", OF_GROUPS)
def test_scores_that_differ_by_little_still_differ(estimator: str) -> None:
    found = graded([episode(0, [0.5, 0.2]), episode(1, [0.7]), episode(2, [0.700001])])
    first, second, third = advantages(found, estimator).tolist()
    assert first == second < 0.0 < third


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_one_turn_each_with_equal_scores_has_equal_returns(estimator: str) -> None:
    """The rest of the score stands at the token that has the turn's reward."""
    lengths = torch.tensor([2, 2, 2, 2])
    unit = Segments(lengths)
    parts = torch.tensor([70.7, -0.1, 0.3, 1e-3], dtype=torch.float64)
    token_rewards = torch.zeros(8, dtype=torch.float64)
    token_rewards[1::2] = parts + (0.7 - parts)
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
        rewards=torch.full((4,), 0.7, dtype=torch.float64),
        units=Units(unit, unit, unit),
        group_ids=torch.zeros(4, dtype=torch.int64),
        gamma=1.0,
        lam=1.0,
        divide_by_std=True,
        values=torch.zeros(8),
    )
    assert estimate(estimator, inputs).advantages.tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ([0.1, 0.2], 0.3),
        ([70.7, -30.3], 40.4),
        ([0.1, 0.2, -0.3], 0.0),
        ([1e6 + 0.1, -1e6], 0.1),
        ([1 / 3] * 3, 1.0),
        ([1e-9, 2e-9], 3e-9),
        ([], 0.0),
        ([-0.0], 0.0),
        ([1e300, 1e300], 2e300),
    ],
)
def test_sums_are_those_of_decimals(parts: list[float], total: float) -> None:
    assert exact_sum(parts) == total
    assert str(exact_sum(reversed(parts))) == str(total)


def test_what_is_not_finite_stays() -> None:
    assert exact_sum([float("inf"), 1.0]) == float("inf")
    assert str(exact_sum([float("inf"), -float("inf")])) == "nan"
