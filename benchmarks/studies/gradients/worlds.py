"""Pairs of policies small enough to enumerate every response, so that a correction's gradient is exact.

The vocabulary has four tokens; token 0 ends a response; responses have at most `horizon` tokens. The logits
are a linear or one-hidden-layer function of prompt, position and the two previous tokens, with analytic
derivatives.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

VOCABULARY = 4
Floats = NDArray[np.float64]


class World:
    """A pair of policies and rewards.

    Args:
        seed: seed of all random numbers.
        kind: `linear`, or `hidden` for one hidden layer.
        mismatch: `noise` on every context's logits, `temperature`, perturbed `parameters`, or `stale`
            (the trained policy is `size` gradient steps ahead).
        size: size of the mismatch.
        reward: `random`, `sparse` (0 or 1) or `count` of one token.
        prompts, horizon: number of prompts, and maximum response length.
        sharpness: factor of all logits; larger values give less entropy.

    Attributes:
        ids, mask: (Y, T) all responses, the same for every prompt.
        rewards: (prompts, Y).
        log_probs, rollout_log_probs: (prompts, Y, T), 0.0 outside the mask.
        train, rollout: (prompts, Y) probabilities of the responses.
        scores: (prompts, Y, T, P) ∇ log π_train of every token.
    """

    def __init__(
        self,
        seed: int,
        kind: str,
        mismatch: str,
        size: float,
        reward: str,
        *,
        prompts: int = 3,
        horizon: int = 5,
        sharpness: float = 1.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.num_prompts, self.horizon = prompts, horizon
        self._enumerate()
        features = self._features()
        width = 12 if kind == "hidden" else 0
        shapes = [(features.shape[-1], width), (width, VOCABULARY)] if width else [(features.shape[-1], 4)]
        params = [rng.normal(size=shape) * (0.8 if width else 0.6) for shape in shapes]
        params[-1] = params[-1] * sharpness
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
        self.log_probs = self._of_responses(log_softmax(_logits(train, features), -1))
        self.rollout_log_probs = self._of_responses(log_softmax(logits, -1))
        self.rollout = np.exp(self.rollout_log_probs.sum(-1))
        self.train = np.exp(self.log_probs.sum(-1))
        self.scores = self._scores(train, features)

    def _enumerate(self) -> None:
        responses: list[list[int]] = []
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

    def _features(self) -> Floats:
        """(prompts, contexts, F) one-hot prompt, previous token, second previous token, position."""
        start = self.num_prompts
        rows = np.zeros((self.num_prompts, len(self._keys), start + 2 * 5 + self.horizon))
        for prompt, (place, key) in itertools.product(range(self.num_prompts), enumerate(self._keys)):
            before = [*reversed(key), 4, 4]
            for column in (prompt, start + before[0], start + 5 + before[1], start + 10 + len(key)):
                rows[prompt, place, column] = 1.0
        return rows

    def _rewards(self, rng: np.random.Generator, kind: str) -> Floats:
        if kind == "count":
            counts = [((self.ids == 1 + q % 3) & self.mask).sum(1) for q in range(self.num_prompts)]
            counted: Floats = np.stack(counts) / 3.0 + 0.5 * (self.mask.sum(1) > 3)
            return counted
        rewards = rng.normal(size=(self.num_prompts, len(self.ids)))
        return (rewards > 1.0).astype(float) if kind == "sparse" else rewards

    def _of_responses(self, table: Floats) -> Floats:
        """Gathers (prompts, responses, T) from (prompts, contexts, V)."""
        return np.where(self.mask, table[:, self.contexts, self.ids], 0.0)

    def _scores(self, params: list[Floats], features: Floats) -> Floats:
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
        probabilities = np.exp(log_softmax(_logits(params, features), -1))
        mean = np.einsum("qcv,qcvp->qcp", probabilities, jacobian)
        scores = (jacobian - mean[:, :, None])[:, self.contexts, self.ids]
        masked: Floats = scores * self.mask[..., None]
        return masked

    def _improved(self, params: list[Floats], features: Floats) -> list[Floats]:
        """Parameters after one normalised step of exact gradient ascent."""
        log_probs = self._of_responses(log_softmax(_logits(params, features), -1))
        share = np.exp(log_probs.sum(-1))
        advantages = self.rewards - (share * self.rewards).sum(1, keepdims=True)
        gradient = np.einsum("qy,qytp->p", share * advantages, self._scores(params, features))
        step = 0.3 * gradient / np.linalg.norm(gradient)
        cuts = np.cumsum([p.size for p in params])[:-1]
        return [p + part.reshape(p.shape) for p, part in zip(params, np.split(step, cuts), strict=True)]


def _logits(params: list[Floats], features: Floats) -> Floats:
    return np.tanh(features @ params[0]) @ params[1] if len(params) == 2 else features @ params[0]
