"""Exact moments of a rule's gradient on groups of n responses with RLOO advantages.

Rewards are 0 or 1. The leave-one-out mean of a response is then k/(n − 1), where k is binomial and
independent of the response, so every expectation is a finite sum over responses and k. Batch statistics that
a loss needs come from a large mini-batch: 4,096 responses drawn with a fixed seed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor

from benchmarks.studies.gradients.worlds import VOCABULARY, Floats, World
from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import Correction, correct
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule
from rlctl.algos.score_centering import score_factors
from rlctl.algos.segments import Segments, Units
from rlctl.registry import POLICY_LOSSES
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.run_spec.resolve import correction_rules

POPULATION = 4096


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Compares the expected gradient m of one group with the true gradient g of the expected reward.

    Attributes:
        inner, norm, signal: m·g, |m|², |g|².
        distance: |m − g|², the squared bias.
        noise: variance of one group's gradient, summed over parameters.
    """

    inner: float
    norm: float
    signal: float
    distance: float
    noise: float

    @property
    def cosine(self) -> float:
        """Cosine of the angle between m and g; 0 if m is 0."""
        return self.inner / (self.norm * self.signal) ** 0.5 if self.norm > 0 else 0.0

    def error(self, groups: float) -> float:
        """Relative mean-squared error with `groups` groups at the best learning rate, in [0, 1]."""
        total = self.norm + self.noise / groups
        return 1.0 - max(self.inner, 0.0) ** 2 / (total * self.signal) if total > 0 else 1.0

    def as_json(self) -> dict[str, float]:
        """Converts to a dict, with the cosine."""
        return asdict(self) | {"cosine": self.cosine}


@dataclass(frozen=True, slots=True)
class BenchRule:
    """A correction and a loss, as a spec section `algorithm.rollout_correction`."""

    spec: RolloutCorrectionSpec

    @classmethod
    def of(cls, **fields: Any) -> BenchRule:
        """Constructs a rule from spec keys; default: sequence weights with REINFORCE in bypass mode.

        Batch normalisation is off, because it only scales the gradient.
        """
        base = {"rollout_is": "sequence", "bypass_mode": True, "loss_type": "reinforce"}
        return cls(RolloutCorrectionSpec(**(base | {"rollout_is_batch_normalize": False} | fields)))

    @property
    def correction(self) -> CorrectionRules:
        """The correction in the internal form."""
        return correction_rules(self.spec)

    @property
    def loss(self) -> LossRule:
        """The loss with its parameters."""
        part = POLICY_LOSSES.part(self.spec.loss_type)
        if part.params is None:
            return LossRule(part.name)
        fields = part.params.model_fields.items()
        required = {name: (f.examples or [None])[0] for name, f in fields if f.is_required()}
        return LossRule(part.name, params=part.params(**(required | dict(self.spec.loss_params))))


