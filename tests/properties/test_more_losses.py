"""Experimental losses and criteria against their formulas, one token at a time in plain Python.

Agreement with other frameworks' own code is in `test_peers.py`; order, padding and the enumerated gradient in
`test_parts.py`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import Tensor

from rlctl.algos.correction import correct
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.algos.segments import Units
from rlctl.algos.weights_and_criteria import SelectiveParams
from rlctl.registry import POLICY_LOSSES, REJECTION_CRITERIA
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules
from rlctl.train.update import update
from tests.models import tiny_model
from tests.processes import on_ranks
from tests.properties.batches import by_response, estimate, loss_rule, make_batch
from tests.unit.train.updates import BYPASS, DECOUPLED, PlainEngine, alone, batch_of, settings_of

Token = tuple[float, float, float]  # log π_θ, log π_old, A
WITH_STATISTICS = [part.name for part in POLICY_LOSSES.parts() if part.batch_statistics]


def tokens_of(name: str, seed: int) -> tuple[list[list[Token]], Tensor, Tensor]:
    """Each response's tokens, what the loss says of them, and their gradients, as one list in order."""
    batch = make_batch(seed, rows=8, scale=0.7)
    noise = torch.randn(batch.unit.total, generator=torch.Generator().manual_seed(seed))
    if name not in WHOLE_RESPONSES:
        batch = replace(batch, advantages=batch.advantages + 0.3 * noise)
    log_probs, *rest = batch.double().policies
    leaf = log_probs.clone().requires_grad_()
    values = policy_loss(loss_rule(name, log_probs, *rest), leaf, *rest, None).values
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    columns = by_response(batch.unit, log_probs, *rest[:2])
    return [list(zip(*row, strict=True)) for row in columns], values.detach(), gradient


#: Losses that see one advantage per response.
WHOLE_RESPONSES = {"gmpo"}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def coefficients(name: str, rows: list[list[Token]]) -> list[float]:
    """−∂loss/∂log π_θ of every token, from the formula."""
    every = [token for row in rows for token in row]
    ratios = [math.exp(new - old) for new, old, _ in every]
    if name == "p3o":
        ess = sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios)
        return [min(r, ess) * a - (1 - ess) * (1 - 1 / r) for r, (_, _, a) in zip(ratios, every, strict=True)]
    if name == "m2po":
        far = sorted(((n - o) ** 2 for n, o, a in every if a * (n - o) > 0), reverse=True)
        while far and fmean(far) > 0.04:
            far = far[1:]
        cut = far[0] if far else 0.0
        return [
            0.0 if a * (n - o) > 0 and (n - o) ** 2 > cut + 1e-12 else r * a
            for r, (n, o, a) in zip(ratios, every, strict=True)
        ]
    if name == "bapo":
        low, high = 0.6, 1.2

        def balance() -> bool:
            pairs = zip(ratios, every, strict=True)
            parts = [min(r, high) * a if a >= 0 else max(r, low) * a for r, (_, _, a) in pairs]
            return sum(x for x in parts if x > 0) < -sum(x for x in parts if x < 0)

        while balance() and low < 0.8 - 1e-9:
            low += 0.05
        while balance() and high < 2.0 - 1e-9:
            high += 0.05
        return [
            0.0 if (a > 0 and r > high) or (a < 0 and r < low) else r * a
            for r, (_, _, a) in zip(ratios, every, strict=True)
        ]
    if name == "kl_cov":
        means = fmean(a for _, _, a in every), fmean(n for n, _, _ in every)
        worst = max(every, key=lambda x: (x[2] - means[0]) * (x[0] - means[1]))
        return [
            r * x[2] - (math.copysign(1.0, x[0] - x[1]) if x is worst else 0.0)
            for r, x in zip(ratios, every, strict=True)
        ]
    if name == "clip_cov":
        means = fmean(a for _, _, a in every), fmean(n for n, _, _ in every)
        free = [
            (a > 0 and r <= 1.2) or (a < 0 and r >= 0.8) for r, (_, _, a) in zip(ratios, every, strict=True)
        ]
        chosen = [
            ok and 1.0 < (a - means[0]) * (n - means[1]) < 5.0
            for ok, (n, _, a) in zip(free, every, strict=True)
        ]
        assert any(chosen)
        kept = 1.0 - 1.0 / sum(chosen)
        return [
            r * a * ok * (kept if c else 1.0)
            for r, (_, _, a), ok, c in zip(ratios, every, free, chosen, strict=True)
        ]
    return [c for row in rows for c in by_row(name, row)]


