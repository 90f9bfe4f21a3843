"""NaN, infinities, empty rows and total rejection: counted, contained, never in a gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlctl.algos.correction import correct
from rlctl.algos.losses import coefficients, policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Segments, Units, to_host
from rlctl.registry import POLICY_LOSSES
from tests.properties.batches import loss_rule, weight_rules
from tests.properties.padded_batches import Batch, corrected, factor_and_metrics, make_batch

RULES = (
    RejectRule("token", "k1", "none", -0.5, 0.5, "token"),
    RejectRule("sequence", "ratio", "sum", 0.2, 5.0, "sequence"),
    RejectRule("off_policy", "k1", "mean", None, 0.2, "sequence", negative_advantage_only=True),
)
#: What counts a bad sequence among the rejected, by definition; all else must not see it.
COUNTS_IT = ("nonfinite_sequences", "rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction")
LEVELS = [None, "token", "sequence", "geometric"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def spoil(batch: Batch, row: int, value: float, which: str) -> Batch:
    """`value` in the middle of one response, in one of the log-probs or both."""
    column = int(batch.mask[row].nonzero().flatten()[-1])
    names = ["log_probs", "rollout_log_probs"] if which == "both" else [which]
    for name in names:
        getattr(batch, name)[row, column] = value
    return batch


@pytest.mark.parametrize("which", ["log_probs", "rollout_log_probs", "both"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", weight_rules()[::3], ids=str)
def test_a_bad_number_costs_its_own_sequence_and_nothing_else(weight, value: float, which: str) -> None:
    rules = CorrectionRules(weight, RULES)
    bad_row, others = 5, torch.tensor([0, 1, 2, 3, 4, 6, 7])
    batch = spoil(make_batch(8, rows=8), bad_row, value, which)
    found, alone = batch.correct(rules), batch.select(others).correct(rules)

    assert found.nonfinite.nonzero().flatten().tolist() == [bad_row]
    assert not found.keep_mask[bad_row].any()
    assert torch.equal(found.keep_mask[others], alone.keep_mask)
    assert not found.weights[bad_row].any()
    assert torch.equal(found.weights[others], alone.weights)
    (factor, metrics), (factor_alone, metrics_alone) = (factor_and_metrics(c, rules) for c in (found, alone))
    assert factor == pytest.approx(factor_alone, rel=1e-12)
    assert metrics["rollout_corr/nonfinite_sequences"] == 1.0
    for name, figure in metrics.items():
        assert math.isfinite(figure), name
        key = name.removeprefix("rollout_corr/")
        applied = key.startswith("rollout_is_") and "raw" not in key and "fraction" not in key
        if key not in COUNTS_IT and not applied:  # an applied weight of 0 is what it has
            assert figure == pytest.approx(metrics_alone[name], rel=1e-12), name


@pytest.mark.parametrize("weight", [rule for rule in weight_rules() if rule.metrics is None], ids=str)
def test_a_bad_sequence_is_a_rejected_one_for_the_applied_weights(weight) -> None:
    """One rule: its weight in the loss is 0 like that of every rejected sequence; it has no ratio."""
    batch, row = make_batch(8, rows=8), 5
    rejects = CorrectionRules(weight, (RejectRule("only", "ratio", "sum", None, 30.0, "sequence"),))
    far = batch.log_probs.clone()
    far[row] += 8.0
    _, rejected = factor_and_metrics(replace(batch, log_probs=far).correct(rejects), rejects)
    _, bad = factor_and_metrics(spoil(batch, row, math.nan, "log_probs").correct(rejects), rejects)
    names = {name for name in bad if name.startswith("rollout_corr/rollout_is_")}
    names = {name for name in names if "raw" not in name and "fraction" not in name}
    names |= {"rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"}
    assert weight.level is None or len(names) > 10
    if weight.normalize_over == "survivors":
        assert {name: bad[name] for name in names} == pytest.approx({name: rejected[name] for name in names})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
def test_bad_numbers_never_reach_value_or_gradient(level, loss_type: str) -> None:
    batch = make_batch(8, rows=8)
    for row, value, which in ((3, math.nan, "both"), (4, math.inf, "log_probs"), (6, -math.inf, "both")):
        spoil(batch, row, value, which)
    batch.advantages[3] = math.nan
    correction = batch.correct(CorrectionRules(WeightRule(level, normalize=True), RULES))
    log_probs, mask = batch.log_probs.clone().requires_grad_(), batch.mask
    keep, unit = correction.keep_mask[mask], Segments(mask.sum(1))
    columns = [x[mask][keep] for x in (log_probs, batch.rollout_log_probs, batch.advantages)]
    rule = loss_rule(loss_type, *columns, unit.kept(keep), clip_high=0.3, clip_c=3.0)
    loss = policy_loss(rule, *columns, unit.kept(keep), correction.weights[mask][keep])
    for mode in MODES:
        c = coefficients(mode, keep, torch.ones_like(keep), unit, 20.0, 6.0, horizon=6)
        total = (c[keep] * loss.values).sum()
        [gradient] = torch.autograd.grad(total, log_probs, retain_graph=True)
        assert total.isfinite(), mode
        assert gradient.isfinite().all(), mode
        assert gradient[correction.keep_mask].any(), mode
        assert not gradient[~correction.keep_mask].any(), mode


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("convention", [None, "verl"])
@pytest.mark.parametrize("why", ["rejected", "nonfinite", "empty"])
def test_nothing_survives(level, convention, why: str) -> None:
    batch = make_batch(2)
    rules = CorrectionRules(
        WeightRule(level, "mask", normalize=True, metrics=convention),
        (RejectRule("none", "ratio", "none", None, 1e-6, "sequence"),) if why == "rejected" else RULES,
    )
    if why == "nonfinite":
        batch.log_probs[:, :] = math.nan
    if why == "empty":
        batch.mask[:, :] = False
    found = batch.correct(rules)
    factor, metrics = factor_and_metrics(found, rules)
    host = to_host(found.sums)
    assert host["kept_tokens"] == host["kept_sequences"] == 0.0
    assert factor == 1.0
    assert all(math.isfinite(value) for value in metrics.values())
    if why != "rejected":  # no ratio is known, so nothing is averaged: not a correlation of 1, or an ESS of 0
        known = {"nonfinite_sequences", "saturated_sequences"}
        known |= {"rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"}
        assert {name.removeprefix("rollout_corr/") for name in metrics} == known
    expected = 0.0 if why == "empty" else 1.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == expected
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == expected

    log_probs, mask = batch.log_probs.clone().requires_grad_(), batch.mask
    keep, unit = found.keep_mask[mask], Segments(mask.sum(1))
    columns = [x[mask][keep] for x in (log_probs, batch.rollout_log_probs, batch.advantages)]
    loss = policy_loss(LossRule("reinforce"), *columns, unit.kept(keep), None)
    for mode in MODES:
        c = coefficients(mode, keep, keep, unit, host["kept_tokens"], host["kept_sequences"], horizon=6)
        total = (c[keep] * loss.values).sum()
        assert total.item() == 0.0
        assert not torch.autograd.grad(total, log_probs, retain_graph=True)[0].any()


def test_every_weight_out_of_band_is_no_crash() -> None:
    batch = make_batch(3)
    shifted = Batch(batch.rollout_log_probs - 3.0, batch.rollout_log_probs, batch.mask, batch.advantages)
    rules = CorrectionRules(WeightRule("token", "mask", 0.5, 2.0, normalize=True))
    factor, metrics = factor_and_metrics(shifted.correct(rules), rules)
    assert factor == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    assert metrics["rollout_corr/rollout_is_raw_eff_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout_corr/rollout_is_raw_eff_sample_size"] <= 1.0


@pytest.mark.parametrize(("per_token", "saturated"), [(-4.9, 0), (5.1, 1), (-5.1, 1), (5.0, 1)])
def test_products_that_leave_the_clamp_are_counted(per_token: float, saturated: int) -> None:
    rollout = torch.full((3, 4), -30.0)
    train = rollout.clone()
    train[1] += per_token  # four tokens: ±19.6, ±20.4, 20
    mask = torch.ones(3, 4, dtype=torch.bool)
    rules = CorrectionRules(WeightRule("sequence", "truncate", upper=1e30))
    found = corrected(train, rollout, mask, rules)
    _, metrics = factor_and_metrics(found, rules)
    assert metrics["rollout_corr/saturated_sequences"] == saturated
    total = min(max(4 * per_token, -20.0), 20.0)
    assert found.weights[1, 0].item() == pytest.approx(math.exp(total), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_are_refused(dtype: torch.dtype) -> None:
    batch = make_batch(1)
    half = replace(batch, log_probs=batch.log_probs.to(dtype))
    with pytest.raises(ValueError, match="float32"):
        half.correct(CorrectionRules(WeightRule(None)))


def test_wrong_inputs_are_refused() -> None:
    batch = make_batch(1)
    rules, units = CorrectionRules(WeightRule("token"), RULES), Units.of_responses(batch.mask.sum(1))
    columns = [x[batch.mask] for x in (batch.log_probs, batch.rollout_log_probs, batch.advantages)]
    with pytest.raises(ValueError, match="needs `advantages`"):
        correct(*columns[:2], units, rules)
    with pytest.raises(ValueError, match="shapes differ"):
        correct(columns[0][1:], columns[1], units, rules, advantages=columns[2])
    with pytest.raises(ValueError, match="do not fit"):
        correct(*(x[1:] for x in columns[:2]), units, rules, advantages=columns[2][1:])


def test_no_token_at_all() -> None:
    """A rank without episodes contributes sums of the same names as the others."""
    rules = CorrectionRules(WeightRule("sequence", normalize=True), RULES)
    batch = make_batch(1)
    nothing = batch.select(slice(0, 0)).correct(rules)
    assert list(nothing.sums) == list(batch.correct(rules).sums)
    assert not any(value for name, value in to_host(nothing.sums).items() if not name.endswith(".max"))
