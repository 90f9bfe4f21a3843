"""Evaluates a grid of settings in one pass over dumped rollouts, with training's correction functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlctl.algos.correction import correct, masked_log_ratio, normalization_factor
from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.row_blocks import Extras, clamped_exp, evaluated
from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.algos.statistics import normalized
from rlctl.errors import UsageError
from rlctl.registry import CORRECTION_WEIGHTS
from rlctl.what_if.chunks import advantages_of, pad, pooled, whole_groups
from rlctl.what_if.moments import BLOCKS, Chunk, Floats, ScoreMoments, StepMoments, Tokens
from rlctl.what_if.settings import Setting
from rlctl.what_if.step import Step
from rlctl.what_if.summary import summarized
from rlctl.what_if.tradeoff import Tradeoff

_NO_WEIGHT = CorrectionRules(WeightRule(None))
_EXACT = CorrectionRules(WeightRule("sequence", "truncate", upper=1e9))


@dataclass(frozen=True, slots=True)
class WhatIfQuestion:
    """Known settings of the replayed run."""

    #: `algorithm.adv_estimator`; computes the advantages if the dump has none
    estimator: str = "rloo"
    #: prompt groups of one optimizer step; None: the mean number per dumped step
    groups_per_batch: int | None = None
    mean_per_sequence: bool = False  # whether the loss first averages over the tokens of each sequence


def replay(steps: Iterable[Step], settings: Sequence[Setting], question: WhatIfQuestion) -> Tradeoff:
    """Evaluates every setting on every step.

    Weights are normalised by their mean over a mini-batch. A dump often contains only a few rows per step, so
    consecutive steps are pooled until they contain as many groups as a mini-batch.

    Args:
        steps: read once; only the steps of one pool are in memory.
        settings: with unique names; equal rules are computed once.
        question: known settings of the run.

    Raises:
        UsageError: no response has finite log-probs of both policies.
    """
    named: dict[CorrectionRules, list[Setting]] = {}
    for setting in settings:
        named.setdefault(setting.rules, []).append(setting)
    rules = [*named, *({_NO_WEIGHT} - named.keys())]
    sums = _SettingSums(rules)
    for batch in pooled(_with_advantages(steps, question, sums), question.groups_per_batch or 1):
        sums.add(batch)
    if not sums.num_sequences:
        raise UsageError("the dump holds no response with finite log-probs of both policies")
    groups = question.groups_per_batch or sums.num_groups / sums.num_steps
    names = [named.get(rule, []) for rule in rules]
    return summarized(sums, names, rules.index(_NO_WEIGHT), groups)


def _with_advantages(steps: Iterable[Step], question: WhatIfQuestion, sums: _SettingSums) -> Iterator[Step]:
    for step in steps:
        found = advantages_of(step, question.estimator, sums.notes)
        if question.mean_per_sequence:
            found = found / np.maximum(step.lengths, 1)
        sums.num_steps += 1
        yield replace(step, advantages=found)


class _SettingSums:
    """Sums of all steps so far, for R rules."""

    def __init__(self, rules: list[CorrectionRules]) -> None:
        self.rules = rules
        self.moments = ScoreMoments(len(rules))
        #: (R, 2, 3, K): raw and applied weights; n, Σw, Σw² over tokens or sequences, depending on the rule.
        self.kish = np.zeros((len(rules), 2, 3, BLOCKS))
        self.corrections: list[CorrectionSums[float]] = []
        self.num_steps = self.num_groups = self.num_sequences = 0
        self.notes: list[str] = []

    def add(self, batch: Step) -> None:
        """Adds rows with advantages as one mini-batch."""
        part, kish = StepMoments(len(self.rules)), np.zeros_like(self.kish)
        found: list[CorrectionSums[float]] = []
        for rows, groups in whole_groups(batch):
            blocks = (self.num_groups + groups) % BLOCKS
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
        self.num_groups += len(np.unique(batch.group_ids))

    def _chunk(self, chunk: Chunk, part: StepMoments, kish: Floats) -> list[CorrectionSums[float]]:
        """Applies every rule to a chunk; returns the correction sums per rule."""
        per_token = chunk.advantages[:, None].expand(chunk.mask.shape).float()
        exact = correct(chunk.log_probs, chunk.rollout_log_probs, chunk.mask, _EXACT)
        if exact.weights is None:
            raise ValueError("the exact rule has a level")
        clean = _without(chunk, exact.nonfinite)
        self.num_sequences += int(clean.mask.any(-1).sum())
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
