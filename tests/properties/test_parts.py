"""What every registered loss, estimator, correction weight and rejection criterion must satisfy.

A new part is tested by being registered. Order of the responses, how a batch is divided and how groups are
numbered change nothing; a part that says `unbiased` has the gradient of the expected reward by enumeration: a
loss and an estimator on-policy, a correction weight off-policy.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlctl.algos.correction import correct, correction_metrics, normalization_factor, normalized
from rlctl.algos.estimators import AdvantageInputs, estimate
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import BASIC_STATISTICS, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import Segments, Units, added, to_host
from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules
from tests.properties.batches import Batch, advantage_inputs, loss_rule, make_batch
from tests.properties.padded_batches import factor_and_metrics

ROWS, HORIZON = 8, 5
ORDER = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
UNIT = Segments(torch.tensor([5, 1, 2, 3] * 2))
#: Tokens of the responses in `ORDER`, and their lengths.
PLACES, ORDERED = UNIT.entries_of(ORDER), Segments(UNIT.lengths[ORDER])


def inputs() -> AdvantageInputs:
    draw = torch.Generator().manual_seed(3)
    token_rewards = torch.randn(UNIT.total, generator=draw)
    return AdvantageInputs(
        token_rewards=token_rewards,
        rewards=UNIT.sum(token_rewards),
        units=Units(UNIT, UNIT, UNIT),
        group_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        gamma=0.9,
        lam=0.8,
        divide_by_std=True,
        values=torch.randn(UNIT.total, generator=draw),
        baseline_scores=torch.randn(ROWS, generator=draw),
        score_norms=torch.rand(UNIT.total, generator=draw) + 0.1,
        sequence_weights=torch.rand(ROWS, generator=draw) + 0.2,
    )


def of_episodes(given: AdvantageInputs, episodes: Tensor) -> AdvantageInputs:
    """These episodes (k,), in that order."""
    places, unit = given.unit.entries_of(episodes), Segments(given.unit.lengths[episodes])
    by_token, by_episode = (
        ("token_rewards", "values", "score_norms"),
        ("group_ids", "rewards", "baseline_scores"),
    )
    columns = {name: getattr(given, name)[places] for name in by_token}
    columns |= {name: getattr(given, name)[episodes] for name in (*by_episode, "sequence_weights")}
    return replace(given, units=Units(unit, unit, unit), **columns)


def advantages_of(name: str, given: AdvantageInputs) -> Tensor:
    """(M,) as training uses them."""
    part = ADVANTAGE_ESTIMATORS.part(name)
    return estimate(name, given if part.params is None else replace(given, params=part.params())).advantages


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
class TestEstimators:
    def test_order_changes_nothing(self, name: str) -> None:
        plain = advantages_of(name, inputs())
        torch.testing.assert_close(advantages_of(name, of_episodes(inputs(), ORDER)), plain[PLACES])

    def test_numbers_of_groups_mean_nothing(self, name: str) -> None:
        given = inputs()
        other = replace(given, group_ids=torch.tensor([90, 7])[given.group_ids])
        assert torch.equal(advantages_of(name, other), advantages_of(name, given))

    def test_members_may_be_missing(self, name: str) -> None:
        """Groups of 3, 2 and 1: all are numbers, and the other groups' are those without the group of one."""
        missing = of_episodes(inputs(), torch.tensor([0, 1, 3, 5, 6]))
        alone = replace(missing, group_ids=torch.tensor([0, 0, 0, 1, 7]))
        assert advantages_of(name, missing).isfinite().all()
        found = advantages_of(name, alone)
        assert found.isfinite().all()
        if "group_ids" in ADVANTAGE_ESTIMATORS.part(name).needs and name != "reinforce_plus_plus_baseline":
            assert not found[alone.unit.index == 4].any()


def batch() -> Batch:
    draw = torch.Generator().manual_seed(6)
    log_probs = -torch.rand(UNIT.total, generator=draw) - 0.1
    gap = 0.5 * torch.randn(UNIT.total, generator=draw)
    return Batch(log_probs, log_probs + gap, UNIT, torch.randn(UNIT.total, generator=draw))


WEIGHTS = torch.rand(UNIT.total, generator=torch.Generator().manual_seed(5)) + 0.5


def values_and_gradient(
    name: str, given: Batch, weights: Tensor, whole: Batch | None = None
) -> tuple[Tensor, Tensor]:
    """Of some responses; `whole`: the mini-batch they are of, if there are more."""
    leaf = given.log_probs.clone().requires_grad_()
    rule = loss_rule(name, *(whole or given).policies)
    values = policy_loss(rule, leaf, *given.policies[1:], weights).values
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


