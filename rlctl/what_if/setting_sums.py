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
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, WeightRule
from rlctl.algos.segments import Segments, Units, to_host
from rlctl.registry import CORRECTION_WEIGHTS
from rlctl.what_if.dumps import Step
from rlctl.what_if.gradient_error import BLOCKS, Energy, Floats

#: Maximum number of tokens of pooled steps.
POOL_TOKENS = 1 << 22
#: Estimators with one advantage per episode, computed from rewards and lengths.
_FROM_REWARDS = ("rloo", "grpo", "dr_grpo", "maxrl", "gpg", "opo")
_EXACT = CorrectionRules(WeightRule("episode", "truncate", upper=1e9))


def pooled(steps: Iterable[Step], groups: int) -> Iterator[Step]:
    """Merges consecutive steps until they contain `groups` prompt groups or `POOL_TOKENS` tokens."""
    held: list[Step] = []
    for step in steps:
        if not len(step.log_probs):
            continue
        held.append(step)
        count = sum(len(np.unique(one.group_ids)) for one in held)
        if count >= groups or sum(len(one.log_probs) for one in held) >= POOL_TOKENS:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def _merged(steps: list[Step]) -> Step:
    """Merges steps into one; groups of different steps get different ids."""
    ids, start = [], 0
    for step in steps:
        _, numbers = np.unique(step.group_ids, return_inverse=True)
        ids.append(numbers + start)
        start += int(numbers.max()) + 1

    def joined(name: str) -> Any:
        parts = [getattr(one, name) for one in steps]
        return np.concatenate(
            [one.lengths if part is None else part for one, part in zip(steps, parts, strict=True)]
        )

    names = ("rewards", "lengths", "rollout_log_probs", "log_probs", "advantages")
    columns = {name: joined(name) for name in (*names, "sequence_lengths", "turn_lengths")}
    return Step(steps[0].number, np.concatenate(ids), **columns)


