"""Policy and critic updates on DeepSpeed against float64 steps from the papers: ranks, ZeRO stages, bf16.

Also the losses and advantages with inputs in bf16, and the adaptive KL coefficient in a closed loop.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algos.estimators import gae_recursion, whiten
from rlctl.algos.kl import kl_loss
from rlctl.algos.losses import policy_loss, value_loss
from rlctl.algos.segments import Segments
from rlctl.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import kl_controller, with_advantages, with_penalties
from rlctl.train.settings import EstimatorSettings
from tests.processes import on_ranks
from tests.properties.batches import by_response, loss_rule, make_batch
from tests.properties.training_oracle import OBJECTIVES, Trained, steps, trained
from tests.unit.train.scored import GROUPS, LENGTHS, ROWS, scored_batch
from tests.unit.train.updates import alone

FP32, BF16 = torch.float32, torch.bfloat16
#: Ranks → whose steps, ZeRO stage and dtype.
CASES = {
    1: [(who, 0, FP32) for who in OBJECTIVES] + [("actor", 2, BF16), ("critic without clip", 1, BF16)],
    2: [(who, stage, FP32) for who in ("actor", "critic") for stage in (0, 1, 2, 3)] + [("actor", 3, BF16)],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("oracle")
    return {count: on_ranks(count, trained, cases, where=where) for count, cases in CASES.items()}


@pytest.fixture(scope="module")
def expected(found) -> dict[str, Trained]:
    first = found[1][0]
    return {who: steps(first[who, 0, FP32].start, objective) for who, objective in OBJECTIVES.items()}


@pytest.mark.parametrize(("world_size", "case"), [(n, case) for n, cases in CASES.items() for case in cases])
def test_steps_are_those_of_the_papers(found, expected, world_size: int, case: tuple) -> None:
    """Loss, gradient clip, weight decay and AdamW together, after four steps."""
    who, _, dtype = case
    wanted = expected[who]
    assert wanted.norm > 0.1  # the clip, at 0.05, is in force
    for result in found[world_size]:
        got = result[case]
        assert got.end.keys() == wanted.end.keys()
        gaps = torch.cat([(got.end[n] - x).abs().flatten() for n, x in wanted.end.items()])
        moved = torch.cat([(wanted.start[n] - x).abs().flatten() for n, x in wanted.end.items()])
        assert moved.mean() > 5e-3
        if dtype == FP32:
            assert got.norm == pytest.approx(wanted.norm, rel=1e-4)
            # Where a gradient is rounding error, AdamW makes a step of it.
            assert (gaps > 2e-5).double().mean() < 2e-3
            assert gaps.mean() < 2e-6
        else:
            assert got.norm == pytest.approx(wanted.norm, rel=0.05)
            assert gaps.mean() < 0.15 * moved.mean()


# --- inputs in half precision -----------------------------------------------------------------------


def half(values: torch.Tensor) -> torch.Tensor:
    return values.to(BF16)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_policy_losses_of_bf16_inputs_round_nothing_else(name: str) -> None:
    """Value and gradient are those of the rounded inputs in float64."""
    batch = make_batch(8, rows=8)
    given = [half(x) for x in batch.policies[:3]]
    results = []
    for dtype in (torch.float64, BF16):
        new, old, advantages = (x.to(dtype) for x in given)
        new.requires_grad_()
        rule = loss_rule(name, *(x.double() for x in given), batch.unit)
        loss = policy_loss(rule, new, old, advantages, batch.unit, None)
        (gradient,) = torch.autograd.grad(loss.values.sum(), new)
        results.append((loss.values.detach(), gradient))
    (values, gradient), (of_half, half_gradient) = results
    torch.testing.assert_close(of_half.double(), values, rtol=1e-4, atol=1e-5)
    # A gradient has the dtype of its input: it is rounded once.
    torch.testing.assert_close(half_gradient.double(), gradient, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", list(KL_ESTIMATORS))
def test_kl_losses_of_bf16_inputs_round_nothing_else(kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    unit = Segments(torch.arange(1, 10))
    policies = [half(-0.5 - torch.rand(unit.total, generator=draw)) for _ in range(3)]
    exact, found = (kl_loss(kind, *(x.to(d) for x in policies), unit) for d in (torch.float64, BF16))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_value_loss_and_advantages_of_bf16_inputs_round_nothing_else() -> None:
    draw = torch.Generator().manual_seed(2)
    unit = Segments(torch.tensor([7, 3, 0, 1, 5]))
    new, old, returns, rewards = (half(3 + torch.randn(unit.total, generator=draw)) for _ in range(4))
    found = value_loss(new, old, returns, clip=0.2).values
    v, o, r = (x.double() for x in (new, old, returns))
    exact = 0.5 * torch.maximum((v - r) ** 2, (o + (v - o).clamp(-0.2, 0.2) - r) ** 2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)

    columns = (rewards.double(), new.double(), *gae_recursion(rewards, new, unit, 0.9, 0.8))
    for of_rewards, values, advantages, targets in by_response(unit, *columns):
        for t, (advantage, target) in enumerate(zip(advantages, targets, strict=True)):
            following = [*values[1:], 0.0]
            deltas = [r + 0.9 * n - v for r, n, v in zip(of_rewards, following, values, strict=True)][t:]
            wanted = math.fsum((0.9 * 0.8) ** j * delta for j, delta in enumerate(deltas))
            assert advantage == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert target == pytest.approx(wanted + values[t], rel=1e-5, abs=1e-6)
    known = rewards.double()
    white = (known - known.mean()) / known.std()
    torch.testing.assert_close(whiten(rewards).double(), white, rtol=1e-5, atol=1e-6)


# --- the adaptive KL coefficient --------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.02, 5.0])
def test_the_adaptive_coefficient_holds_the_kl_at_its_target(start: float) -> None:
    """Ziegler et al. 2019, section 2.2, with a policy whose KL per token is 0.1 / coefficient.

    The rewards, advantages and the next coefficient of every batch are computed here in float64.
    """
    horizon, target = 60, 0.2
    algorithm = AlgorithmSpec.model_validate(
        {
            "adv_estimator": "rloo",
            "use_kl_in_reward": True,
            "kl_penalty": "k1",
            "kl_ctrl": {"type": "adaptive", "kl_coef": start, "target_kl": target, "horizon": horizon},
        }
    )
    controller, coefficient = kl_controller(algorithm), start
    counted = [row for row in range(ROWS) if LENGTHS[row]]
    for step in range(120):
        scored = scored_batch(step)
        draw = torch.Generator().manual_seed(step)
        noise = 0.1 * torch.randn(scored.old_log_probs.shape, generator=draw)
        gaps = 0.1 / coefficient + noise
        scored = scored.with_columns(ref_log_probs=scored.old_log_probs - gaps)
        gaps = (scored.old_log_probs - scored.column("ref_log_probs")).double()  # as rounded
        after, controller, metrics = with_penalties(scored, algorithm, controller, alone())

        rewards = scored.rewards.double() - coefficient * gaps
        torch.testing.assert_close(after.rewards.double(), rewards, rtol=1e-5, atol=1e-5)
        assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(coefficient, rel=1e-9)
        totals = [math.fsum(part.tolist()) for part in rewards.split(LENGTHS)]
        advantages = with_advantages(after, EstimatorSettings.of(algorithm), alone()).advantages.split(
            LENGTHS
        )
        for row in counted:
            others = [totals[j] for j in range(ROWS) if GROUPS[j] == GROUPS[row] and j != row]
            wanted = totals[row] - math.fsum(others) / len(others)
            assert float(advantages[row][0]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)

        means = [math.fsum(part.tolist()) / len(part) for part in gaps.split(LENGTHS) if len(part)]
        kl = math.fsum(means) / len(means)
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl, rel=1e-5, abs=1e-7)
        error = min(max(kl / target - 1.0, -0.2), 0.2)
        coefficient *= 1.0 + error * len(means) / horizon
    assert coefficient == pytest.approx(0.1 / target, rel=0.15)
