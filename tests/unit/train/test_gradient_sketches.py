"""Sketched gradients of groups, against those of the output head itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlctl.engine.log_probs import SKETCH_SIZE, OuterSketch, policy_output
from rlctl.train import update as module
from rlctl.train.gradient_error import GradientSketches
from tests.models import tiny_model
from tests.unit.train.updates import PlainEngine, alone, batch_of, settings_of

ROWS, SIBLINGS = 32, 4
#: Five standard deviations of an inner product, over the norms.
FAR = 5 * (2 / SKETCH_SIZE) ** 0.5
RULE = {
    "bypass_mode": True,
    "loss_type": "reinforce",
    "rollout_is": "token",
    "rollout_is_bound": "truncate",
    "rollout_is_threshold": "1.5",
    "rollout_is_batch_normalize": False,
}


class Sketching(PlainEngine):
    def policy(self, inputs, **asked):
        return policy_output(self.module, inputs, **asked)


def batch():
    found = batch_of(tiny_model(), ROWS)
    return replace(found, group_ids=torch.arange(ROWS) // SIBLINGS)


def measured(monkeypatch: pytest.MonkeyPatch, micro_rows: int):
    """What `update` collects, and what it logs."""
    collected: list[GradientSketches] = []

    class Kept(GradientSketches):
        def __init__(self, **given) -> None:
            super().__init__(**given)
            collected.append(self)

    monkeypatch.setattr(module, "GradientSketches", Kept)
    settings = settings_of(RULE, mini_rows=ROWS, micro_rows=micro_rows, agg_mode="seq-mean-token-sum")
    settings = replace(settings, measure_grad_error=True)
    done = module.update(batch(), Sketching(tiny_model()), alone(), settings, lambda _: 0.0, 0)
    [found] = collected
    return found, done.metrics


def head_gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """(groups, V·H) of Σ min(ρ_t, 1.5)·A·∇ log π, and of Σ (Π ρ)·A·∇ log π, by autograd."""
    model, rows = tiny_model(), batch()
    engine = Sketching(model)
    used, exact = [], []
    for group in range(ROWS // SIBLINGS):
        part = rows.pick(slice(group * SIBLINGS, (group + 1) * SIBLINGS))
        log_probs = engine.policy(part.inputs).log_probs
        log_ratio = torch.where(part.valid_mask, log_probs.detach() - part.rollout_log_probs, 0.0)
        by_token, by_sequence = log_ratio.exp().clamp(max=1.5), log_ratio.sum(-1, keepdim=True).exp()
        for kept, weight in ((used, by_token), (exact, by_sequence)):
            loss = (weight * part.advantages * log_probs * part.valid_mask).sum()
            (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
            kept.append(gradient.flatten())
    return torch.stack(used), torch.stack(exact)


@pytest.mark.parametrize("micro_rows", [ROWS, 5])
def test_inner_products_are_those_of_the_heads_gradients(monkeypatch, micro_rows: int) -> None:
    found, metrics = measured(monkeypatch, micro_rows)
    used, exact = head_gradients()
    sketched = [torch.stack([kept[group] for group in sorted(kept)]) for kept in (found.used, found.exact)]
    sketched[0] = sketched[0] * ROWS  # the loss is a mean over sequences
    for ours, other, a, b in (
        (sketched[0], sketched[0], used, used),
        (sketched[0], sketched[1], used, exact),
        (sketched[1], sketched[1], exact, exact),
    ):
        norms = a.norm(dim=1)[:, None] * b.norm(dim=1)
        assert ((ours @ other.T - a @ b.T).abs() / norms).max() < FAR
    for key in ("", "_lo", "_hi"):
        assert 0.0 <= metrics[f"rollout_corr/grad_error{key}"] <= 1.0


def test_the_same_however_it_is_cut(monkeypatch) -> None:
    (_, whole), (_, cut) = measured(monkeypatch, ROWS), measured(monkeypatch, 3)
    assert cut["rollout_corr/grad_error"] == pytest.approx(whole["rollout_corr/grad_error"], abs=1e-4)


def test_sketches_of_outer_products_keep_inner_products() -> None:
    draw = torch.Generator().manual_seed(1)
    left, right = torch.randn(40, 300, generator=draw), torch.randn(40, 64, generator=draw)
    sketch = OuterSketch.of(300, 64, torch.device("cpu"))(left, right)
    wanted = (left @ left.T) * (right @ right.T)
    norms = wanted.diagonal().sqrt()
    errors = (sketch @ sketch.T - wanted) / (norms[:, None] * norms)
    assert errors.abs().max() < FAR
    assert abs(float(errors.mean())) < FAR / 20


def test_without_being_asked_nothing_is_measured() -> None:
    settings = settings_of(RULE, mini_rows=ROWS, micro_rows=ROWS, agg_mode="seq-mean-token-sum")
    done = module.update(batch(), PlainEngine(tiny_model()), alone(), settings, lambda _: 0.0, 0)
    assert not any("grad_error" in key for key in done.metrics)
