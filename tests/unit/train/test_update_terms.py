"""What each loss and term does to the update, beyond the gradient that `test_update` compares."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from rlctl.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlctl.train.update import update
from tests.models import naive_log_probs, tiny_model
from tests.unit.train.slow import slow_loss
from tests.unit.train.updates import (
    BYPASS,
    CASES,
    DECOUPLED,
    REINFORCE,
    PlainEngine,
    alone,
    batch_of,
    settings_of,
)

LR = 0.05
RATIO_LOSSES = [name for name in POLICY_LOSSES if name != "reinforce"]


def updated(correction, batch=None, *, hold: bool = False, **settings):
    """(outcome, engine) of one `update` by plain SGD."""
    model = tiny_model()
    engine = PlainEngine(model)
    batch = batch_of(model) if batch is None else batch
    if correction["bypass_mode"]:
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    settings = settings_of(correction, **settings)
    return update(batch, engine, alone(), settings, lambda _: LR, 7, hold=hold), engine


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, same: bool = True) -> None:
    close = [torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6) for name in theirs]
    assert all(close) if same else not all(close)


def test_the_cases_have_every_loss_and_every_kl() -> None:
    assert {case.correction["loss_type"] for case in CASES.values()} == set(POLICY_LOSSES.stable())
    kinds = {case.terms.get("kl_loss_type") for case in CASES.values()}
    assert kinds == {None, *KL_ESTIMATORS}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *[(name, "pg_clipfrac") for name in ("bypass clip", "decoupled clip", "gspo", "cispo", "dppo")],
        *[(name, "pg_clipfrac_lower") for name in ("dual clip", "dppo")],
    ],
)
def test_the_cases_clip(name: str, key: str) -> None:
    """A clip that never binds would make its gradient's test say nothing."""
    case = CASES[name]
    outcome, _ = updated(case.correction, **case.options)
    assert 0.01 < outcome.metrics[f"actor/{key}"] < 0.9


@cache
def without_weights(loss: str, *, bypass: bool):
    return updated((BYPASS if bypass else DECOUPLED) | {"loss_type": loss, "rollout_is": None})


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_ratio_of_its_own_is_the_correction_in_bypass_mode(loss: str, level: str) -> None:
    """Weights on top would count twice: they are measured, and change nothing; decoupled they apply."""
    for mode in (BYPASS, DECOUPLED):
        correction = mode | {"loss_type": loss}
        weighted, engine = updated(correction | {"rollout_is": level})
        bare, plain = without_weights(loss, bypass=mode["bypass_mode"])
        applies = not (mode["bypass_mode"] and loss in RATIO_LOSSES)
        assert_same(engine.gradient, plain.gradient, same=not applies)
        assert weighted.metrics["rollout_corr/rollout_is_raw_std"] > 0.1
        assert "rollout_corr/rollout_is_std" in weighted.metrics
        assert "rollout_corr/rollout_is_std" not in bare.metrics


@pytest.mark.parametrize("name", CASES)
def test_held_it_measures_everything_and_changes_nothing(name: str) -> None:
    case = CASES[name]
    held, engine = updated(case.correction, hold=True, **case.options)
    free, moved = updated(case.correction, **case.options)
    assert (held.num_updates, free.num_updates) == (0, 1)
    assert held.metrics == free.metrics
    for ours, theirs in zip(held_fields(held), held_fields(free), strict=True):
        assert torch.equal(ours, theirs)
    start = dict(tiny_model().named_parameters())
    assert all(torch.equal(p, start[n]) for n, p in engine.model.named_parameters())
    assert not all(torch.equal(p, start[n]) for n, p in moved.model.named_parameters())


def held_fields(outcome) -> list[torch.Tensor]:
    return [
        outcome.seen.training_log_probs,
        outcome.seen.weights,
        outcome.seen.keep,
        outcome.seen.nonfinite,
    ]


def test_the_bonus_raises_entropy_and_its_size_is_the_coefficients() -> None:
    """Two updates from the same weights, with advantages of zero: only the bonus moves them."""
    model = tiny_model()
    batch = batch_of(model)
    flat = replace(batch, advantages=torch.zeros_like(batch.advantages))

    def entropy_of(policy) -> float:
        return float(naive_log_probs(policy, flat)[1].mean().detach())

    correction = BYPASS | REINFORCE | {"rollout_is": None}
    outcome, small = updated(correction, flat, entropy_coeff=0.1)
    _, large = updated(correction, flat, entropy_coeff=0.3)
    assert outcome.metrics["actor/entropy"] == pytest.approx(entropy_of(model), rel=1e-4)
    assert outcome.metrics["actor/pg_loss"] == 0.0
    assert entropy_of(small.model) > entropy_of(model)
    for name, gradient in small.gradient.items():
        torch.testing.assert_close(large.gradient[name], 3.0 * gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_kl_alone_pulls_towards_the_reference(kind: str) -> None:
    """Advantages of zero: the gradient is the penalty's, and but for k1 it brings the two closer."""
    model = tiny_model()
    batch = batch_of(model)
    flat = replace(batch, advantages=torch.zeros_like(batch.advantages))
    correction = DECOUPLED | REINFORCE | {"rollout_is": None}
    terms = {"kl_loss_type": kind, "kl_loss_coef": 2.0}
    loss = slow_loss(model, flat, settings_of(correction, **terms))
    loss.total.backward()
    outcome, engine = updated(correction, flat, micro_sequences=5, **terms)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(engine.gradient[name], parameter.grad, rtol=1e-3, atol=2e-6)
    assert outcome.metrics["actor/kl_loss"] == pytest.approx(loss.kl.item(), rel=1e-4)
    if kind != "k1":
        after = slow_loss(engine.model, flat, settings_of(correction, kl_loss_type="k2"))
        before = slow_loss(tiny_model(), flat, settings_of(correction, kl_loss_type="k2"))
        assert after.kl < before.kl


def test_no_term_no_metric() -> None:
    outcome, _ = updated(BYPASS | REINFORCE)
    assert not {"actor/kl_loss", "actor/kl_coef"} & outcome.metrics.keys()
