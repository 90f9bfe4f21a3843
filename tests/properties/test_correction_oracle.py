"""`rlctl.algos.correction` against the slow reference: weights, mask, factor and every metric."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from tests.properties.batches import reject_rules, weight_rules
from tests.properties.padded_batches import Batch, corrected, factor_and_metrics, make_batch
from tests.reference.correction import reference
from tests.sweeps import swept

RULES = reject_rules()


def assert_equals_reference(batch: Batch, rules: CorrectionRules) -> None:
    found = batch.correct(rules)
    factor, metrics = factor_and_metrics(found, rules)
    expected = reference(
        batch.log_probs.tolist(),
        batch.rollout_log_probs.tolist(),
        batch.mask.tolist(),
        rules,
        batch.advantages.tolist(),
    )
    assert (found.keep_mask & batch.mask).tolist() == expected.keep
    assert found.nonfinite.tolist() == expected.nonfinite
    weights = torch.where(batch.mask, found.weights, 0.0)
    wanted = torch.tensor(expected.keep if expected.weights is None else expected.weights).float()
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-9)
    assert factor == pytest.approx(expected.factor, rel=1e-6)
    assert metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        slack = 1e-4 if name.endswith("pearson_corr") else 2e-6
        assert math.isclose(metrics[name], value, rel_tol=1e-5, abs_tol=slack), (name, metrics[name], value)


@pytest.mark.parametrize("weight", weight_rules(), ids=str)
def test_every_weight_rule_with_some_rejections(weight: WeightRule) -> None:
    draw = random.Random(str(weight))
    for _ in range(6):
        rejects = tuple(draw.sample(RULES, draw.choice([0, 1, 1, 2, 3])))
        batch = make_batch(draw.randrange(10**6), scale=draw.choice([0.01, 0.3, 1.0]))
        assert_equals_reference(batch, CorrectionRules(weight, rejects))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rejection_rule_with_some_weights(rule) -> None:
    draw = random.Random(rule.name)
    for weight in draw.sample(weight_rules(), 3):
        batch = make_batch(draw.randrange(10**6), rows=9, scale=draw.choice([0.2, 0.5]))
        assert_equals_reference(batch, CorrectionRules(weight, (rule,)))


#: Number of parts into which the combinations are divided: each has every weight rule, and every rejection
#: rule with a ninth of the weight rules.
PARTS = 9


@pytest.mark.slow
@pytest.mark.parametrize("part", swept(range(PARTS), [0]))
def test_every_combination(part: int) -> None:
    """Every weight rule with every rejection rule, three at a time, of different statistics."""
    third = math.ceil(len(RULES) / 3)
    for seed, weight in enumerate(weight_rules()):
        for first in range((part + seed) % PARTS, third, PARTS):
            assert_equals_reference(make_batch(seed), CorrectionRules(weight, tuple(RULES[first::third])))


@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
def test_ratios_beyond_the_clamp(level) -> None:
    weight = WeightRule(level, "truncate", upper=1e30)
    batch = make_batch(3, rows=12, horizon=8, scale=15.0)
    assert_equals_reference(batch, CorrectionRules(weight, tuple(RULES[::7])))


@pytest.mark.parametrize("shift", [-2.0, -6.0, -18.0, 4.0])
@pytest.mark.parametrize("bound", ["truncate", "clip"])
@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
def test_effective_sample_size_at_any_magnitude(level, bound: str, shift: float) -> None:
    """All weights tiny, or all large: their ratios to one another are all that ESS may depend on."""
    small, large = 1e-9, 1e9
    rules = CorrectionRules(WeightRule(level, bound, small, large, True))
    batch = make_batch(11, rows=40, horizon=4, scale=0.5)
    per_token = shift / batch.mask.sum(-1, keepdim=True).clamp(min=1) if level == "sequence" else shift
    shifted = Batch(batch.log_probs + per_token, batch.rollout_log_probs, batch.mask, batch.advantages)
    factor, metrics = factor_and_metrics(shifted.correct(rules), rules)
    inputs = (x.tolist() for x in (shifted.log_probs, shifted.rollout_log_probs, shifted.mask))
    expected = reference(*inputs, rules, shifted.advantages.tolist())
    assert factor == pytest.approx(expected.factor, rel=1e-5)
    sizes = [name for name in metrics if "eff_sample_size" in name]
    assert len(sizes) == (2 if level is None else 4)
    for name in sizes:
        assert expected.metrics[name] > 0.3
        assert metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5), name
    if level is not None:
        assert factor == pytest.approx(math.exp(shift), rel=2.0)
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, rel=1e-5)
        for name in ("mean", "max", "min", "std", "seq_std"):
            for key in (f"rollout_corr/rollout_is_raw_{name}", f"rollout_corr/rollout_is_{name}"):
                assert metrics[key] == pytest.approx(expected.metrics[key], rel=2e-5), key


@pytest.mark.parametrize(
    ("mean", "spread"), [(-8.0, 0.5), (-16.0, 1.0), (-12.0, 1e-3), (-0.7, 1e-4), (-1e-3, 1e-4), (-2.0, 1.0)]
)
def test_correlation_of_probabilities_of_any_size(mean: float, spread: float) -> None:
    """Small probabilities, and those that hardly differ, have a correlation and a distance like others."""
    draw = torch.Generator().manual_seed(5)
    rollout = (mean + spread * torch.randn(8, 64, generator=draw)).clamp(max=-1e-6)
    train = (rollout + spread * torch.randn(8, 64, generator=draw)).clamp(max=-1e-6)
    batch = Batch(train, rollout, torch.arange(64) < torch.arange(1, 65, 8)[:, None], torch.zeros(8, 64))
    rules = CorrectionRules(WeightRule(None))
    _, found = factor_and_metrics(batch.correct(rules), rules)
    p, q = (x[batch.mask].double().exp() for x in (train, rollout))
    correlation = float(torch.corrcoef(torch.stack([p, q]))[0, 1])
    assert abs(correlation) < 0.9
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(correlation, abs=2e-5)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(float((p - q).abs().mean()), rel=5e-4)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(float((p - q).abs().std()), rel=5e-4)


@pytest.mark.parametrize("level", [None, "token", "prefix"])
@pytest.mark.parametrize("convention", [None, "verl"])
@pytest.mark.parametrize("mean", [-6.0, 0.0, 4.5])
@pytest.mark.parametrize("spread", [1e-4, 5.5e-4])
def test_deviations_of_values_that_hardly_differ(level, convention, mean: float, spread: float) -> None:
    """Weights, statistics and distances of tokens, also where their mean is far from 1."""
    draw = torch.Generator().manual_seed(6)
    rollout = -8.0 - torch.rand(16, 256, generator=draw)
    train = rollout + mean + spread * torch.randn(16, 256, generator=draw)
    if level == "prefix":  # the ratio of the first token applies to all
        train[:, 1:] = rollout[:, 1:] + spread * torch.randn(16, 255, generator=draw)
    mask = torch.arange(256) < torch.arange(16, 257, 16)[:, None]
    names = ("ratio", "k1", "k2", "k3")
    rejects = tuple(RejectRule(name, name, "none", -1e9, 1e9, "token") for name in names)
    rules = CorrectionRules(WeightRule(level, "truncate", upper=1e9, metrics=convention), rejects)
    _, found = factor_and_metrics(corrected(train, rollout, mask, rules), rules)

    gap = (train - rollout).double()
    weights = gap.cumsum(1) if level == "prefix" else gap
    expected = {"rollout_is_raw_std": weights.exp()}
    expected |= {} if level is None else {"rollout_is_std": weights.exp()}
    statistics = (gap.exp(), -gap, gap.square() / 2, gap.exp() - 1 - gap)
    expected |= {f"rollout_rs_{n}_std": values for n, values in zip(names, statistics, strict=True)}
    for name, values in expected.items():
        std = float(values[mask].std(correction=0))
        assert found[f"rollout_corr/{name}"] == pytest.approx(std, rel=1e-3, abs=1e-12), name
    distance = (train.double().exp() - rollout.double().exp()).abs()[mask]
    assert found["training/rollout_probs_diff_std"] == pytest.approx(float(distance.std()), rel=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_bad_numbers_and_other_shapes(seed: int) -> None:
    draw = random.Random(seed)
    batch = make_batch(seed, rows=draw.choice([1, 2, 5, 40]), horizon=draw.choice([1, 2, 33]))
    for bad in (float("nan"), float("inf"), float("-inf")):
        which = draw.choice([batch.log_probs, batch.rollout_log_probs])
        row = draw.randrange(len(batch.mask))
        which[row, draw.randrange(which.shape[1])] = bad
    for weight in draw.sample(weight_rules(), 6):
        assert_equals_reference(batch, CorrectionRules(weight, tuple(draw.sample(RULES, 2))))
