"""Bands printed for the user are the bands the mathematics applies: found by scanning ρ."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from rlctl.run_spec.explain import implies
from tests.properties.padded_batches import corrected, factor_and_metrics

#: ρ from 1e-5 to 1e5, none of them exactly on a bound.
LOG_RATIOS = torch.linspace(-11.5, 11.5, 20_011)
RATIOS = LOG_RATIOS.double().exp()
STEP = float(LOG_RATIOS[1] - LOG_RATIOS[0])
ROLLOUT = torch.full((len(LOG_RATIOS), 1), -12.0)
MASK = torch.ones(len(LOG_RATIOS), 1, dtype=torch.bool)


def scanned(rule: CorrectionRules) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept, and the weight, of one-token sequences at every ρ."""
    found = corrected(ROLLOUT + LOG_RATIOS[:, None], ROLLOUT, MASK, rule)
    return found.keep_mask[:, 0], found.weights[:, 0]


def assert_is_band(accepted: torch.Tensor, band: tuple[float, float]) -> None:
    """`accepted` is exactly the scanned ρ inside the band, up to one step at its edges."""
    lower, upper = band
    inside = RATIOS.ge(lower * math.exp(STEP)) & RATIOS.le(upper * math.exp(-STEP))
    outside = RATIOS.le(lower * math.exp(-STEP)) | RATIOS.ge(upper * math.exp(STEP))
    assert accepted[inside].all()
    assert not accepted[outside].any()


BOUNDS = {
    "ratio": [(None, 2.5), (0.6, 1.6), (1e-4, None)],
    "k1": [(math.log(0.6), math.log(1.6)), (None, 0.3), (-0.2, None)],
    "k2": [(None, 2.5), (None, 0.01)],
    "k3": [(None, 0.5), (None, 1e-4), (None, 40.0)],
}


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "max"])
@pytest.mark.parametrize(("statistic", "bounds"), [(s, b) for s, all_of in BOUNDS.items() for b in all_of])
def test_a_criterion_accepts_exactly_its_band(statistic, reduction, bounds) -> None:
    for scope in ("token", "sequence") if reduction == "none" else ("sequence",):
        rule = RejectRule("rule", statistic, reduction, *bounds, scope)
        keep, _ = scanned(CorrectionRules(WeightRule(None), (rule,)))
        assert_is_band(keep, rule.band())
        assert 0 < keep.sum() < len(keep)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bound", ["clip", "truncate", "mask"])
def test_a_bound_changes_weights_exactly_outside_its_band(level, bound) -> None:
    rule = WeightRule(level, bound, 0.7, 1.9)
    _, weights = scanned(CorrectionRules(rule))
    unchanged = (weights.double() - RATIOS).abs() < 1e-7 + 1e-5 * RATIOS
    assert_is_band(unchanged, rule.band())
    high, low = weights[-1].item(), weights[0].item()
    expected = {"clip": (1.9, 0.7), "truncate": (1.9, RATIOS[0].item()), "mask": (0.0, 0.0)}[bound]
    assert (high, low) == pytest.approx(expected, rel=1e-6, abs=1e-7)


#: Log-ratios of a sequence's tokens and their statistic, all exact in float32.
AT_A_BOUND = {
    ("k1", "none"): ([0.5], -0.5),
    ("k1", "sum"): ([0.25, 0.5], -0.75),
    ("k1", "mean"): ([0.25, 0.75], -0.5),
    ("k1", "max"): ([0.25, 0.5], -0.25),
    ("k2", "none"): ([0.5], 0.125),
    ("k2", "sum"): ([0.75, -1.0], 0.78125),
    ("k2", "mean"): ([0.75, -1.0], 0.390625),
    ("k2", "max"): ([0.25, -0.5], 0.125),
    ("k3", "none"): ([0.0], 0.0),
    ("k3", "sum"): ([0.0, 0.0], 0.0),
    ("k3", "mean"): ([0.0, 0.0], 0.0),
    ("k3", "max"): ([0.0, 0.0], 0.0),
    ("ratio", "none"): ([0.0], 1.0),
    ("ratio", "sum"): ([0.5, -0.5], 1.0),
    ("ratio", "mean"): ([0.5, -0.5], 1.0),
    ("ratio", "max"): ([-0.5, 0.0], 1.0),
}


@pytest.mark.parametrize(("statistic", "reduction"), AT_A_BOUND)
def test_a_bound_belongs_to_what_it_accepts(statistic, reduction) -> None:
    """Values beyond a bound are rejected. Values equal to a bound are kept and counted on neither side."""
    log_ratios, value = AT_A_BOUND[statistic, reduction]
    rollout = torch.full((1, len(log_ratios)), -2.0)
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    step = 1e-3
    for scope in ("token", "sequence") if reduction == "none" else ("sequence",):
        for lower, upper, kept in [
            (None, value, True),
            (value, None, True),
            (value, value, True),
            (None, value - step, False),
            (value + step, None, False),
        ]:
            rule = RejectRule("rule", statistic, reduction, lower, upper, scope)
            rules = CorrectionRules(WeightRule(None), (rule,))
            found = corrected(rollout + torch.tensor([log_ratios]), rollout, mask, rules)
            assert found.keep_mask.all().item() == kept, (scope, lower, upper)
            _, metrics = factor_and_metrics(found, rules)
            sides = [metrics[f"rollout_corr/rollout_rs_rule_fraction_{side}"] for side in ("high", "low")]
            assert sides == [0.0 if kept or upper is None else 1.0, 0.0 if kept or lower is None else 1.0]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("bound", ["clip", "truncate", "mask"])
