"""Micro-batches, padding and order do not change the result. If the policies agree, the correction has no
effect."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rlctl.algos.correction import correction_metrics, normalization_factor, normalized
from rlctl.algos.losses import coefficients, policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Segments, added, to_host
from tests.properties.batches import reject_rules, weight_rules
from tests.properties.padded_batches import Batch, factor_and_metrics, make_batch

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
HORIZON = 8
RULE = LossRule("reinforce")


class Update:
    """One optimizer step's figures from a mini-batch in parts, the way the update combines them."""

    def __init__(self, parts: list[Batch], rules: CorrectionRules, mode: str) -> None:
        corrections = [part.correct(rules) for part in parts]
        host = to_host(added([correction.sums for correction in corrections]))
        self.factor = normalization_factor(host, rules)
        self.metrics = correction_metrics(normalized(host, self.factor, rules), rules)
        after = rules.loss_denominator == "after_rejection"
        names = ("kept_tokens", "kept_sequences") if after else ("tokens", "sequences")
        counts = [host[name] for name in names]
        self.loss = 0.0
        self.gradients: list[Tensor] = []
        self.keep = [c.keep_mask & part.mask for c, part in zip(corrections, parts, strict=True)]
        pairs = zip(corrections, parts, strict=True)
        self.weights = [torch.where(part.mask, c.weights, 0.0) for c, part in pairs]
        for part, correction, keep in zip(parts, corrections, self.keep, strict=True):
            log_probs, mask = part.log_probs.clone().requires_grad_(), part.mask
            kept, unit = keep[mask], Segments(mask.sum(1))
            columns = [x[mask][kept] for x in (log_probs, part.rollout_log_probs, part.advantages)]
            weights = correction.weights[mask][kept] / self.factor
            values = policy_loss(RULE, *columns, unit.kept(kept), weights).values
            counted = kept if after else torch.ones_like(kept)
            c = coefficients(mode, kept, counted, unit, *counts, horizon=HORIZON)
            loss = (c[kept] * values).sum()
            loss.backward()
            assert log_probs.grad is not None
            self.loss += loss.item()
            self.gradients.append(log_probs.grad)


def random_rules(draw: random.Random) -> CorrectionRules:
    return CorrectionRules(
        draw.choice(weight_rules()),
        tuple(draw.sample(reject_rules(), draw.choice([0, 1, 2]))),
        draw.choice(["before_rejection", "after_rejection"]),
    )


@pytest.mark.parametrize("shift", [-9.0, 3.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_effective_sample_size_of_tiny_and_large_weights_in_any_division(level, shift: float) -> None:
    rules = CorrectionRules(WeightRule(level, "truncate", upper=1e9, normalize=True))
    sampled = make_batch(7, rows=14, horizon=HORIZON)
    per_token = shift / sampled.mask.sum(-1, keepdim=True).clamp(min=1)
    whole = Batch(sampled.log_probs + per_token, sampled.rollout_log_probs, sampled.mask, sampled.advantages)
    expected = Update([whole], rules, "token-mean")
    for size in (1, 5):
        rows = torch.arange(14).split(size)
        found = Update([whole.select(part) for part in rows], rules, "token-mean")
        assert found.factor == pytest.approx(expected.factor, rel=1e-6)
        for name, value in expected.metrics.items():
            if "eff_sample_size" in name:
                assert value > 0.05
                assert found.metrics[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("seed", range(40))
def test_any_division_of_a_mini_batch_gives_the_same_step(seed: int) -> None:
    draw = random.Random(seed)
    rules, mode = random_rules(draw), draw.choice(MODES)
    whole = make_batch(seed, rows=14, horizon=HORIZON, scale=draw.choice([0.05, 0.4, 3.0]))
    expected = Update([whole], rules, mode)

    order = torch.tensor(draw.sample(range(14), 14))
    cuts = sorted(draw.sample(range(1, 14), draw.choice([1, 3, 13])))
    parts = [whole.select(rows).padded(draw.choice([0, 1, 9])) for rows in order.tensor_split(cuts)]
    found = Update(parts, rules, mode)

    assert found.factor == pytest.approx(expected.factor, rel=1e-6)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name
    for attribute, tolerance in (("keep", 0.0), ("weights", 2e-6), ("gradients", 1e-5)):
        together = torch.cat([part[:, :HORIZON] for part in getattr(found, attribute)])
        once = getattr(expected, attribute)[0][order]
        torch.testing.assert_close(together, once, rtol=tolerance, atol=tolerance * 0.1)


def accepts_the_sampling_policy(rule: RejectRule) -> bool:
    neutral = 1.0 if rule.statistic == "ratio" else 0.0
    return (rule.lower is None or rule.lower <= neutral) and (rule.upper is None or neutral <= rule.upper)


@pytest.mark.parametrize(("turn", "weight"), enumerate(weight_rules()), ids=str)
def test_where_the_policies_agree_correction_does_nothing_at_all(turn: int, weight: WeightRule) -> None:
    every_rule = tuple(rule for rule in reject_rules() if accepts_the_sampling_policy(rule))
    assert len(every_rule) > 60
    on_the_edge = tuple(
        RejectRule(f"edge_{statistic}_{reduction}", statistic, reduction, bound, bound, "sequence")
        for statistic, bound in (("ratio", 1.0), ("k1", 0.0), ("k2", 0.0), ("k3", 0.0))
        for reduction in ("none", "sum", "mean", "max")
    )
    rules = CorrectionRules(weight, every_rule[turn % 8 :: 8] + on_the_edge[turn % 4 :: 4])
    sampled = make_batch(4, rows=9, horizon=HORIZON)
    batch = Batch(sampled.rollout_log_probs, sampled.rollout_log_probs, sampled.mask, sampled.advantages)

    found = batch.correct(rules)
    factor, metrics = factor_and_metrics(found, rules)
    assert torch.equal(found.keep_mask & batch.mask, batch.mask)
    assert factor == 1.0
    assert (found.weights[batch.mask] == 1.0).all()
    if weight.level is not None:
        assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
        assert metrics["rollout_corr/rollout_is_eff_sample_size_token"] == 1.0
    ones = ["raw_eff_sample_size", "raw_mean", "raw_max", "raw_min", "raw_seq_mean"]
    assert [metrics[f"rollout_corr/rollout_is_{name}"] for name in ones] == [1.0] * len(ones)
    zeros = ["kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_rs_masked_fraction"]
    assert [metrics[f"rollout_corr/{name}"] for name in zeros] == [0.0] * len(zeros)

    uncorrected = CorrectionRules(WeightRule(None))
    mode = MODES[turn % len(MODES)]
    corrected, plain = Update([batch], rules, mode), Update([batch], uncorrected, mode)
    assert torch.equal(corrected.gradients[0], plain.gradients[0])
    assert corrected.loss == plain.loss