def by_row(name: str, row: list[Token]) -> list[float]:
    product = math.exp(sum(n - o for n, o, _ in row))
    gaps, found = [n - o for n, o, _ in row], []
    if name == "gmpo" and row:
        a = row[0][2]
        held = [min(x, 0.4) if a > 0 else max(x, -0.4) for x in gaps]
        return [math.exp(fmean(held)) * a * (x == y) for x, y in zip(held, gaps, strict=True)]
    for t, (n, o, a) in enumerate(row):
        r, new, old = math.exp(n - o), math.exp(n), math.exp(o)
        if name == "vespo":
            k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
            found.append(product**k * math.exp(rate * (1 - product)) * a)
        elif name == "topr":
            found.append(a if a >= 0 else min(product, 1.0) * a)
        elif name == "dispo":
            found.append((clip(r, 0.8, 1.28) if a > 0 else clip(r, 0.8, 1.2)) * a)
        elif name == "ctpo":
            log_r, grow = sum(gaps[: t + 1]), math.sqrt(t + 1)
            binds = log_r > 0.05 * grow if a > 0 else log_r < -0.025 * grow or log_r > 0.05 * grow
            found.append(0.0 if binds else math.exp(log_r) * a)
        elif name == "drpo":
            found.append(r * a - abs(a) * old * (r - 1) * r / 12.5)
        elif name == "dro":
            found.append(a - 0.1 * (n - o))
        elif name == "sampler_penalty":
            masked = new - old > 0.2 if a > 0 else old - new > 0.2
            found.append((0.0 if masked else r * a) - 2e-3 * (n - o))
        else:
            raise AssertionError(name)
    return found


EXPERIMENTAL = [part.name for part in POLICY_LOSSES.parts() if part.experimental]


@pytest.mark.parametrize("name", EXPERIMENTAL)
def test_the_gradient_is_that_of_the_formula(name: str) -> None:
    for seed in range(4):
        rows, _, gradient = tokens_of(name, seed)
        expected = torch.tensor(coefficients(name, rows), dtype=torch.float64)
        assert expected.std() > 0
        torch.testing.assert_close(-gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("region", "threshold"), [("ipo", 0.1), ("kpop", 0.02)])
def test_the_regions_of_the_sampler_penalty_are_the_criteria(region: str, threshold: float) -> None:
    """The loss's own mask drops the tokens that the criterion of the same name rejects."""
    criterion = {"ipo": "probability_gap", "kpop": "kpop"}[region]
    batch = make_batch(3, rows=8, scale=0.9)
    spec = RolloutCorrectionSpec(rollout_is=None, rollout_rs=criterion, rollout_rs_threshold=str(threshold))
    kept = batch.correct(correction_rules(spec)).keep
    rule = loss_rule("sampler_penalty")
    rule = replace(rule, params=rule.params.model_copy(update={"region": region, "threshold": threshold}))
    loss = policy_loss(rule, *batch.policies, None)
    assert torch.equal(loss.clipped, ~kept)
    assert loss.clipped.any()


