"""Learned policies with responses of 16 to 64 tokens: too long to enumerate, but with an exact true gradient.

The policy's inputs are the prompt, the position (its quarter of the horizon) and the previous token. The
reward is 1 if token 2 followed token 1 often enough. Policy and reward together form a Markov chain, so the
gradient of the expected reward and the effective sample size of sequence weights are finite sums over its
states. A rule's gradient of a group has no such form: its mean and variance are estimated on sampled groups,
which are the same for every rule: 2,000 groups of up to 16 tokens, fewer groups of longer responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax

from benchmarks.studies.gradients.exact import (
    POPULATION,
    BenchRule,
    GradientMoments,
    centering_factors,
    listed_factors,
    token_gradient,
    with_statistics,
)
from benchmarks.studies.gradients.worlds import VOCABULARY, Floats

#: Token 0 ends a response, the reward counts 1 and 2, 3 is a filler and the previous token of the first.
PARTS, PROMPTS, FILLER = 4, 2, 3
#: Groups times tokens used for moments; groups used for the table of lengths.
GROUP_TOKENS, LENGTH_GROUPS = 32_000, 500


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """Groups of n responses; rows of a group are adjacent; B = groups · n rows."""

    contexts: NDArray[np.int64]  # (B, T): row of the policy table that each token was drawn from
    tokens: NDArray[np.int64]  # (B, T)
    mask: NDArray[np.bool_]  # (B, T)
    advantages: Floats  # (B,) RLOO


class LearnedWorld:
    """A trained policy and a different sampling policy, with `ess` and `moments` as in `EnumeratedWorld`.

    Args:
        seed: seed of all random numbers.
        mismatch: `noise` on every context's logits, or `stale`: the policy is `size` gradient steps ahead.
        size: size of the mismatch.
        horizon: maximum response length in tokens.
        needed: times that token 2 must follow token 1 for a reward of 1, per prompt; None: horizon/16 and
            horizon/8, at least 1.
        learned: mean reward at which training of the policy stops.

    Attributes:
        train, rollout: (prompts · parts · previous tokens, vocabulary) log-probs.
        gradient: gradient of the expected reward with respect to the logits of `train`, flattened.
        ess: exact relative effective sample size of sequence weights.
    """

    def __init__(
        self,
        seed: int,
        mismatch: str,
        size: float,
        horizon: int,
        *,
        needed: tuple[int, int] | None = None,
        learned: float = 0.4,
    ) -> None:
        rng, self.horizon = np.random.default_rng(seed), horizon
        self._needed = needed or (max(1, horizon // 16), max(1, horizon // 8))
        shape = (PROMPTS * PARTS * VOCABULARY, VOCABULARY)
        logits = 0.3 * rng.normal(size=shape)
        logits[:, 0] -= np.log(horizon / 2.0)  # most responses are long
        for _ in range(400):
            share, gradient = self.expected(logits)
            if share >= learned:
                break
            logits = logits + gradient / np.linalg.norm(gradient)
        sampler = logits
        if mismatch == "stale":
            for _ in range(int(size)):
                _, gradient = self.expected(logits)
                logits = logits + 0.3 * gradient / np.linalg.norm(gradient)
        else:
            sampler = logits + size * rng.normal(size=shape)
        self.train, self.rollout = log_softmax(logits, -1), log_softmax(sampler, -1)
        _, gradient = self.expected(logits)
        self.gradient = gradient.ravel()
        self._drawn: dict[int, SampledGroups] = {}

    def _table(self, prompt: int, t: int) -> slice:
        first = (prompt * PARTS + t * PARTS // self.horizon) * VOCABULARY
        return slice(first, first + VOCABULARY)

    def expected(self, logits: Floats) -> tuple[float, Floats]:
        """Mean reward over the prompts and its gradient, by a backward and a forward pass over positions."""
        probs, gradient, total = np.exp(log_softmax(logits, -1)), np.zeros_like(logits), 0.0
        for prompt, needed in enumerate(self._needed):
            more = np.minimum(np.arange(needed + 1) + 1, needed)  # the incremented count
            done = (np.arange(needed + 1) >= needed).astype(float)
            # values: of (previous token, count); actions: of (previous token, count, token) per position
            values, actions = np.tile(done, (VOCABULARY, 1)), []
            for t in reversed(range(self.horizon)):
                action = np.tile(values.T, (VOCABULARY, 1, 1))
                action[1, :, 2] = values[2, more]
                action[:, :, 0] = done
                actions.append(action)
                values = np.einsum("bv,bcv->bc", probs[self._table(prompt, t)], action)
            total += float(values[FILLER, 0]) / PROMPTS
            here = np.zeros((VOCABULARY, needed + 1))
            here[FILLER, 0] = 1.0
            for t, action in enumerate(reversed(actions)):
                rows = self._table(prompt, t)
                p = probs[rows]
                advantage = action - np.einsum("bv,bcv->bc", p, action)[..., None]
                gradient[rows] += p * np.einsum("bc,bcv->bv", here, advantage) / PROMPTS
                after, counted = np.einsum("bc,bv->vc", here, p), here[1] * p[1, 2]
                after[2] += np.bincount(more, counted, needed + 1) - counted
                after[0] = 0.0
                here = after
        return total, gradient

    @cached_property
    def ess(self) -> float:
        """Mean over the prompts of 1 / E_μ[(Π ρ)²]."""
        squares = np.exp(2.0 * self.train - self.rollout)
        found = []
        for prompt in range(PROMPTS):
            here, total = np.eye(VOCABULARY)[FILLER], 0.0
            for t in range(self.horizon):
                after = here @ squares[self._table(prompt, t)]
                total, here = total + after[0], np.where(np.arange(VOCABULARY) > 0, after, 0.0)
            found.append(1.0 / (total + here.sum()))
        return float(np.mean(found))

    def sample(
        self, n: int, groups: int, of: Floats | None = None, draw: tuple[int, ...] = ()
    ) -> SampledGroups:
        """Samples groups of n responses, alternating the prompts.

        Calls with the same `draw` return the same groups. `of`: log-probs to sample from; None: those of the
        sampling policy.
        """
        rng = np.random.default_rng([self.horizon, n, *draw])
        rows = groups * n
        prompts = np.repeat(np.arange(groups) % PROMPTS, n)
        before, alive = np.full(rows, FILLER), np.ones(rows, bool)
        counts = np.zeros(rows, int)
        contexts, tokens = (np.zeros((rows, self.horizon), np.int64) for _ in range(2))
        mask = np.zeros((rows, self.horizon), bool)
        cdf = np.exp(self.rollout if of is None else of).cumsum(-1)
        for t in range(self.horizon):
            context = (prompts * PARTS + t * PARTS // self.horizon) * VOCABULARY + before
            drawn = (rng.random(rows)[:, None] * cdf[context, -1:] > cdf[context]).sum(-1)
            contexts[:, t], tokens[:, t], mask[:, t] = context, drawn, alive
            counts += alive & (before == 1) & (drawn == 2)
            alive = alive & (drawn != 0)
            before = np.where(alive, drawn, before)
        rewards = (counts >= np.array(self._needed)[prompts]).astype(float).reshape(groups, n)
        others = (rewards.sum(1, keepdims=True) - rewards) / (n - 1)
        return SampledGroups(contexts, tokens, mask, (rewards - others).ravel())

    def group_gradients(self, rule: BenchRule, drawn: SampledGroups, n: int) -> Floats:
        """(groups, parameters): the rule's gradient of each group."""
        train, rollout = (
            torch.from_numpy(np.where(drawn.mask, table[drawn.contexts, drawn.tokens], 0.0))
            for table in (self.train, self.rollout)
        )
        mask = torch.from_numpy(drawn.mask)
        advantages = torch.from_numpy(drawn.advantages)[:, None] * mask
        loss, tensors = rule.loss, (train, rollout, advantages, mask)
        if loss.needs_statistics:
            loss = with_statistics(loss, *(x[:POPULATION] for x in tensors))
        probs, factors = np.exp(self.train), token_gradient(rule, loss, *tensors) * drawn.mask
        found = self._by_group(drawn.contexts * VOCABULARY + drawn.tokens, factors, n, self.train.size)
        found = found.reshape(-1, *self.train.shape)
        found -= self._by_group(drawn.contexts, factors, n, len(probs))[..., None] * probs
        if rule.spec.score_centering:
            listed = listed_factors(rule, self.train, self.rollout)
            expected = listed - listed.sum(-1, keepdims=True) * probs  # with respect to the logits
            factors = centering_factors(rule, *tensors)
            found -= self._by_group(drawn.contexts, factors, n, len(probs))[..., None] * expected
        return found.reshape(len(found), -1)

    def _by_group(self, index: NDArray[np.int64], values: Floats, n: int, size: int) -> Floats:
        """(groups, size): mean over a group's responses of the sum of (B, T) values per index."""
        groups = len(values) // n
        group = np.repeat(np.arange(len(values)), self.horizon) // n
        sums: NDArray[Any] = np.bincount(group * size + index.ravel(), values.ravel() / n, groups * size)
        return sums.reshape(groups, size)

    def moments(self, rule: BenchRule, n: int) -> GradientMoments:
        """See `EnumeratedWorld`; |m|² is corrected for the bias that noise adds to a squared mean."""
        if n not in self._drawn:
            self._drawn[n] = self.sample(n, GROUP_TOKENS // self.horizon)
        gradients = self.group_gradients(rule, self._drawn[n], n)
        groups, mean = len(gradients), gradients.mean(0)
        square = float(np.mean(np.sum(gradients**2, 1)))
        norm = max((groups * float(mean @ mean) - square) / (groups - 1), 0.0)
        inner, signal = float(mean @ self.gradient), float(self.gradient @ self.gradient)
        return GradientMoments(inner, norm, signal, max(norm - 2.0 * inner + signal, 0.0), square - norm)


def length_shares(mismatch: str, size: float, horizon: int, seed: int) -> dict[str, float]:
    """Mean trained tokens per response over the policy's own mean length, per way to treat stale responses.

    `first half to finish`: an asynchronous trainer that uses the shorter half of the sampled responses.
    """
    world = LearnedWorld(seed, mismatch, size, horizon)
    drawn = world.sample(8, LENGTH_GROUPS)
    lengths = drawn.mask.sum(1).astype(float)
    tables = (world.train - world.rollout)[drawn.contexts, drawn.tokens]
    log_ratio = np.where(drawn.mask, tables, 0.0)
    ratio = np.exp(log_ratio.sum(1))
    wanted = world.sample(8, LENGTH_GROUPS, of=world.train).mask.sum(1).mean()
    inside = (ratio >= 0.5) & (ratio <= 2.0)
    kept = drawn.mask & (np.abs(log_ratio) <= np.log(2.0))
    found = {
        "unchanged": lengths.mean(),
        "responses with Π ρ outside 0.5–2 discarded": lengths[inside].mean() if inside.any() else 0.0,
        "tokens with ρ outside 0.5–2 masked": kept.sum(1).mean(),
        "weighted by Π ρ": (ratio * lengths).sum() / ratio.sum(),
        "first half to finish": np.sort(lengths)[: len(lengths) // 2].mean(),
    }
    return {name: float(value / wanted) for name, value in found.items()}
