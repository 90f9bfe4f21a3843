"""Where the truth is known: the oracle is right, and the recommendation misses the best by little."""

from __future__ import annotations

import numpy as np
import pytest

from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.what_if.replay import replay
from rlctl.what_if.settings import grid
from tests.reference.enumerable import GROUP, World

pytestmark = pytest.mark.slow
FIXED = ("none", "token truncate 2.0", "sequence truncate 2.0", "sequence clip 2.0", "sequence, no bound")
GRID = [
    setting
    for setting in grid(RolloutCorrectionSpec(rollout_is_batch_normalize=False))[1:]
    if not any(rule.negative_advantage_only for rule in setting.rules.reject)  # a world's weights know no A
]
#: A third of the grid is enough here; `benchmarks/what_if.py` tries all of it.
SETTINGS = [one for place, one in enumerate(GRID) if place % 3 == 0 or one.name in FIXED]
BY_NAME = {setting.name: setting for setting in SETTINGS}


@pytest.fixture(scope="module")
def world() -> World:
    return World(3, "linear", "noise", 0.6, "count", horizon=3)


def test_probabilities_and_scores(world: World) -> None:
    np.testing.assert_allclose(world.train.sum(1), 1.0)
    np.testing.assert_allclose(world.rollout.sum(1), 1.0)
    mean = np.einsum("qy,qytp->qp", world.train, world.scores)
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)  # E[∇ log π] = 0


def test_the_exact_weight_has_no_bias(world: World) -> None:
    truth = world.truth(BY_NAME["sequence, no bound"].rules)
    assert truth.distance / truth.signal < 1e-9
    assert truth.error(1e9) == pytest.approx(0.0, abs=1e-6)
    assert world.truth(BY_NAME["none"].rules).distance / truth.signal > 1e-3


def test_the_oracle_against_sampling(world: World) -> None:
    """Mean and noise of a group's gradient, by drawing groups: another way to the same two numbers."""
    prompts, rows = world.draw(20_000, seed=1)
    rewards = world.rewards[prompts, rows].reshape(-1, GROUP)
    ratio = np.exp((world.log_probs - world.rollout_log_probs).sum(-1))
    weight = np.minimum(ratio, 2.0)[prompts, rows]
    advantages = (GROUP * rewards - rewards.sum(1, keepdims=True)) / (GROUP - 1)
    each = (weight * advantages.ravel())[:, None] * world.scores[prompts, rows].sum(1)
    groups = each.reshape(-1, GROUP, each.shape[1]).mean(1)
    truth = world.truth(BY_NAME["sequence truncate 2.0"].rules)
    mean = groups.mean(0)
    noise = np.square(groups).sum(1).mean() - mean @ mean
    assert noise == pytest.approx(truth.noise, rel=0.05)
    assert mean @ mean - noise / len(groups) == pytest.approx(truth.norm, rel=0.1)


CASES = [
    (seed, kind, mismatch, size, reward)
    for seed, kind, reward in ((21, "linear", "count"), (22, "hidden", "random"))
    for mismatch, size in (("noise", 0.3), ("noise", 0.8), ("parameters", 0.3), ("stale", 4))
]


def test_the_recommendation_beats_any_fixed_rule() -> None:
    """Excess error over the best of the grid, mean over worlds and mini-batch sizes."""
    excess: dict[str, list[float]] = {name: [] for name in ("recommended", *FIXED)}
    for case in CASES:
        world = World(*case, horizon=4)
        truths = {name: world.truth(setting.rules) for name, setting in BY_NAME.items()}
        step = world.sample(256, seed=case[0])
        for groups in (16, 256):
            errors = {name: truth.error(groups) for name, truth in truths.items()}
            found = replay([step], SETTINGS, groups_per_batch=groups).recommended
            assert found is not None
            for who, name in {"recommended": found.name, **{name: name for name in FIXED}}.items():
                excess[who].append(errors[name] - min(errors.values()))
    mean = {who: float(np.mean(values)) for who, values in excess.items()}
    assert mean["recommended"] < 0.04
    assert mean["recommended"] < min(mean[name] for name in FIXED)