def test_criteria_are_their_formulas() -> None:
    batch = make_batch(5, rows=8, scale=0.9)
    cases = {
        "kpop": lambda p, q: max(binary_kl(p, q), binary_kl(q, p)),
        "probability_gap": lambda p, q: abs(p - q),
    }
    for name, value in cases.items():
        spec = RolloutCorrectionSpec(rollout_is=None, rollout_rs=name, rollout_rs_threshold="0.05")
        kept = batch.correct(correction_rules(spec)).keep
        for t in range(batch.unit.total):
            new, old = math.exp(batch.log_probs[t]), math.exp(batch.rollout_log_probs[t])
            assert kept[t] == (value(new, old) <= 0.05)
    spec = RolloutCorrectionSpec(rollout_is=None, rollout_rs="mult_prob_error", rollout_rs_threshold="1.9")
    kept = batch.correct(correction_rules(spec)).keep
    gap = (batch.log_probs - batch.rollout_log_probs).abs().exp()
    for values, flags in by_response(batch.unit, gap, kept):
        assert flags == [fmean(values or [0.0]) <= 1.9] * len(values)
    assert 0 < batch.unit.any(kept).sum() < (batch.unit.lengths > 0).sum()


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_the_age_of_a_response_rejects_it() -> None:
    batch = make_batch(5, rows=6)
    batch = replace(batch, age=batch.unit.spread(torch.tensor([0, 1, 2, 3, 2, 1])))
    spec = RolloutCorrectionSpec(rollout_is=None, rollout_rs="age", rollout_rs_threshold="1")
    kept = batch.correct(correction_rules(spec)).keep
    assert torch.equal(kept, batch.age <= 1)
    with pytest.raises(ValueError, match="`age`"):
        replace(batch, age=None).correct(correction_rules(spec))


def test_every_experimental_criterion_is_tested_here() -> None:
    found = {part.name for part in REJECTION_CRITERIA.parts() if part.experimental}
    assert found == {"kpop", "probability_gap", "mult_prob_error", "age"}


def test_prefix_weights_are_exact_with_advantages_of_the_prefix() -> None:
    """E_μ[Σ_t Π_{s≤t} ρ_s · (Q^π(t) − V^π(t)) · ∇ log π_t] = ∇ E_π[r]; with one advantage a response not."""
    rewards = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.7, 1.1], [-0.4, 0.9, 0.2]], dtype=torch.float64)
    logits = torch.tensor([[0.2, -0.5, 0.9], [1.0, 0.1, -0.3], [0.0, 0.8, -0.2], [0.5, -0.4, 0.1]])
    logits = logits.double().requires_grad_()  # of the first token, and of the second after each first
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = (logits.detach() + 0.6 * other).log_softmax(-1)
    policy = logits.log_softmax(-1)
    pairs = list(itertools.product(range(3), repeat=2))
    train = torch.stack([torch.stack([policy[0, a], policy[1 + a, b]]) for a, b in pairs])
    rollout = torch.stack([torch.stack([sampler[0, a], sampler[1 + a, b]]) for a, b in pairs])
    (truth,) = torch.autograd.grad(
        sum(train[i].sum().exp() * rewards[pair] for i, pair in enumerate(pairs)), logits, retain_graph=True
    )
    probs = policy.detach().exp()
    after = (probs[1:] * rewards).sum(-1)  # Q of the first token
    by_token = torch.stack(
        [torch.stack([after[a] - probs[0] @ after, rewards[a, b] - after[a]]) for a, b in pairs]
    )
    whole = torch.stack([rewards[pair].expand(2) for pair in pairs])
    units, errors = Units.of_responses(torch.full((len(pairs),), 2)), []
    for advantages in (by_token, whole):
        rules = CorrectionRules(WeightRule("prefix", "truncate", upper=1e9))
        weights = correct(train.detach().flatten(), rollout.flatten(), units, rules).weights
        surrogate = (weights.double().view_as(train) * advantages * train).sum(-1)
        (found,) = torch.autograd.grad((rollout.sum(-1).exp() * surrogate).sum(), logits, retain_graph=True)
        errors.append(float((found - truth).norm() / truth.norm()))
    assert errors[0] < 1e-5
    assert errors[1] > 0.05


# --- the whole mini-batch -----------------------------------------------------------------------------


def gradients(ranks, loss: str, mode: dict[str, object], micro: int) -> list[Tensor]:
    """Of one update on this rank's share."""
    model = tiny_model()
    batch = batch_of(model)
    if mode["bypass_mode"]:
        batch = replace(batch, old_log_probs=batch.rollout_log_probs)
    share = batch.num_episodes // ranks.world_size
    batch = batch.pick(range(ranks.rank * share, (ranks.rank + 1) * share))
    engine = PlainEngine(model)
    settings = settings_of(mode | {"loss_type": loss, "rollout_is": "token"}, micro_sequences=micro)
    update(batch, engine, ranks, settings, lambda _: 0.0, 0)
    found = [gradient for _, gradient in sorted(engine.gradient.items())]
    if ranks.world_size > 1:
        for gradient in found:
            torch.distributed.all_reduce(gradient)
    return found


