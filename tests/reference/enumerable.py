"""Two policies small enough to enumerate every response: what a correction setting truly does.

Four tokens, token 0 ends, at most `horizon` positions, a few prompts. The logits are a linear or
one-hidden-layer function of prompt, position and the two tokens before; all derivatives are written
down. Everything about a setting then follows by summing over all responses: the gradient it expects,
and the noise of one RLOO group by the variance of a U-statistic of degree two (Hoeffding 1948).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from rlctl.algos.correction import correct
from rlctl.algos.rules import CorrectionRules
from rlctl.what_if.step import Step

VOCABULARY = 4
GROUP = 8


@dataclass(frozen=True)
class Truth:
    """Exact moments of one setting, with |g|² = `signal`.

    `inner` = m·g, `norm` = |m|², `noise` = V of one group, `distance` = |m − g|².
    """

    inner: float
    norm: float
    noise: float
    distance: float
    signal: float

    def error(self, groups: float) -> float:
        """Relative error of a mini-batch of so many groups, at the gradient's own best scale."""
        total = self.norm + self.noise / groups
        return 1.0 - max(self.inner, 0.0) ** 2 / (total * self.signal) if total > 0 else 1.0

    def plain_error(self, groups: float) -> float:
        """Relative mean-squared error."""
        return (self.distance + self.noise / groups) / self.signal