def advantages_of(step: Step, estimator: str, notes: list[str]) -> NDArray[np.float64]:
    """(E,) one advantage per episode: from the dump, otherwise computed from the rewards; 0 if it was not
    graded or has no tokens.

    Uses the run's estimator if it needs nothing else (`_FROM_REWARDS`), otherwise `rloo`. With one episode
    per prompt, uses `rloo` over the whole step. Adds a note to `notes` if the estimator is replaced.
    """
    if step.advantages is not None:
        return np.nan_to_num(step.advantages)
    groups = torch.tensor(step.group_ids)
    if len(np.unique(step.group_ids)) == len(step.group_ids):
        notes.append("one response per prompt: advantages are rewards minus the step's mean")
        groups, estimator = torch.zeros_like(groups), "rloo"
    elif estimator not in _FROM_REWARDS:
        notes.append(f"advantages of {estimator} are not in the dump: those of rloo are used")
        estimator = "rloo"
    graded = torch.tensor(np.isfinite(step.rewards) & (step.lengths > 0))
    units = Units.of_responses(torch.tensor(step.lengths)[graded])
    token_rewards = torch.zeros(units.episode.total, dtype=torch.float64)
    token_rewards[units.episode.starts] = torch.tensor(step.rewards)[graded]
    inputs = AdvantageInputs(
        token_rewards=token_rewards,
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

    Attributes:
        energy: from which gradient errors are computed.
        kish: (S, 2, 3, K): raw and applied weights; n, Σw, Σw² over the units of the rule's weight.
        kept: (S, 2): tokens and episodes (with all their tokens) that are not rejected.
        graded: (2,): tokens and episodes with tokens of all that were graded.
        beyond: (S,): weights that the bound changes.
        largest: (S,): the largest weight that reaches the loss.
    """

    def __init__(self, rules: list[CorrectionRules]) -> None:
        self.rules, count = rules, len(rules)
        self.energy = Energy(
            np.zeros((count, 4, BLOCKS)), np.zeros((2, BLOCKS)), np.zeros(BLOCKS), np.zeros((3, BLOCKS))
        )
        self.kish = np.zeros((count, 2, 3, BLOCKS))
        self.kept, self.graded = np.zeros((count, 2)), np.zeros(2)
        self.beyond, self.largest = np.zeros(count), np.zeros(count)

    def add(self, batch: Step) -> None:
        """Adds episodes with advantages as one mini-batch; those that were not graded count nowhere."""
        episode = Segments(torch.tensor(batch.lengths))
        finite = episode.sum(torch.tensor(batch.log_probs - batch.rollout_log_probs)).isfinite()
        graded = torch.tensor(np.isfinite(batch.rewards)) & (episode.lengths > 0)
        self.graded += int(episode.lengths[graded].sum()), int(graded.sum())
        chosen = graded & finite  # a response with NaN is rejected by every rule
        if chosen.any():
            self._add(_Tokens(batch, episode, chosen, int(self.energy.counts[0].sum())))

    def _add(self, tokens: _Tokens) -> None:
        sums, units, spread = self.energy, tokens.units, tokens.units.episode.spread
        of_groups = torch.as_tensor(np.unique(tokens.groups) % BLOCKS)
        sums.counts[0] += _by_block(of_groups, torch.ones(len(of_groups)))
        sums.counts[1] += _by_block(tokens.blocks, torch.ones(len(tokens.blocks)))
        sums.counts[2] += _by_block(tokens.blocks, units.episode.lengths)
        sums.product[:] += _by_block(tokens.blocks, tokens.product)
        blocks, product = spread(tokens.blocks), spread(tokens.product)
        exact, halfway = product * tokens.energy, 2.0 / (1.0 + product)
        sums.exact[0] += _by_block(blocks, exact)
        sums.exact[1] += _by_block(blocks, halfway * product * exact)
        for place, rule in enumerate(self.rules):
            done = correct(*tokens.policies, units, rule, advantages=tokens.advantages)
            factor = normalization_factor(to_host(done.sums), rule)
            weights = (done.keep if done.weights is None else done.weights).double() / factor
            first = weights * tokens.energy
            for row, values in enumerate(
                (first, weights * first, halfway * weights * first, halfway * weights * exact)
            ):
                sums.weighted[place, row] += _by_block(blocks, values)
            self.kept[place] += int(done.keep.sum()), int((~units.episode.any(~done.keep)).sum())
            self.largest[place] = max(self.largest[place], float(weights.max()))
            raw, applied, of_units = tokens.ratio if done.raw is None else done.raw, weights, blocks
            if done.bounded is not None and not rule.weight.by_token:
                level = rule.segments(units, CORRECTION_WEIGHTS.part(str(rule.weight.level)).unit)
                applied, of_units = done.bounded * level.any(done.keep) / factor, blocks[level.starts]
            if done.raw is not None:
                low, high = rule.weight.band()
                self.beyond[place] += int(((raw < low) | (raw > high)).sum())
            for row, values in enumerate((raw, applied)):
                for power in range(3):
                    self.kish[place, row, power] += _by_block(of_units, values.double() ** power)


class _Tokens:
    """The M tokens of the chosen episodes (E,) of a batch, and what all settings read.

    Attributes:
        policies: (M,) log-probs of the trained and the sampling policy, finite.
        groups, blocks: (E,) number of the prompt group over all batches, and its block.
        product: (E,) float64, Π ρ.
        energy: (M,) float64, A²(1 − π)².
    """

    def __init__(self, batch: Step, episode: Segments, chosen: Tensor, first_group: int) -> None:
        inside = episode.spread(chosen)
        _, groups = np.unique(batch.group_ids[chosen.numpy()], return_inverse=True)
        self.groups = first_group + groups
        self.blocks = torch.as_tensor(self.groups % BLOCKS)

        def kept(lengths: NDArray[np.int64] | None) -> Segments:
            left = episode if lengths is None else Segments(torch.tensor(lengths))
            counts = left.kept(inside).lengths
            return Segments(counts[counts > 0])

        self.units = Units(kept(batch.turn_lengths), kept(batch.sequence_lengths), kept(None))
        self.policies = torch.tensor(batch.log_probs)[inside], torch.tensor(batch.rollout_log_probs)[inside]
        assert batch.advantages is not None
        advantages = self.units.episode.spread(torch.tensor(batch.advantages)[chosen])
        self.advantages = advantages.float()
        self.energy = (advantages * torch.expm1(self.policies[0].double())).square()
        done = correct(*self.policies, self.units, _EXACT)
        assert done.raw is not None
        self.product = done.raw
        self.ratio = (self.policies[0] - self.policies[1]).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def _by_block(blocks: Tensor, values: Tensor) -> Floats:
    """(K,): sums of values per block."""
    found: Floats = torch.bincount(blocks, weights=values.double(), minlength=BLOCKS).numpy()
    return found
