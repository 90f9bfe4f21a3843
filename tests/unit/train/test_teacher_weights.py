"""The KL to the teacher has the importance weights of its tokens, and the policy gradient's denominator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.train.update import update
from tests.models import naive_log_probs, tiny_model
from tests.unit.train.updates import BYPASS, REINFORCE, PlainEngine, alone, batch_of, settings_of

COEF = 0.7


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_the_gradient_is_that_of_weighted_squares(level: str | None) -> None:
    """k2: ½ (log π_θ − log π_teacher)² of sampled tokens; without advantages nothing else has a gradient."""
    model = tiny_model()
    batch = batch_of(model)
    zero = torch.zeros_like(batch.rollout_log_probs)
    teacher = batch.rollout_log_probs - 0.5 - torch.arange(len(zero)) / len(zero)
    batch = replace(batch, advantages=zero, old_log_probs=batch.rollout_log_probs)
    batch = batch.with_columns(teacher_log_probs=teacher)
    correction = BYPASS | REINFORCE | {"rollout_is": level, "rollout_is_batch_normalize": False}
    settings = settings_of(correction, teacher_kl_coef=COEF, teacher_kl_type="k2")
    engine = PlainEngine(model)
    update(batch, engine, alone(), settings, lambda _: 0.0, 0)

    other = tiny_model()
    own = naive_log_probs(other, batch)[0]
    gaps = own.detach() - batch.rollout_log_probs
    of_rows = batch.units.episode
    sums = {None: zero, "token": gaps, "sequence": of_rows.spread(of_rows.sum(gaps)).float()}
    rule = settings.rules.weight
    weights = sums[level].exp().clamp(rule.lower if rule.bound == "clip" else 0.0, rule.upper)
    assert level is None or weights.std() > 0.05
    (COEF * (weights * 0.5 * (own - teacher).square()).sum() / len(own)).backward()
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(engine.gradient[name], parameter.grad, rtol=1e-4, atol=1e-6)
