"""Applies every setting of a grid to the responses of a replay, with training's correction functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlctl.algos.correction import correct, masked_log_ratio, normalization_factor
from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.row_blocks import Extras, clamped_exp, evaluated
from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.algos.statistics import normalized
from rlctl.registry import CORRECTION_WEIGHTS
from rlctl.what_if.chunks import pad, whole_groups
from rlctl.what_if.moments import BLOCKS, Chunk, Floats, ScoreMoments, StepMoments, Tokens
from rlctl.what_if.step import Step

_EXACT = CorrectionRules(WeightRule("sequence", "truncate", upper=1e9))


class SettingSums:
    """Sums of all steps so far, for R different rules."""

    def __init__(self, rules: list[CorrectionRules]) -> None:
        self.rules = rules
        self.moments = ScoreMoments(len(rules))
        #: (R, 2, 3, K): raw and applied weights; n, Σw, Σw² over tokens or sequences, depending on the rule.
        self.kish = np.zeros((len(rules), 2, 3, BLOCKS))
        self.corrections: list[CorrectionSums[float]] = []
        self.num_steps = 0
        self.notes: list[str] = []

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
        assert exact.weights is not None  # the exact rule has a level
        clean = _without(chunk, exact.nonfinite)
        tokens = Tokens(clean, exact.weights[:, 0].double())
        tokens.once(self.moments)
        found = []
        for place, rule in enumerate(self.rules):
            done = correct(chunk.log_probs, chunk.rollout_log_probs, chunk.mask, rule, advantages=per_token)
            weights = done.keep_mask.float() if done.weights is None else done.weights
            tokens.weighted(part, place, weights)
            kish[place] += _kish(clean, rule.weight, weights)
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


def _kish(chunk: Chunk, rule: WeightRule, weights: Tensor) -> Floats:
    """(2, 3, K): n, Σw, Σw² of raw and applied weights, over tokens or over sequences."""
    mask = chunk.mask
    per_token = chunk.advantages[:, None].expand(mask.shape).float()
    log_ratio = masked_log_ratio(chunk.log_probs, chunk.rollout_log_probs, mask, Extras(per_token))
    raw = clamped_exp(evaluated(CORRECTION_WEIGHTS, rule.level or "token", log_ratio, rule.params))
    if rule.by_token:
        counts, values = mask.sum(-1), (raw * mask, weights * mask)
    else:
        counts = mask.any(-1)
        values = (raw * counts[:, None], torch.where(mask, weights, 0.0).amax(-1, keepdim=True))
    result = np.zeros((2, 3, BLOCKS))
    for place, found in enumerate(values):
        sums = (counts, found.double().sum(-1), found.double().square().sum(-1))
        for row, one in enumerate(sums):
            result[place, row] = torch.bincount(chunk.blocks, weights=one, minlength=BLOCKS).numpy()
    return result
