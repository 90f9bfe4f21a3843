"""Applies every setting of a grid to the responses of a replay, with training's correction functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.estimators import AdvantageInputs
from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.algos.statistics import normalized
from rlctl.algos.token_advantages import whiten
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.what_if.dumps import Step
from rlctl.what_if.moments import BLOCKS, Chunk, Floats, ScoreMoments, StepMoments, Tokens, pad, whole_groups

#: Maximum number of tokens of pooled steps.
POOL_TOKENS = 1 << 22
#: Estimators with one advantage per response, computed from rewards and lengths.
_FROM_REWARDS = ("rloo", "grpo", "dr_grpo", "maxrl", "gpg", "opo")
_EXACT = CorrectionRules(WeightRule("sequence", "truncate", upper=1e9))


def pooled(steps: Iterable[Step], groups: int) -> Iterator[Step]:
    """Merges consecutive steps until they contain `groups` prompt groups or `POOL_TOKENS` tokens."""
    held: list[Step] = []
    for step in steps:
        if not len(step.token_ids):
            continue
        held.append(step)
        count = sum(len(np.unique(one.group_ids)) for one in held)
        if count >= groups or sum(len(one.token_ids) for one in held) >= POOL_TOKENS:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def _merged(steps: list[Step]) -> Step:
    """Merges steps into one; groups of different steps get different ids."""
    if len(steps) == 1:
        return steps[0]
    ids, start = [], 0
    for step in steps:
        _, numbers = np.unique(step.group_ids, return_inverse=True)
        ids.append(numbers + start)
        start += int(numbers.max()) + 1
    masks = [np.ones(len(one.token_ids), np.bool_) if one.mask is None else one.mask for one in steps]
    names = ("rewards", "lengths", "token_ids", "rollout_log_probs", "log_probs", "advantages")
    joined = {name: np.concatenate([getattr(one, name) for one in steps]) for name in names}
    return Step(steps[0].number, np.concatenate(ids), mask=np.concatenate(masks), **joined)


def advantages_of(step: Step, estimator: str, notes: list[str]) -> NDArray[np.float64]:
    """(B,) one advantage per response: from the dump, otherwise computed from the rewards.

    Uses the run's estimator if it needs nothing else (`_FROM_REWARDS`), otherwise `rloo`. With one response
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
    lengths, rewards = torch.tensor(step.lengths), torch.tensor(step.rewards)
    inputs = AdvantageInputs(
        token_level_rewards=rewards.nan_to_num(0.0)[:, None],
        response_mask=torch.arange(int(step.lengths.max(initial=0))) < lengths[:, None],
        group_ids=groups,
        valid=rewards.isfinite(),
        gamma=1.0,
        lam=1.0,
        divide_by_std=True,
        whiten=whiten,
    )
    return np.asarray(ADVANTAGE_ESTIMATORS[estimator](inputs).double())


class SettingSums:
    """Sums of all steps so far, for R different rules."""

    def __init__(self, rules: list[CorrectionRules]) -> None:
        self.rules = rules
        self.moments = ScoreMoments(len(rules))
        #: (R, 2, 3, K): raw and applied weights; n, Σw, Σw² over tokens or sequences, depending on the rule.
        self.kish = np.zeros((len(rules), 2, 3, BLOCKS))
        self.corrections: list[CorrectionSums[float]] = []

    def add(self, batch: Step) -> None:
        """Adds rows with advantages as one mini-batch."""
        part, kish = StepMoments(len(self.rules)), np.zeros_like(self.kish)
        found: list[CorrectionSums[float]] = []
        first = int(self.moments.counts[0].sum())  # number of this batch's first group
        for rows, groups in whole_groups(batch):
            blocks = (first + groups) % BLOCKS
            padded = pad(batch, rows, groups - groups.min(), blocks)
            chunk = self._chunk(padded, part, kish)
            found = [a + b for a, b in zip(found, chunk, strict=True)] if found else chunk
        factors = [normalization_factor(one, rule) for one, rule in zip(found, self.rules, strict=True)]
        self.moments.add_step(part, factors)
        scale = 1.0 / np.asarray(factors)[:, None]
        kish[:, 1, 1] *= scale
        kish[:, 1, 2] *= scale**2
        self.kish += kish
        logged = [normalized(*each) for each in zip(found, factors, self.rules, strict=True)]
        if self.corrections:
            logged = [a + b for a, b in zip(self.corrections, logged, strict=True)]
        self.corrections = logged

    def _chunk(self, chunk: Chunk, part: StepMoments, kish: Floats) -> list[CorrectionSums[float]]:
        """Applies every rule to a chunk; returns the correction sums per rule."""
        per_token = chunk.advantages[:, None].expand(chunk.mask.shape).float()
        exact = correct(chunk.log_probs, chunk.rollout_log_probs, chunk.mask, _EXACT)
        clean = _without(chunk, exact.nonfinite)
        tokens = Tokens(clean, exact.by_row.raw.sequence.total)
        tokens.once(self.moments)
        found = []
        for place, rule in enumerate(self.rules):
            done = correct(chunk.log_probs, chunk.rollout_log_probs, chunk.mask, rule, advantages=per_token)
            weights = done.keep_mask.float() if done.weights is None else done.weights
            tokens.weighted(part, place, weights)
            kish[place] += _kish(done.by_row, rule.weight, chunk.blocks)
            found.append(done.sums.to_host())
        return found


def _without(chunk: Chunk, nonfinite: Tensor) -> Chunk:
    """Masks the sequences with NaN or infinite log-probs and zeroes their values."""
    mask = chunk.mask & ~nonfinite[:, None]
    return replace(
        chunk,
        log_probs=torch.where(mask, chunk.log_probs, 0.0),
        rollout_log_probs=torch.where(mask, chunk.rollout_log_probs, 0.0),
        mask=mask,
        advantages=torch.where(nonfinite, 0.0, chunk.advantages),
    )


def _kish(rows: CorrectionSums[Tensor], rule: WeightRule, blocks: Tensor) -> Floats:
    """(2, 3, K): n, Σw, Σw² of raw and applied weights, over tokens or over sequences."""
    unit = "token" if rule.by_token else "sequence"
    raw, kept = getattr(rows.raw, unit), rows.kept_tokens
    sums = [raw.count, raw.total, raw.squares, rows.tokens, kept, kept]  # without weights: 1 or 0
    if rows.weights is not None:
        applied = getattr(rows.weights.described, unit)
        sums[3:] = applied.count, applied.total, applied.squares
    found = [torch.bincount(blocks, weights=one, minlength=BLOCKS).numpy() for one in sums]
    return np.stack(found).reshape(2, 3, BLOCKS)