def on_two_ranks(ranks) -> dict[str, list[Tensor]]:
    return {loss: gradients(ranks, loss, BYPASS, 3) for loss in WITH_STATISTICS}


@pytest.mark.parametrize("loss", WITH_STATISTICS)
def test_figures_of_the_mini_batch_do_not_depend_on_its_division(loss: str) -> None:
    for mode in (BYPASS, DECOUPLED):
        whole = gradients(alone(), loss, mode, 16)
        for micro in (5, 1):
            for found, wanted in zip(gradients(alone(), loss, mode, micro), whole, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_nor_on_the_number_of_ranks(tmp_path) -> None:
    for found in on_ranks(2, on_two_ranks, where=tmp_path):
        for loss, each in found.items():
            for one, wanted in zip(each, gradients(alone(), loss, BYPASS, 16), strict=True):
                torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-6)


def test_with_one_update_per_batch_bypass_is_the_ratio_pinned_to_one() -> None:
    """π_old = π_θ there: decoupled PPO has the ratio 1, and costs a pass that bypass mode does not."""
    model = tiny_model()
    batch = batch_of(model)
    with torch.no_grad():
        old = PlainEngine(model).policy(batch.inputs).log_probs
    found = []
    for mode, loss in ((DECOUPLED, "ppo_clip"), (BYPASS, "reinforce")):
        engine = PlainEngine(tiny_model())
        given = replace(batch, old_log_probs=old if mode is DECOUPLED else batch.rollout_log_probs)
        update(given, engine, alone(), settings_of(mode | {"loss_type": loss}), lambda _: 0.0, 0)
        found.append(engine.gradient)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_maxrl_divides_by_the_mean() -> None:
    """Figures of prime-rl's own tests."""
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    found = estimate("maxrl", rewards, groups)
    assert found.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    graded = torch.tensor([True, True, False, True, True, True, True, True])
    assert estimate("maxrl", rewards[graded], groups[graded])[:3].tolist() == [2.0, -1.0, -1.0]


def token_weights(level: str, log_ratio: Tensor, upper: float | None, params: object = None) -> Tensor:
    """Weights of one-token responses with these log-ratios."""
    rollout = torch.full((len(log_ratio),), -9.0)
    rule = WeightRule(level, "truncate", upper=upper or 1e9, params=params)
    units = Units.of_responses(torch.ones(len(log_ratio), dtype=torch.int64))
    found = correct(rollout + log_ratio, rollout, units, CorrectionRules(rule, ())).weights
    assert found is not None
    return found.double()


@pytest.mark.parametrize("limit", [0.5, 1.0, 3.0])
def test_selective_weights_are_the_mean_over_the_rejection_test(limit: float) -> None:
    log_ratio = torch.linspace(-4.0, 3.0, 57)
    draws = (torch.arange(20_000) + 0.5) / 20_000  # in place of uniform random numbers
    ratio = log_ratio.double().exp()
    accepted = draws[:, None] < ratio / limit
    expected = torch.where(accepted, 1.0, ratio).mean(0)
    found = token_weights("selective", log_ratio, None, SelectiveParams(bound=limit))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.7])
def test_jackpot_is_token_is_with_a_factor_per_position(factor: float) -> None:
    """The mean over the random test; docs/reference/algorithms.md: rules that are settings."""
    target, rollout = torch.randn(2, 12, generator=torch.Generator().manual_seed(1)).double().softmax(-1)
    ratio, cap = target / rollout, 1.8
    accept = (ratio / factor).clamp(max=1.0)
    total = (rollout * accept).sum()  # Z
    weight = (total * ratio.clamp(min=factor)).clamp(max=cap)  # of an accepted token: algorithm 1, line 23
    assert (weight == cap).any()
    assert total < 1.0
    found = total * token_weights("token", ratio.log().float(), float(cap / total))
    torch.testing.assert_close(accept * weight, found, rtol=1e-5, atol=1e-7)
