"""What every registered loss, estimator, correction weight and rejection criterion must satisfy.

A new part is tested by being registered. Order of the rows, padding, how a batch is divided and how groups
are numbered change nothing; a part that says `unbiased` has the gradient of the expected reward by
enumeration: a loss and an estimator on-policy, a correction weight off-policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rlctl.algos.statistics import correction_metrics, normalized
from torch import Tensor

from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.estimators import AdvantageInputs, Estimate, spread
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import BASIC_STATISTICS, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.token_advantages import whiten
from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA
from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.spec.resolve import correction_rules
from tests.properties.batches import Batch, factor_and_metrics, loss_rule, make_batch

ROWS, HORIZON = 8, 5
ORDER = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 1, 0]] * 2, dtype=torch.bool
)  # holes too: tool output


def inputs() -> AdvantageInputs:
    draw = torch.Generator().manual_seed(3)
    rewards = torch.where(MASK, torch.randn(ROWS, HORIZON, generator=draw), 0.0)
    return AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=MASK,
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        valid=torch.tensor([True, True, False, True, True, True, True, True]),
        gamma=0.9,
        lam=0.8,
        divide_by_std=True,
        whiten=whiten,
        values=torch.where(MASK, torch.randn(ROWS, HORIZON, generator=draw), 0.0),
        baseline_scores=torch.randn(ROWS, generator=draw),
        score_norms=torch.where(MASK, torch.rand(ROWS, HORIZON, generator=draw) + 0.1, 0.0),
        sequence_weights=torch.rand(ROWS, generator=draw) + 0.2,
    )


def changed(given: AdvantageInputs, how: Callable[[Tensor], Tensor]) -> AdvantageInputs:
    """Every tensor of the batch transformed alike."""
    by_token = ("token_level_rewards", "response_mask", "values", "score_norms")
    by_row = ("group_ids", "valid", "baseline_scores", "sequence_weights")
    return replace(given, **{name: how(getattr(given, name)) for name in (*by_token, *by_row)})


def advantages_of(name: str, given: AdvantageInputs) -> Tensor:
    """(B, T) as training uses them: 0.0 where a response was not graded."""
    part = ADVANTAGE_ESTIMATORS.part(name)
    found = part.function(given if part.params is None else replace(given, params=part.params()))
    found = found.advantages if isinstance(found, Estimate) else found
    found = spread(found, given.response_mask) if found.ndim == 1 else found
    return torch.where(given.valid_mask, found, 0.0)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
class TestEstimators:
    def test_order_changes_nothing(self, name: str) -> None:
        plain = advantages_of(name, inputs())
        torch.testing.assert_close(advantages_of(name, changed(inputs(), lambda x: x[ORDER])), plain[ORDER])

    def test_padding_changes_nothing(self, name: str) -> None:
        def widened(values: Tensor) -> Tensor:
            if values.ndim == 1:
                return values
            fill = False if values.dtype == torch.bool else float("nan")
            return torch.nn.functional.pad(values, (0, 3), value=fill)

        wide = replace(
            changed(inputs(), widened), token_level_rewards=widened(inputs().token_level_rewards).nan_to_num()
        )
        found = advantages_of(name, wide)
        torch.testing.assert_close(found[:, :HORIZON], advantages_of(name, inputs()))
        assert (found[:, HORIZON:] == 0.0).all()

    def test_numbers_of_groups_mean_nothing(self, name: str) -> None:
        given = inputs()
        other = replace(given, group_ids=torch.tensor([90, 7])[given.group_ids])
        assert torch.equal(advantages_of(name, other), advantages_of(name, given))

    def test_responses_that_were_not_graded_count_nowhere(self, name: str) -> None:
        given = inputs()
        wild = given.token_level_rewards.clone()
        wild[2] = torch.where(MASK[2], 1e6, 0.0)
        clean = advantages_of(name, given)
        assert torch.equal(advantages_of(name, replace(given, token_level_rewards=wild)), clean)
        assert (clean[2] == 0.0).all()


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(4)
    log_probs = -torch.rand(ROWS, HORIZON, generator=draw) - 0.1
    gap = 0.5 * torch.randn(ROWS, HORIZON, generator=draw)
    return {
        "log_probs": log_probs,
        "old_log_probs": log_probs + gap,
        "advantages": torch.randn(ROWS, HORIZON, generator=draw),
        "loss_mask": MASK,
        "weights": torch.rand(ROWS, HORIZON, generator=draw) + 0.5,
    }


def values_and_gradient(
    name: str, given: dict[str, Tensor], whole: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Of some rows; `whole`: the mini-batch they are of, if there are more."""
    keys = ("old_log_probs", "advantages", "loss_mask")
    known = [(whole or given)[key] for key in ("log_probs", *keys)]
    leaf = given["log_probs"].clone().requires_grad_()
    rest = [given[key] for key in (*keys, "weights")]
    values = policy_loss(loss_rule(name, *known), leaf, *rest).values
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


