"""The KL penalty in the reward: r − β·KL per token, and the adaptive β step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from rlctl.batch import ScoredBatch
from rlctl.errors import RunFailure
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import kl_controller, with_kl_in_reward
from tests.reference import kl as slow
from tests.unit.train.scored import INVALID, LENGTHS, ROWS, scored_batch
from tests.unit.train.updates import alone

GRADED = [row for row in range(ROWS) if row != INVALID]


def algorithm_of(penalty: str = "k1", **control: object) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate(
        {"use_kl_in_reward": True, "kl_penalty": penalty, "kl_ctrl": {"kl_coef": 0.5, **control}}
    )


def penalties(scored: ScoredBatch, kind: str) -> dict[int, list[float]]:
    """KL of each token of each graded response."""
    policy, ref = scored.old_log_probs.tolist(), scored.ref_log_probs.tolist()
    return {
        row: [slow.estimate(kind, policy[row][t], ref[row][t], 0.0) for t in range(LENGTHS[row])]
        for row in GRADED
    }


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_every_token_pays_for_its_own_kl(kind: str) -> None:
    scored, algorithm = scored_batch(), algorithm_of(kind)
    controller = kl_controller(algorithm)
    after, updated, metrics = with_kl_in_reward(scored, algorithm, controller, alone())
    expected = scored.token_level_rewards.clone()
    known = penalties(scored, kind)
    for row, tokens in known.items():
        for t, kl in enumerate(tokens):
            expected[row, t] -= 0.5 * kl
    torch.testing.assert_close(after.token_level_rewards, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(after.token_level_rewards[INVALID], scored.token_level_rewards[INVALID])
    assert torch.equal(after.scores, scored.scores)
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(fmean(fmean(t) for t in known.values() if t), rel=1e-5),
        "actor/reward_kl_penalty_coeff": 0.5,
    }
    assert updated == controller  # fixed


def test_the_adaptive_coefficient_by_hand() -> None:
    """Too far: up by at most a fifth per horizon; too close: down; n counts responses with a KL."""
    scored = scored_batch()
    algorithm = algorithm_of(type="adaptive", target_kl=0.1, horizon=40)
    share = (len(GRADED) - 1) / 40  # one graded response is empty
    per_token = {"far": 0.13, "very far": 9.0, "near": 0.095}
    coefficient = 0.5
    controller = kl_controller(algorithm)
    for kl, error in zip(per_token.values(), (0.2, 0.2, -0.05), strict=True):
        batch = replace(scored, ref_log_probs=scored.old_log_probs - kl)
        after, controller, metrics = with_kl_in_reward(batch, algorithm, controller, alone())
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl, rel=1e-5)
        # The coefficient of this batch was determined before it; the KL of this batch changes the next
        # coefficient.
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-5)
        paid = (scored.token_level_rewards - after.token_level_rewards)[0, 0]
        assert float(paid) == pytest.approx(coefficient * kl, rel=1e-4)
        coefficient *= 1.0 + error * share
        assert controller.kl_coef == pytest.approx(coefficient, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_log_prob_costs_its_own_penalty_only(bad: float) -> None:
    scored, algorithm = scored_batch(), algorithm_of(type="adaptive")
    poisoned = scored.old_log_probs.clone()
    poisoned[0, 2] = bad
    clean, _, _ = with_kl_in_reward(scored, algorithm, kl_controller(algorithm), alone())
    after, controller, metrics = with_kl_in_reward(
        replace(scored, old_log_probs=poisoned), algorithm, kl_controller(algorithm), alone()
    )
    rewards, wanted = after.token_level_rewards, clean.token_level_rewards.clone()
    wanted[0, 2] = scored.token_level_rewards[0, 2]
    assert torch.equal(rewards, wanted)
    assert all(map(math.isfinite, [*metrics.values(), controller.kl_coef]))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("(log_probs - ref_log_probs).sum(-1, keepdim=True)", r"returned a tensor of shape \(12, 1\)"),
        ("None", "returned NoneType, not a tensor"),
        ("log_probs * float('nan')", "returned NaN"),
    ],
)
def test_a_penalty_that_is_none_of_tokens_is_an_error(tmp_path: Path, returned: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(
        f"def part(log_probs, ref_log_probs, rollout_log_probs):\n    return {returned}\n"
    )
    algorithm = algorithm_of(f"{tmp_path}/mine.py:part")
    with pytest.raises(RunFailure, match=rf"KL estimator .*mine\.py:part {words}"):
        with_kl_in_reward(scored_batch(), algorithm, kl_controller(algorithm), alone())
