"""What a setting truly does in an enumerated world: exact moments of one RLOO group, and samples of it.

The noise of one group is the variance of a U-statistic of degree two (Hoeffding 1948).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.studies.gradients import worlds
from rlctl.algos.correction import correct
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.segments import Units
from rlctl.what_if.dumps import Step

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


class World(worlds.World):
    """With exact moments and samples."""

    def truth(self, rules: CorrectionRules) -> Truth:
        """Exact moments of the group gradient under these rules (not normalised)."""
        mask = np.broadcast_to(self.mask, self.log_probs.shape)
        units = Units.of_responses(torch.tensor(mask.sum(2).ravel()))
        both = (torch.tensor(x[mask]).float() for x in (self.log_probs, self.rollout_log_probs))
        done = correct(*both, units, rules)
        weights = np.zeros(self.log_probs.shape)
        weights[mask] = (done.keep if done.weights is None else done.weights).double().numpy()
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

    def draw(self, groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and response of each of so many groups of `GROUP`, as indices."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(self.num_prompts, size=groups)
        share = self.rollout / self.rollout.sum(1, keepdims=True)
        rows = np.concatenate([rng.choice(len(self.ids), GROUP, p=share[q]) for q in prompts])
        return np.repeat(prompts, GROUP), rows

    def sample(self, groups: int, seed: int) -> Step:
        """So many groups of `GROUP` responses, as a dump would hold them."""
        q, rows = self.draw(groups, seed)
        mask = self.mask[rows]
        return Step(
            number=1,
            group_ids=np.arange(groups).repeat(GROUP),
            rewards=self.rewards[q, rows],
            lengths=mask.sum(1),
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
