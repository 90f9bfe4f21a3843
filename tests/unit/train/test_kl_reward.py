"""The KL penalty in the reward: r − β·KL per token, and the adaptive β step by step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import kl_controller, with_penalties
from tests.reference import kl as slow
from tests.unit.train.scored import LENGTHS, ROWS, scored_batch
from tests.unit.train.updates import alone


def algorithm_of(penalty: str = "k1", **control: object) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate(
        {"use_kl_in_reward": True, "kl_penalty": penalty, "kl_ctrl": {"kl_coef": 0.5, **control}}
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_every_token_pays_for_its_own_kl(kind: str) -> None:
    scored, algorithm = scored_batch(), algorithm_of(kind)
    controller = kl_controller(algorithm)
    after, updated, metrics = with_penalties(scored, algorithm, controller, alone())
    policies = zip(scored.old_log_probs.tolist(), scored.column("ref_log_probs").tolist(), strict=True)
    kl = torch.tensor([slow.estimate(kind, policy, ref, 0.0) for policy, ref in policies])
    torch.testing.assert_close(after.rewards, scored.rewards - 0.5 * kl, rtol=1e-5, atol=1e-6)
    means = [fmean(part.tolist()) for part in kl.split(LENGTHS) if len(part)]
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx(fmean(means), rel=1e-5),
        "actor/reward_kl_penalty_coeff": 0.5,
    }
    assert updated == controller  # fixed


def test_the_adaptive_coefficient_by_hand() -> None:
    """Too far: up by at most a fifth per horizon; too close: down; n counts responses with a KL."""
    scored = scored_batch()
    algorithm = algorithm_of(type="adaptive", target_kl=0.1, horizon=40)
    share = (ROWS - 1) / 40  # one response is empty
    per_token = {"far": 0.13, "very far": 9.0, "near": 0.095}
    coefficient = 0.5
    controller = kl_controller(algorithm)
    for kl, error in zip(per_token.values(), (0.2, 0.2, -0.05), strict=True):
        batch = scored.with_columns(ref_log_probs=scored.old_log_probs - kl)
        after, controller, metrics = with_penalties(batch, algorithm, controller, alone())
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl, rel=1e-5)
        # The coefficient of this batch was determined before it; the KL of this batch changes the next
        # coefficient.
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-5)
        paid = (scored.rewards - after.rewards)[0]
        assert float(paid) == pytest.approx(coefficient * kl, rel=1e-4)
        coefficient *= 1.0 + error * share
        assert controller.kl_coef == pytest.approx(coefficient, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_log_prob_costs_its_own_penalty_only(bad: float) -> None:
    scored, algorithm = scored_batch(), algorithm_of(type="adaptive")
    poisoned = scored.old_log_probs.clone()
    poisoned[2] = bad
    clean, _, _ = with_penalties(scored, algorithm, kl_controller(algorithm), alone())
    after, controller, metrics = with_penalties(
        replace(scored, old_log_probs=poisoned), algorithm, kl_controller(algorithm), alone()
    )
    wanted = clean.rewards.clone()
    wanted[2] = scored.rewards[2]
    assert torch.equal(after.rewards, wanted)
    assert all(map(math.isfinite, [*metrics.values(), controller.kl_coef]))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("(log_probs - ref).sum(-1, keepdim=True)", r"returned a tensor of shape \(1,\)"),
        ("None", "returned NoneType, not a tensor"),
        ("log_probs * float('nan')", "returned NaN"),
    ],
)
def test_a_penalty_that_is_none_of_tokens_is_an_error(tmp_path: Path, returned: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(f"def part(log_probs, ref, rollout, unit):\n    return {returned}\n")
    algorithm = algorithm_of(f"{tmp_path}/mine.py:part")
    with pytest.raises(RunFailure, match=rf"KL estimator .*mine\.py:part {words}"):
        with_penalties(scored_batch(), algorithm, kl_controller(algorithm), alone())