class World:
    """A pair of policies and rewards.

    Args:
        seed: of everything.
        kind: `linear` or `hidden` layer.
        mismatch: `noise` on every context's logits, `temperature`, `parameters` perturbed, or `stale`
            (the trained policy has made `size` gradient steps since).
        size: of the mismatch.
        reward: `random`, `sparse` (0 or 1) or `count` of one token.
    """

    def __init__(
        self, seed: int, kind: str, mismatch: str, size: float, reward: str, *, prompts=3, horizon=5
    ) -> None:
        rng = np.random.default_rng(seed)
        self.num_prompts, self.horizon = prompts, horizon
        self._enumerate()
        features = self._features()
        width = 12 if kind == "hidden" else 0
        shapes = [(features.shape[-1], width), (width, VOCABULARY)] if width else [(features.shape[-1], 4)]
        params = [rng.normal(size=shape) * (0.8 if width else 0.6) for shape in shapes]
        self.rewards = self._rewards(rng, reward)
        train, rollout = params, params
        if mismatch == "parameters":
            rollout = [p + size * p.std() * rng.normal(size=p.shape) for p in params]
        if mismatch == "stale":
            for _ in range(int(size)):
                train = self._improved(train, features)
        logits = _logits(rollout, features)
        if mismatch == "noise":
            logits = logits + size * rng.normal(size=logits.shape)
        if mismatch == "temperature":
            logits = logits * (1.0 - size)
        self.log_probs = self._of_responses(_log_softmax(_logits(train, features)))
        self.rollout_log_probs = self._of_responses(_log_softmax(logits))
        self.rollout = np.exp(self.rollout_log_probs.sum(-1))
        self.train = np.exp(self.log_probs.sum(-1))
        self.scores = self._scores(train, features)

    def _enumerate(self) -> None:
        responses = []
        for length in range(1, self.horizon + 1):
            last = range(VOCABULARY) if length == self.horizon else [0]
            for *body, end in itertools.product(*[range(1, VOCABULARY)] * (length - 1), last):
                responses.append([*body, end])
        contexts: dict[tuple[int, ...], int] = {}
        count = len(responses)
        self.ids = np.zeros((count, self.horizon), np.int64)
        self.mask = np.zeros((count, self.horizon), bool)
        self.contexts = np.zeros((count, self.horizon), np.int64)
        for row, tokens in enumerate(responses):
            self.ids[row, : len(tokens)], self.mask[row, : len(tokens)] = tokens, True
            for t in range(len(tokens)):
                self.contexts[row, t] = contexts.setdefault(tuple(tokens[:t]), len(contexts))
        self._keys = list(contexts)

    def _features(self) -> np.ndarray:
        """(prompts, contexts, F) one-hot prompt, previous token, the one before, position."""
        start = self.num_prompts
        rows = np.zeros((self.num_prompts, len(self._keys), start + 2 * 5 + self.horizon))
        for prompt, (place, key) in itertools.product(range(self.num_prompts), enumerate(self._keys)):
            before = [*reversed(key), 4, 4]
            for column in (prompt, start + before[0], start + 5 + before[1], start + 10 + len(key)):
                rows[prompt, place, column] = 1.0
        return rows

    def _rewards(self, rng: np.random.Generator, kind: str) -> np.ndarray:
        if kind == "count":
            counts = [((self.ids == 1 + q % 3) & self.mask).sum(1) for q in range(self.num_prompts)]
            return np.stack(counts) / 3.0 + 0.5 * (self.mask.sum(1) > 3)
        rewards = rng.normal(size=(self.num_prompts, len(self.ids)))
        return (rewards > 1.0).astype(float) if kind == "sparse" else rewards

    def _of_responses(self, table: np.ndarray) -> np.ndarray:
        """(prompts, responses, T) from (prompts, contexts, V)."""
        return np.where(self.mask, table[:, self.contexts, self.ids], 0.0)

    def _scores(self, params: list[np.ndarray], features: np.ndarray) -> np.ndarray:
        """(prompts, responses, T, P): ∇ log π of every token."""
        eye = np.eye(VOCABULARY)
        if len(params) == 1:
            jacobian = np.einsum("qcf,uv->qcvfu", features, eye)
            jacobian = jacobian.reshape(*jacobian.shape[:3], -1)
        else:
            hidden = np.tanh(features @ params[0])
            first = np.einsum("qcf,qch,hv->qcvfh", features, 1.0 - hidden**2, params[1])
            second = np.einsum("qch,uv->qcvhu", hidden, eye)
            jacobian = np.concatenate([x.reshape(*x.shape[:3], -1) for x in (first, second)], -1)
        probabilities = np.exp(_log_softmax(_logits(params, features)))
        mean = np.einsum("qcv,qcvp->qcp", probabilities, jacobian)
        scores = (jacobian - mean[:, :, None])[:, self.contexts, self.ids]
        return scores * self.mask[..., None]

    def _improved(self, params: list[np.ndarray], features: np.ndarray) -> list[np.ndarray]:
        """One normalised step up the exact gradient."""
        log_probs = self._of_responses(_log_softmax(_logits(params, features)))
        share = np.exp(log_probs.sum(-1))
        advantages = self.rewards - (share * self.rewards).sum(1, keepdims=True)
        gradient = np.einsum("qy,qytp->p", share * advantages, self._scores(params, features))
        step = 0.3 * gradient / np.linalg.norm(gradient)
        cuts = np.cumsum([p.size for p in params])[:-1]
        return [p + part.reshape(p.shape) for p, part in zip(params, np.split(step, cuts), strict=True)]

    def truth(self, rules: CorrectionRules) -> Truth:
        """Exact moments of the group gradient under these rules (not normalised)."""
        rows = (self.num_prompts * len(self.ids), self.horizon)
        mask = torch.tensor(np.broadcast_to(self.mask, self.log_probs.shape).reshape(rows))
        both = [torch.tensor(x.reshape(rows)).float() for x in (self.log_probs, self.rollout_log_probs)]
        done = correct(*both, mask, rules)
        weights = done.keep_mask.float() if done.weights is None else done.weights
        weights = torch.where(mask, weights, 0.0).double().numpy().reshape(self.log_probs.shape)
        means, squares, targets = [], [], []
        for prompt in range(self.num_prompts):
            weighted = np.einsum("yt,ytp->yp", weights[prompt], self.scores[prompt])
            mean, square = _group(self.rollout[prompt], self.rewards[prompt], weighted)
            plain = self.scores[prompt].sum(1)
            centred = self.rewards[prompt] - self.train[prompt] @ self.rewards[prompt]
            means.append(mean)
            squares.append(square)
            targets.append((self.train[prompt] * centred) @ plain)
        m, g = np.mean(means, 0), np.mean(targets, 0)
        return Truth(m @ g, m @ m, np.mean(squares) - m @ m, (m - g) @ (m - g), g @ g)

    def sample(self, groups: int, seed: int) -> Step:
        """So many groups of `GROUP` responses, as a dump would hold them."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(self.num_prompts, size=groups)
        share = self.rollout / self.rollout.sum(1, keepdims=True)
        rows = np.concatenate([rng.choice(len(self.ids), GROUP, p=share[q]) for q in prompts])
        q, mask = np.repeat(prompts, GROUP), self.mask[rows]
        return Step(
            number=1,
            group_ids=np.arange(groups).repeat(GROUP),
            rewards=self.rewards[q, rows],
            lengths=mask.sum(1),
            token_ids=self.ids[rows][mask],
            rollout_log_probs=self.rollout_log_probs[q, rows][mask].astype(np.float32),
            log_probs=self.log_probs[q, rows][mask].astype(np.float32),
        )


def _group(share: np.ndarray, rewards: np.ndarray, weighted: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean and mean square of one RLOO group's gradient: a U-statistic with kernel ½(u−u')(r−r')."""
    mean_reward, mean_u, mean_both = share @ rewards, share @ weighted, (share * rewards) @ weighted
    mean = mean_both - mean_reward * mean_u
    one = weighted * (rewards - mean_reward)[:, None] - rewards[:, None] * mean_u + mean_both
    first = share @ np.square(0.5 * one - mean).sum(1)
    products = weighted @ weighted.T
    apart = np.diag(products)[:, None] + np.diag(products) - 2.0 * products
    second = 0.25 * share @ (apart * np.square(rewards[:, None] - rewards)) @ share - mean @ mean
    variance = 2.0 / (GROUP * (GROUP - 1)) * (2.0 * (GROUP - 2) * first + second)
    return mean, float(variance + mean @ mean)


def _logits(params: list[np.ndarray], features: np.ndarray) -> np.ndarray:
    return np.tanh(features @ params[0]) @ params[1] if len(params) == 2 else features @ params[0]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