@pytest.mark.parametrize("name", POLICY_LOSSES)
class TestLosses:
    def test_order_and_division_change_nothing(self, name: str) -> None:
        whole = values_and_gradient(name, batch(), WEIGHTS)
        shuffled = values_and_gradient(name, batch().select(ORDER), WEIGHTS[PLACES])
        for responses in (torch.arange(3), torch.arange(3, 8)):
            places = UNIT.entries_of(responses)
            part = values_and_gradient(name, batch().select(responses), WEIGHTS[places], batch())
            for found, wanted in zip(part, whole, strict=True):
                torch.testing.assert_close(found, wanted[places])
        for found, wanted in zip(shuffled, whole, strict=True):
            torch.testing.assert_close(found, wanted[PLACES])

    def test_a_response_without_tokens_changes_nothing(self, name: str) -> None:
        lengths = torch.cat([torch.tensor([0]), UNIT.lengths[:2], torch.tensor([0]), UNIT.lengths[2:]])
        with_empty = replace(batch(), unit=Segments(lengths))
        pairs = (values_and_gradient(name, each, WEIGHTS) for each in (with_empty, batch()))
        for found, wanted in zip(*pairs, strict=True):
            assert torch.equal(found, wanted)

    def test_a_weight_multiplies_the_gradient(self, name: str) -> None:
        single, doubled = (values_and_gradient(name, batch(), c * WEIGHTS)[1] for c in (1.0, 2.0))
        torch.testing.assert_close(doubled, 2.0 * single)

    def test_it_says_whether_tokens_without_advantage_have_a_gradient(self, name: str) -> None:
        zero = UNIT.spread(torch.tensor([True, False, True, True, False, False, True, False]))
        given = batch()
        # far from 0, so that a penalty of the most extreme tokens is one of these
        given = replace(given, advantages=(given.advantages + 5.0).masked_fill(zero, 0.0))
        gradient = values_and_gradient(name, given, WEIGHTS)[1]
        assert gradient[~zero].any()
        assert bool(gradient[zero].any()) is not POLICY_LOSSES.part(name).vanishes_without_advantage


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
    found = make_batch(12, rows=ROWS, horizon=HORIZON, scale=0.6)
    return replace(found, age=found.unit.spread(torch.arange(ROWS) % 3))


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
    def test_order_and_division_change_nothing(self, kind: str, name: str) -> None:
        whole = aged_batch()
        places = whole.unit.entries_of(ORDER)
        for rules in rules_of(kind, name):
            once = whole.correct(rules)
            factor, metrics = factor_and_metrics(once, rules)
            found = [whole.select(ORDER[part]).correct(rules) for part in (slice(0, 3), slice(3, None))]
            for attribute in ("keep", "weights"):
                together = torch.cat([getattr(part, attribute) for part in found])
                torch.testing.assert_close(together, getattr(once, attribute)[places])
            sums = added([to_host(part.sums) for part in found])
            assert normalization_factor(sums, rules) == pytest.approx(factor, rel=1e-6)
            for key, value in correction_metrics(normalized(sums, factor, rules), rules).items():
                assert value == pytest.approx(metrics[key], rel=1e-5, abs=2e-6), key

    def test_a_response_with_bad_numbers_costs_only_itself(self, kind: str, name: str) -> None:
        clean = aged_batch()
        itself = clean.unit.index == 3
        for bad, rules in itertools.product((float("nan"), float("-inf")), rules_of(kind, name)):
            train = clean.log_probs.clone()
            train[clean.unit.starts[3]] = bad
            expected = clean.correct(rules)
            found = replace(clean, log_probs=train).correct(rules)
            assert found.nonfinite.tolist() == [response == 3 for response in range(ROWS)]
            assert torch.equal(found.keep[~itself], expected.keep[~itself])
            assert torch.equal(found.weights[~itself], expected.weights[~itself])
            assert not found.weights[itself].any()
            factor, metrics = factor_and_metrics(found, rules)
            assert torch.tensor([factor, *metrics.values()]).isfinite().all()

    def test_where_the_policies_agree_nothing_changes(self, kind: str, name: str) -> None:
        aged = aged_batch()
        same = replace(aged, rollout_log_probs=aged.log_probs, age=torch.zeros_like(aged.age))
        for rules in rules_of(kind, name):
            found = same.correct(rules)
            assert found.keep.all()
            assert torch.equal(found.weights, torch.ones(same.unit.total))


# --- enumeration ------------------------------------------------------------------------------------

VOCABULARY, LENGTH = 3, 2
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
REWARDS = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.7, 1.1, -0.4, 0.9, 0.2], dtype=torch.float64)
EVERY = Segments(torch.full((len(RESPONSES),), LENGTH))
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
    column = log_probs.flatten()
    given = (column.detach(), EVERY.spread(REWARDS), EVERY)
    loss = policy_loss(loss_rule(name, column, *given), column, *given, None)
    (gradient,) = torch.autograd.grad((EVERY.spread(chance) * loss.values).sum(), logits)
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
        scores, groups = REWARDS[rows].float(), torch.tensor([0, 0])
        lengths = torch.tensor([LENGTH, LENGTH])
        given = advantage_inputs(scores, groups, lengths, baseline_scores=torch.full((2,), 0.7))
        advantages = advantages_of(name, given)[::LENGTH].double()
        objective = objective + chance[rows].prod() * (advantages * log_probs[rows]).mean()
    (gradient,) = torch.autograd.grad(objective, logits)
    torch.testing.assert_close(gradient, true_gradient(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [part.name for part in CORRECTION_WEIGHTS.parts() if part.unbiased])
def test_an_unbiased_weight_has_it_off_policy(name: str) -> None:
    """E_rollout[w · A · ∇ log π] without a bound, over all responses."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = token_log_probs(logits)
    rollout = token_log_probs(LOGITS + torch.tensor([[0.5, -0.3, 0.1], [-0.4, 0.6, 0.2]]).double())
    rules = CorrectionRules(WeightRule(name, "truncate", upper=1e9))
    advantages, column = EVERY.spread(REWARDS), log_probs.flatten()
    given = (column.detach(), rollout.flatten(), Units(EVERY, EVERY, EVERY), rules)
    weights = correct(*given, advantages=advantages).weights
    surrogate = EVERY.spread(rollout.sum(-1).exp()) * weights.double() * advantages * column
    (gradient,) = torch.autograd.grad(surrogate.sum(), logits)
    torch.testing.assert_close(gradient, true_gradient(), rtol=1e-5, atol=1e-6)