@pytest.mark.parametrize("name", POLICY_LOSSES)
class TestLosses:
    def test_order_and_division_change_nothing(self, name: str) -> None:
        whole = values_and_gradient(name, tensors())
        shuffled = values_and_gradient(name, {key: x[ORDER] for key, x in tensors().items()})
        for rows in (slice(0, 3), slice(3, 8)):
            part = values_and_gradient(name, {key: x[rows] for key, x in tensors().items()}, tensors())
            for found, wanted in zip(part, whole, strict=True):
                torch.testing.assert_close(found, wanted[rows])
        for found, wanted in zip(shuffled, whole, strict=True):
            torch.testing.assert_close(found, wanted[ORDER])

    def test_what_is_off_mask_is_never_read(self, name: str) -> None:
        wild = {
            key: x if x.dtype == torch.bool else x.masked_fill(~MASK, torch.nan)
            for key, x in tensors().items()
        }
        wild["advantages"] = tensors()["advantages"].masked_fill(~MASK, 0.0)
        for found, wanted in zip(
            values_and_gradient(name, wild), values_and_gradient(name, tensors()), strict=True
        ):
            assert torch.equal(found, wanted)
            assert (found[~MASK] == 0.0).all()

    def test_a_weight_multiplies_the_gradient(self, name: str) -> None:
        given = tensors()
        doubled = given | {"weights": 2.0 * given["weights"]}
        torch.testing.assert_close(
            values_and_gradient(name, doubled)[1], 2.0 * values_and_gradient(name, given)[1]
        )

    def test_it_says_whether_rows_without_advantage_have_a_gradient(self, name: str) -> None:
        zero_rows = torch.tensor([True, False, True, True, False, False, True, False])
        given = tensors()
        # far from 0, so that a penalty of the most extreme tokens is one of these rows
        given["advantages"] = (given["advantages"] + 5.0).masked_fill(zero_rows[:, None], 0.0)
        gradient = values_and_gradient(name, given)[1]
        assert gradient[~zero_rows].any()
        assert bool(gradient[zero_rows].any()) is not POLICY_LOSSES.part(name).needs_advantage


# --- correction weights and rejection criteria --------------------------------------------------------


def weight_rules(name: str) -> list[CorrectionRules]:
    """The rules that a spec with this weight makes, with every bound at its typical thresholds."""
    return [
        correction_rules(
            RolloutCorrectionSpec(rollout_is=name, rollout_is_threshold=threshold, rollout_is_bound=bound)
        )
        for threshold in CORRECTION_WEIGHTS.part(name).thresholds[:2]
        for bound in ("clip", "truncate", "mask")
    ]


def criterion_rules(name: str) -> list[CorrectionRules]:
    """The rules that a spec with this criterion makes at its typical thresholds."""
    return [
        correction_rules(
            RolloutCorrectionSpec(rollout_is="token", rollout_rs=name, rollout_rs_threshold=threshold)
        )
        for threshold in REJECTION_CRITERIA.part(name).thresholds
    ]


def aged_batch() -> Batch:
    """With what only some rules read."""
    return replace(make_batch(12, rows=ROWS, horizon=HORIZON, scale=0.6), age=torch.arange(ROWS) % 3)


def rules_of(kind: str, name: str) -> list[CorrectionRules]:
    if kind == "weight":
        return weight_rules(name)
    if name not in BASIC_STATISTICS:
        return criterion_rules(name)
    upper = {"ratio": 1.6, "k1": 0.5}.get(name, 0.1)  # one that a dialect gives a name and bounds
    return [CorrectionRules(WeightRule("token"), (RejectRule(name, name, "none", None, upper, "token"),))]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("weight", name) for name in CORRECTION_WEIGHTS),
        *(("criterion", name) for name in REJECTION_CRITERIA),
    ],
)
class TestCorrectionParts:
    def test_order_padding_and_division_change_nothing(self, kind: str, name: str) -> None:
        whole = aged_batch()
        for rules in rules_of(kind, name):
            once = whole.correct(rules)
            factor, metrics = factor_and_metrics(once, rules)
            parts = [whole.select(rows).padded(pad) for rows, pad in ((ORDER[:3], 2), (ORDER[3:], 0))]
            found = [part.correct(rules) for part in parts]
            for attribute in ("keep_mask", "weights"):
                together = torch.cat([getattr(part, attribute)[:, :HORIZON] for part in found])
                torch.testing.assert_close(together, getattr(once, attribute)[ORDER])
            sums = (found[0].sums + found[1].sums).to_host()
            assert normalization_factor(sums, rules) == pytest.approx(factor, rel=1e-6)
            for key, value in correction_metrics(normalized(sums, factor, rules), rules).items():
                assert value == pytest.approx(metrics[key], rel=1e-5, abs=2e-6), key

    def test_a_row_with_bad_numbers_costs_only_itself(self, kind: str, name: str) -> None:
        clean = aged_batch()
        for bad, rules in itertools.product((float("nan"), float("-inf")), rules_of(kind, name)):
            train = clean.log_probs.clone()
            train[3, 0] = bad
            expected = clean.correct(rules)
            found = replace(clean, log_probs=train).correct(rules)
            others = torch.arange(ROWS) != 3
            assert found.nonfinite.tolist() == (~others).tolist()
            assert torch.equal(found.keep_mask[others], expected.keep_mask[others])
            assert torch.equal(found.weights[others], expected.weights[others])
            assert not found.weights[3].any()
            factor, metrics = factor_and_metrics(found, rules)
            assert torch.tensor([factor, *metrics.values()]).isfinite().all()

    def test_where_the_policies_agree_nothing_changes(self, kind: str, name: str) -> None:
        batch = aged_batch()
        same = replace(batch, rollout_log_probs=batch.log_probs, age=torch.zeros(ROWS))
        for rules in rules_of(kind, name):
            found = same.correct(rules)
            assert torch.equal(found.keep_mask, same.mask)
            assert torch.equal(found.weights, same.mask.float())