class EnumeratedWorld(World):
    """Policies and rewards whose every response is enumerated, so that moments are exact."""

    @cached_property
    def ess(self) -> float:
        """Exact relative effective sample size of sequence weights: mean over prompts of 1 / E_μ[(π/μ)²]."""
        share = self.rollout / self.rollout.sum(1, keepdims=True)
        return float(np.mean(1.0 / (share * (self.train / self.rollout) ** 2).sum(1)))

    def moments(self, rule: BenchRule, n: int) -> GradientMoments:
        """Moments of a rule's gradient on a group of n ≥ 2 responses."""
        loss = self._loss(rule, n)
        means, squares, truths = [], [], []
        for prompt in range(self.num_prompts):
            share = self.rollout[prompt] / self.rollout[prompt].sum()
            success = float(share @ self.rewards[prompt])
            every = self._every(prompt, n)
            factors = _by_response(token_gradient(rule, loss, *every), n)
            per_k = np.einsum("ykt,ytp->kyp", factors, self.scores[prompt])  # (n, Y, P)
            if rule.spec.score_centering:
                centering = _by_response(centering_factors(rule, *every), n)
                per_k -= np.einsum("ykt,ytp->kyp", centering, self._expected_scores(rule, prompt))
            wins = self.rewards[prompt] > 0
            sums = [np.einsum("y,kyp->kp", share * which, per_k) for which in (~wins, wins)]  # per reward
            others, rest = (binom.pmf(np.arange(m + 1), m, success) for m in (n - 1, n - 2))
            means.append(others @ (sums[0] + sums[1]))
            own = np.einsum("k,y,kyp,kyp->", others, share, per_k, per_k)
            pairs = sum(
                rest @ np.einsum("kp,kp->k", sums[one][other : n - 1 + other], sums[other][one : n - 1 + one])
                for one in (0, 1)
                for other in (0, 1)
            )
            squares.append(own / n + (n - 1) / n * pairs)
            centred = self.rewards[prompt] - self.train[prompt] @ self.rewards[prompt]
            truths.append((self.train[prompt] * centred) @ self.scores[prompt].sum(1))
        m, g = np.mean(means, 0), np.mean(truths, 0)
        noise = max(float(np.mean(squares) - m @ m), 0.0)
        return GradientMoments(float(m @ g), float(m @ m), float(g @ g), float((m - g) @ (m - g)), noise)

    def _expected_scores(self, rule: BenchRule, prompt: int) -> Floats:
        """(Y, T, P): expected score under the sampler after each token's prefix, as the rule computes it."""
        keys = (self.contexts * VOCABULARY + self.ids)[self.mask]
        _, first = np.unique(keys, return_index=True)  # every (prefix, token) once
        given = (self.log_probs, self.rollout_log_probs, self.scores)
        train, rollout, scores = (x[prompt][self.mask][first] for x in given)
        factors = listed_factors(rule, train.reshape(-1, VOCABULARY), rollout.reshape(-1, VOCABULARY))
        expected = np.einsum("cv,cvp->cp", factors, scores.reshape(*factors.shape, -1))
        return np.where(self.mask[..., None], expected[self.contexts], 0.0)

    def token_factors(self, rule: BenchRule, n: int, prompt: int) -> Floats:
        """(Y, n, T): the rule's factors of the token scores, for every response and every number of successes
        among the other responses of its group."""
        return _by_response(token_gradient(rule, self._loss(rule, n), *self._every(prompt, n)), n)

    def _every(self, prompt: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Every response with every number k of successes among its group's others: Y · n rows."""
        count = len(self.mask)
        rows = np.repeat(np.arange(count), n)
        return self._tensors(np.full(len(rows), prompt), rows, np.tile(np.arange(n), count), n)

    def _tensors(
        self, prompts: NDArray[Any], rows: NDArray[Any], k: NDArray[Any], n: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, T): log-probs of both policies, RLOO advantages and mask."""
        train, rollout = (
            torch.from_numpy(table[prompts, rows]) for table in (self.log_probs, self.rollout_log_probs)
        )
        mask = torch.from_numpy(self.mask[rows])
        advantage = self.rewards[prompts, rows] - k / (n - 1)
        return train, rollout, torch.from_numpy(advantage)[:, None] * mask, mask

    def _loss(self, rule: BenchRule, n: int) -> LossRule:
        """The rule's loss, with the statistics of a large mini-batch if it needs them."""
        if not rule.loss.needs_statistics:
            return rule.loss
        rng = np.random.default_rng(0)
        prompts = np.arange(POPULATION) % self.num_prompts
        share = self.rollout / self.rollout.sum(1, keepdims=True)
        rows = np.array([rng.choice(share.shape[1], p=share[prompt]) for prompt in prompts])
        success = (share * self.rewards).sum(1)[prompts]
        return with_statistics(rule.loss, *self._tensors(prompts, rows, rng.binomial(n - 1, success), n))


def with_statistics(
    loss: LossRule, train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor
) -> LossRule:
    """The loss with its statistics of a whole batch, (B, T)."""
    columns = (x[mask] for x in (train, rollout, advantages))
    return WholeBatch(*columns, Segments(mask.sum(1))).with_statistics(loss)


def token_gradient(
    rule: BenchRule, loss: LossRule, train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor
) -> Floats:
    """(B, T): −∂loss/∂log π, each token's factor of its score, for log-probs, advantages and mask (B, T).

    Weights and mask are those of `correct`.
    """
    found, unit = _corrected(rule, train, rollout, advantages, mask), Segments(mask.sum(1))
    leaf, keep = train.clone().requires_grad_(), found.keep
    columns = (x[mask][keep] for x in (leaf, rollout, advantages))
    weights = None if loss.has_ratio else found.weights[keep].double()
    values = policy_loss(loss, *columns, unit.kept(keep), weights).values
    (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
    return -torch.zeros_like(leaf).numpy() if gradient is None else -gradient.numpy()


def centering_factors(
    rule: BenchRule, train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor
) -> Floats:
    """(B, T): factors of the expected score that score centering subtracts; arguments of `token_gradient`."""
    keep = torch.zeros_like(mask)
    keep[mask] = _corrected(rule, train, rollout, advantages, mask).keep
    found: Floats = torch.where(keep, advantages, 0.0).numpy()
    return found


def _corrected(
    rule: BenchRule, train: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor
) -> Correction:
    columns = [x[mask] for x in (train, rollout, advantages)]
    more = {"advantages": columns[2], "age": torch.zeros(len(columns[2]), dtype=torch.int64)}
    return correct(*columns[:2], Units.of_responses(mask.sum(1)), rule.correction, **more)


def listed_factors(rule: BenchRule, train: Floats, rollout: Floats) -> Floats:
    """(contexts, V): `score_factors` of the sampler's most likely tokens, 0.0 for the others.

    Args:
        rule: with score centering.
        train, rollout: (contexts, V) log-probs.
    """
    listed = np.argsort(-rollout, -1)[:, : rule.spec.score_centering]
    own, others = (torch.from_numpy(np.take_along_axis(table, listed, -1)) for table in (train, rollout))
    found = np.zeros_like(train)
    np.put_along_axis(found, listed, score_factors(own, others, rule.correction.weight).numpy(), -1)
    return found


def _by_response(values: Floats, n: int) -> Floats:
    """(Y, n, T) from the rows of `EnumeratedWorld._every`."""
    return values.reshape(-1, n, values.shape[-1])


def ess_against_length(sigma: float, lengths: list[int]) -> dict[int, tuple[float, float]]:
    """Per length T: exact relative ESS of sequence weights, and its prediction exp(−T·Var log ρ).

    Tokens are independent; the vocabulary has 16 tokens. One policy's logits are those of the other plus
    N(0, sigma²) noise.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=16)
    both = (logits, logits + sigma * rng.normal(size=16))
    train, rollout = (x - np.log(np.exp(x).sum()) for x in both)
    gap, share = train - rollout, np.exp(rollout)
    second = float(share @ np.exp(2.0 * gap))
    variance = float(share @ gap**2 - (share @ gap) ** 2)
    return {length: (second**-length, float(np.exp(-length * variance))) for length in lengths}
