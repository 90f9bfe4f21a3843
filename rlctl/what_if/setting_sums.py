"""Applies every setting of a grid to the episodes of a replay, with training's correction functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.estimators import AdvantageInputs, estimate
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules
from rlctl.algos.segments import Segments, Units, to_host
from rlctl.registry import CORRECTION_WEIGHTS
from rlctl.what_if.dumps import Step

Floats = NDArray[np.float64]

#: Groups are divided into this many blocks; resampling blocks gives intervals.
BLOCKS = 32
#: Maximum number of tokens of pooled steps.
POOL_TOKENS = 1 << 22
#: Estimators with one advantage per episode, computed from rewards and lengths.
_FROM_REWARDS = ("rloo", "grpo", "dr_grpo", "maxrl", "gpg", "opo")


def pooled(steps: Iterable[Step], groups: int) -> Iterator[Step]:
    """Merges consecutive steps until they contain `groups` prompt groups or `POOL_TOKENS` tokens."""
    held: list[Step] = []
    for step in steps:
        held.append(step)
        count = sum(len(np.unique(one.group_ids)) for one in held)
        if count >= groups or sum(len(one.log_probs) for one in held) >= POOL_TOKENS:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def _merged(steps: list[Step]) -> Step:
    """Merges steps into one; groups of different steps get different ids."""
    keys = [(number, group) for number, step in enumerate(steps) for group in step.group_ids.tolist()]
    _, group_ids = np.unique(np.array(keys), axis=0, return_inverse=True)

    def joined(name: str) -> Any:
        parts = ((getattr(step, name), step.lengths) for step in steps)
        return np.concatenate([lengths if part is None else part for part, lengths in parts])

    names = ("rewards", "lengths", "rollout_log_probs", "log_probs", "advantages")
    columns = {name: joined(name) for name in (*names, "sequence_lengths", "turn_lengths")}
    return Step(steps[0].number, group_ids, **columns)


def advantages_of(step: Step, estimator: str, notes: list[str]) -> NDArray[np.float64]:
    """(E,) one advantage per episode, from the rewards; 0 if it was not graded or has no tokens.

    Uses the run's estimator if it needs nothing else (`_FROM_REWARDS`), otherwise `rloo`. With one episode
    per prompt, uses `rloo` over the whole step. Adds a note to `notes` if the estimator is replaced.
    """
    if step.advantages is not None:
        return np.nan_to_num(step.advantages)
    groups = torch.tensor(step.group_ids)
    if len(np.unique(step.group_ids)) == len(step.group_ids):
        notes.append("one response per prompt: advantages are rewards minus the step's mean")
        groups = torch.zeros_like(groups)
        estimator = "rloo"
    elif estimator not in _FROM_REWARDS:
        notes.append(f"advantages of {estimator} are not in the dump: those of rloo are used")
        estimator = "rloo"
    graded = torch.tensor(np.isfinite(step.rewards) & (step.lengths > 0))
    units = Units.of_responses(torch.tensor(step.lengths)[graded])
    token_rewards = torch.zeros(units.episode.total, dtype=torch.float64)
    rewards = torch.tensor(step.rewards)[graded]
    token_rewards[units.episode.starts] = rewards
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
        rewards=rewards,
        units=units,
        group_ids=groups[graded],
        gamma=1.0,
        lam=1.0,
        divide_by_std=True,
    )
    found = np.zeros(len(step.rewards))
    found[graded.numpy()] = estimate(estimator, inputs).advantages[units.episode.starts].double().numpy()
    return found


class SettingSums:
    """Sums of all steps so far, for S different rules and K blocks of groups.

    e = A²(1 − π)² is the energy of a token, W = Π ρ of its episode, q = 2/(1 + W).

    Attributes:
        weighted: (S, 4, K): Σ w·e, Σ w²·e, Σ q·w²·e, Σ q·w·W·e.
        exact: (2, K): Σ W·e, Σ q·W²·e.
        product: (K,): Σ W over episodes.
        counts: (3, K): groups, episodes and tokens.
        kish: (S, 2, 3): raw and applied weights; n, Σw, Σw² over the units of the rule's weight.
        kept: (S, 2): tokens and episodes (with all their tokens) that are not rejected.
        graded: (2,): tokens and episodes with tokens of all that were graded.
        beyond: (S,): weights that the bound changes.
        largest: (S,): the largest weight that reaches the loss.
    """

    def __init__(self, rules: list[CorrectionRules]) -> None:
        self.rules = rules
        count = len(rules)
        self.weighted = np.zeros((count, 4, BLOCKS))
        self.exact = np.zeros((2, BLOCKS))
        self.product = np.zeros(BLOCKS)
        self.counts = np.zeros((3, BLOCKS))
        self.kish = np.zeros((count, 2, 3))
        self.kept = np.zeros((count, 2))
        self.graded = np.zeros(2)
        self.beyond = np.zeros(count)
        self.largest = np.zeros(count)

    def add(self, batch: Step) -> None:
        """Adds episodes with advantages as one mini-batch; those that were not graded count nowhere."""
        episode = Segments(torch.tensor(batch.lengths))
        finite = episode.sum(torch.tensor(batch.log_probs - batch.rollout_log_probs)).isfinite()
        graded = torch.tensor(np.isfinite(batch.rewards)) & (episode.lengths > 0)
        self.graded += int(episode.lengths[graded].sum()), int(graded.sum())
        chosen = graded & finite  # a response with NaN is rejected by every rule
        if not chosen.any():
            return
        inside = episode.spread(chosen)

        def kept(lengths: NDArray[np.int64] | None) -> Segments:
            counts = (episode if lengths is None else Segments(torch.tensor(lengths))).kept(inside).lengths
            return Segments(counts[counts > 0])

        units = Units(kept(batch.turn_lengths), kept(batch.sequence_lengths), kept(None))
        policies = torch.tensor(batch.log_probs)[inside], torch.tensor(batch.rollout_log_probs)[inside]
        assert batch.advantages is not None
        advantages = units.episode.spread(torch.tensor(batch.advantages)[chosen])
        energy = (advantages * torch.expm1(policies[0].double())).square()
        log_ratio = (policies[0] - policies[1]).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
        of_episodes = units.episode.sum(log_ratio).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()

        _, groups = np.unique(batch.group_ids[chosen.numpy()], return_inverse=True)
        block_of = (int(self.counts[0].sum()) + np.arange(groups.max() + 1)) % BLOCKS
        in_block = torch.as_tensor(block_of[groups])
        self.counts[0] += np.bincount(block_of, minlength=BLOCKS)
        self.counts[1] += _by_block(in_block, torch.ones(len(in_block)))
        self.counts[2] += _by_block(in_block, units.episode.lengths)
        self.product += _by_block(in_block, of_episodes)
        blocks = units.episode.spread(in_block)
        product = units.episode.spread(of_episodes)
        exact = product * energy
        halfway = 2.0 / (1.0 + product)
        self.exact[0] += _by_block(blocks, exact)
        self.exact[1] += _by_block(blocks, halfway * product * exact)
        for index, rule in enumerate(self.rules):
            done = correct(*policies, units, rule, advantages=advantages.float())
            factor = normalization_factor(to_host(done.sums), rule)
            weights = done.weights.double() / factor
            first = weights * energy
            sums = (first, weights * first, halfway * weights * first, halfway * weights * exact)
            self.weighted[index] += [_by_block(blocks, values) for values in sums]
            self.kept[index] += int(done.keep.sum()), int((~units.episode.any(~done.keep)).sum())
            self.largest[index] = max(self.largest[index], float(weights.max()))
            assert done.raw is not None
            assert done.bounded is not None
            raw = done.raw
            applied = weights
            if not rule.weight.by_token:
                level = rule.segments(units, CORRECTION_WEIGHTS.part(str(rule.weight.level)).unit)
                applied = done.bounded * level.any(done.keep) / factor
            if rule.weight.level is not None:
                low, high = rule.weight.band()
                self.beyond[index] += int(((raw < low) | (raw > high)).sum())
            for row, values in enumerate((raw.double(), applied.double())):
                self.kish[index, row] += len(values), float(values.sum()), float(values.square().sum())


def _by_block(blocks: Tensor, values: Tensor) -> Floats:
    """(K,): sums of values per block."""
    floats: Floats = torch.bincount(blocks, weights=values.double(), minlength=BLOCKS).numpy()
    return floats