def test_a_weight_on_its_bound_is_not_changed(level, bound) -> None:
    rollout = torch.full((2, 2), -2.0)
    mask = torch.ones(2, 2, dtype=torch.bool)
    for lower, upper in [(0.5, 1.0), (1.0, 2.0), (1.0, 1.0)]:
        rules = CorrectionRules(WeightRule(level, bound, lower, upper))
        found = corrected(rollout, rollout, mask, rules)
        assert (found.weights == 1.0).all()
        _, metrics = factor_and_metrics(found, rules)
        names = [f"{seq}fraction_{side}" for seq in ("ratio_", "seq_") for side in ("high", "low")]
        assert [metrics[f"rollout_corr/rollout_is_{name}"] for name in names] == [0.0] * 4


def test_known_bands() -> None:
    """The figures of the guide: one threshold, three meanings."""
    assert RejectRule("guide", "ratio", "max", None, 2.5, "sequence").band() == (0.0, 2.5)
    verl = RejectRule("verl", "k2", "max", None, 2.5, "sequence").band()
    assert verl == pytest.approx((1 / 9.36, 9.36), rel=1e-3)
    assert RejectRule("none", "k3", "max", None, None, "sequence").band() == (0.0, math.inf)
    k1 = RejectRule("verl", "k1", "none", math.log(0.6), math.log(1.6), "token").band()
    assert k1 == pytest.approx((1 / 1.6, 1 / 0.6))


@pytest.mark.parametrize(("reduction", "negative"), [("sum", False), ("max", False), ("none", True)])
def test_judging_a_sequence_rejects_the_sequence(reduction, negative) -> None:
    with pytest.raises(ValueError, match="scope must be `sequence`"):
        RejectRule("rule", "ratio", reduction, None, 2.0, "token", negative)


def random_rule(draw: random.Random) -> RejectRule:
    statistic = draw.choice(["ratio", "k1", "k2", "k3"])
    reduction = draw.choice(["none", "sum", "mean", "max"])
    width = draw.choice([0.1, 0.3, 0.5, 1.0, 1.5, 3.0])
    low, high = -width * draw.choice([0.3, 0.5, 1.0]), width  # in log ρ
    if statistic == "ratio":
        lower, upper = math.exp(low), math.exp(high)
    elif statistic == "k1":
        lower, upper = -high, -low
    else:
        lower, upper = None, width**2 / 2
    side = (
        draw.choice(["both", "low", "high"])
        if statistic in ("ratio", "k1") and reduction != "max"
        else "high"
    )
    scope = draw.choice(["token", "sequence"]) if reduction == "none" else "sequence"
    negative = scope == "sequence" and draw.random() < 0.2
    return RejectRule(
        "rule",
        statistic,
        reduction,
        None if side == "high" else lower,
        None if side == "low" else upper,
        scope,
        negative,
    )


LENGTH = 4


def hostile_ratios() -> torch.Tensor:
    """Log-ratios (N, LENGTH): all alike, one far off, alternating, and random, at many sizes."""
    # Not on a bound, where one statistic is rounded up and the other down.
    sizes = torch.cat([torch.linspace(-4, 4, 81), torch.linspace(-0.3, 0.3, 41)]) * 1.001
    patterns = torch.tensor(
        [[1.0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, -1], [1, -1, 1, -1], [1, 1, -0.5, -1], [0.2, 0.1, 1, -3]]
    )
    noise = torch.randn(3000, LENGTH, generator=torch.Generator().manual_seed(0))
    noise = noise * torch.logspace(-2, 0.6, 3000)[:, None]
    return torch.cat([(sizes[:, None, None] * patterns).reshape(-1, LENGTH), noise])


def kept(rule: RejectRule, ratios: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(LENGTH) < lengths[:, None]
    rollout = torch.full_like(ratios, -20.0)
    advantages = -torch.ones_like(ratios)
    rules = CorrectionRules(WeightRule(None), (rule,))
    return corrected(rollout + ratios, rollout, mask, rules, advantages=advantages).keep_mask | ~mask


@pytest.mark.slow
def test_a_criterion_said_to_be_implied_rejects_nothing_more() -> None:
    """Over hostile responses of 1 to 4 tokens, for every pair of random criteria."""
    draw = random.Random(0)
    ratios = hostile_ratios().repeat(LENGTH, 1)
    lengths = torch.arange(1, LENGTH + 1).repeat_interleave(len(ratios) // LENGTH)
    rules = [random_rule(draw) for _ in range(60)]
    keeps = [kept(rule, ratios, lengths) for rule in rules]
    found = missed = 0
    for (one, accepted), (other, keep) in itertools.product(zip(rules, keeps, strict=True), repeat=2):
        adds = (accepted & ~keep).any()
        if implies(one, other, LENGTH):
            found += 1
            assert not adds, (one, other)
        elif not adds and not one.negative_advantage_only:
            missed += 1
    assert found > 400
    assert missed < found / 3
