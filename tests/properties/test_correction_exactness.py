"""A policy small enough to enumerate every sequence: correction gives the very gradient it promises.

Three tokens, at most three positions, token 0 ends the sequence: 1 + 2 + 12 = 15 sequences. The
expectation over π_rollout is taken exactly, by giving every sequence its probability as a weight in
the loss (through the advantage, which multiplies it).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rlctl.algos.correction import correct
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Units

VOCABULARY, HORIZON, END = 3, 3, 0
HUGE = WeightRule("sequence", "truncate", upper=1e9)


def all_sequences() -> tuple[Tensor, Tensor]:
    """Token ids (15, 3) and their mask."""
    ids, mask = [], []
    for length in range(1, HORIZON + 1):
        last = range(VOCABULARY) if length == HORIZON else [END]
        for *body, end in itertools.product(*[[1, 2]] * (length - 1), last):
            ids.append([*body, end] + [END] * (HORIZON - length))
            mask.append([t < length for t in range(HORIZON)])
    return torch.tensor(ids), torch.tensor(mask)


IDS, MASK = all_sequences()
UNITS = Units.of_responses(MASK.sum(1))
#: One state per position and previous token.
STATES = torch.cat([torch.full((len(IDS), 1), VOCABULARY), IDS[:, :-1]], 1)
REWARDS = torch.randn(len(IDS), generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def policy(seed: int, scale: float = 0.8) -> Tensor:
    """Logits (position, previous token, next token), float64, to be differentiated."""
    generator = torch.Generator().manual_seed(seed)
    shape = (HORIZON, VOCABULARY + 1, VOCABULARY)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).requires_grad_()


def log_probs_of(logits: Tensor) -> Tensor:
    """(15, 3): log-prob of each token of each sequence."""
    table = logits.log_softmax(-1)
    return torch.where(MASK, table[torch.arange(HORIZON), STATES, IDS], 0.0)


def probabilities(log_probs: Tensor) -> Tensor:
    return log_probs.sum(-1).exp()


def corrected_gradient(train: Tensor, rollout: Tensor, rules: CorrectionRules) -> Tensor:
    """∇ of −E_rollout[w · A · Σ log π], through the code that trains."""
    log_probs = log_probs_of(train)
    rollout_log_probs = log_probs_of(rollout).detach()
    found = correct(log_probs[MASK].detach(), rollout_log_probs[MASK], UNITS, rules)
    return _gradient(train, "reinforce", probabilities(rollout_log_probs), found.keep, found.weights)


def _gradient(train: Tensor, loss: str, shares: Tensor, keep: Tensor, weights: Tensor | None) -> Tensor:
    """∇ of a loss on the policy's own old log-probs, of which each sequence has its share (15,)."""
    log_probs = log_probs_of(train)[MASK]
    advantages = UNITS.episode.spread(shares.detach() * REWARDS)
    given = (log_probs[keep], log_probs[keep].detach(), advantages[keep], UNITS.episode.kept(keep))
    values = policy_loss(LossRule(loss), *given, None if weights is None else weights[keep]).values
    return torch.autograd.grad(values.sum(), train)[0]  # the shares already average


def exact_gradient(train: Tensor, factor: Tensor | None = None) -> Tensor:
    """∇ of −Σ_y π_train(y) · factor(y) · A(y), differentiated directly."""
    factor = torch.ones(len(IDS)) if factor is None else factor
    return torch.autograd.grad(-(probabilities(log_probs_of(train)) * factor * REWARDS).sum(), train)[0]


def test_probabilities_of_all_sequences_add_up_to_one() -> None:
    assert len(IDS) == 15
    assert probabilities(log_probs_of(policy(1))).sum().item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_untruncated_sequence_weights_give_the_gradient_of_the_trained_policy(seed: int) -> None:
    train, rollout = policy(seed), policy(100 + seed)
    found = corrected_gradient(train, rollout, CorrectionRules(HUGE))
    # Weights are float32: what is left is their rounding.
    torch.testing.assert_close(found, exact_gradient(train), rtol=1e-6, atol=1e-7)


def test_the_loss_would_be_wrong_without_weights() -> None:
    train, rollout = policy(1), policy(101)
    found = corrected_gradient(train, rollout, CorrectionRules(WeightRule(None)))
    assert (found - exact_gradient(train)).abs().max() > 0.05


@pytest.mark.parametrize("bound", ["clip", "truncate", "mask"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bias_of_each_bound_is_the_predicted_one(bound: str, seed: int) -> None:
    """E_rollout[bound(w)·A·∇log π] − E_train[A·∇log π] = E_train[(bound(w)/w − 1)·A·∇log π]."""
    train, rollout = policy(seed), policy(100 + seed)
    lower, upper = 0.6, 1.5
    log_ratio = (log_probs_of(train) - log_probs_of(rollout)).sum(-1).detach()
    bounded = []
    for weight in log_ratio.exp().tolist():
        inside = lower <= weight <= upper
        low = lower if bound == "clip" else 0.0
        bounded.append((weight if inside else 0.0) if bound == "mask" else max(min(weight, upper), low))
    factor = torch.tensor(bounded, dtype=torch.float64) / log_ratio.exp()
    bias = corrected_gradient(train, rollout, CorrectionRules(WeightRule("sequence", bound, lower, upper)))
    bias = bias - exact_gradient(train)
    assert bias.abs().max() > 0.01
    torch.testing.assert_close(bias, exact_gradient(train, factor - 1.0), rtol=1e-5, atol=2e-7)


def test_rejection_is_a_weight_of_zero() -> None:
    train, rollout = policy(4), policy(104)
    rule = RejectRule("sequence", "ratio", "sum", 0.7, 1.6, "sequence")
    ratio = (log_probs_of(train) - log_probs_of(rollout)).sum(-1).exp().detach()
    kept = ((ratio >= 0.7) & (ratio <= 1.6)).double()
    assert 0 < kept.sum() < len(IDS)
    found = corrected_gradient(train, rollout, CorrectionRules(HUGE, (rule,)))
    torch.testing.assert_close(found, exact_gradient(train, kept), rtol=1e-6, atol=1e-7)


def test_ppo_at_the_sampling_policy_is_the_policy_gradient() -> None:
    """r = π_θ/π_old has the gradient of log π_θ at π_θ = π_old, per token."""
    train = policy(2)
    shares, keep = probabilities(log_probs_of(train)), torch.ones(int(MASK.sum()), dtype=torch.bool)
    found = _gradient(train, "ppo_clip", shares, keep, None)
    torch.testing.assert_close(found, exact_gradient(train), rtol=1e-10, atol=1e-12)