# --- enumeration ------------------------------------------------------------------------------------

VOCABULARY, LENGTH = 3, 2
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7, 1.1, -0.4, 0.9, 0.2], dtype=torch.float64)
LOGITS = torch.tensor([[0.2, -0.5, 0.9], [1.0, 0.1, -0.3]], dtype=torch.float64)


def token_log_probs(logits: Tensor) -> Tensor:
    """(9, 2) log π of both tokens of every response; the positions are independent."""
    return logits.log_softmax(-1)[torch.arange(LENGTH), RESPONSES]


def true_gradient() -> Tensor:
    """∇ E[reward]."""
    logits = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((token_log_probs(logits).sum(-1).exp() * REWARDS).sum(), logits)
    return gradient


@pytest.mark.parametrize("name", [part.name for part in POLICY_LOSSES.parts() if part.unbiased])
def test_an_unbiased_loss_has_the_gradient_of_the_expected_reward(name: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    log_probs = token_log_probs(logits)
    chance = log_probs.detach().sum(-1).exp()
    advantages = REWARDS[:, None].expand(-1, LENGTH)
    every = torch.ones_like(advantages, dtype=torch.bool)
    given = (log_probs.detach(), advantages, every)
    rule = loss_rule(name, log_probs, *given)
    loss = policy_loss(rule, log_probs, *given, None)
    (gradient,) = torch.autograd.grad((chance * loss.values.sum(-1)).sum(), logits)
    torch.testing.assert_close(-gradient, true_gradient())


@pytest.mark.parametrize("name", [part.name for part in ADVANTAGE_ESTIMATORS.parts() if part.unbiased])
def test_an_unbiased_estimator_has_it_too(name: str) -> None:
    """Over all pairs of responses to one prompt; the baseline score is that of some fixed response."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = token_log_probs(logits).sum(-1)
    chance = log_probs.detach().exp()
    objective = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(range(len(RESPONSES)), repeat=2):
        rows = list(pair)
        rewards = torch.zeros(2, LENGTH)
        rewards[:, -1] = REWARDS[rows].float()
        given = AdvantageInputs(
            token_level_rewards=rewards,
            response_mask=torch.ones(2, LENGTH, dtype=torch.bool),
            group_ids=torch.tensor([0, 0]),
            valid=torch.tensor([True, True]),
            gamma=1.0,
            lam=1.0,
            divide_by_std=True,
            whiten=whiten,
            baseline_scores=torch.full((2,), 0.7),
        )
        advantages = advantages_of(name, given)[:, 0].double()
        objective = objective + chance[rows].prod() * (advantages * log_probs[rows]).mean()
    (gradient,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(gradient, true_gradient(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [part.name for part in CORRECTION_WEIGHTS.parts() if part.unbiased])
def test_an_unbiased_weight_has_it_off_policy(name: str) -> None:
    """E_rollout[w · A · ∇ log π] without a bound, over all responses."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = token_log_probs(logits)
    rollout = token_log_probs(LOGITS + torch.tensor([[0.5, -0.3, 0.1], [-0.4, 0.6, 0.2]]).double())
    every = torch.ones_like(rollout, dtype=torch.bool)
    rules = CorrectionRules(WeightRule(name, "truncate", upper=1e9))
    advantages = REWARDS[:, None].expand(-1, LENGTH)
    weights = correct(log_probs.detach(), rollout, every, rules, advantages=advantages).weights
    assert weights is not None
    surrogate = (weights.double() * advantages * log_probs).sum(-1)
    (gradient,) = torch.autograd.grad((rollout.sum(-1).exp() * surrogate).sum(), logits)
    torch.testing.assert_close(gradient, true_gradient(), rtol=1e-5, atol=1e-6)
