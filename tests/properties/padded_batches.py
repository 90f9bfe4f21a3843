"""Small hostile batches as padded rows: ragged, with an empty row, a single token, holes, NaN in the padding.

The slow references read rows; `corrected` flattens them for `correct`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlctl.algos.correction import Correction, correct, correction_metrics, normalization_factor, normalized
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.segments import Sums, Units, to_host
from tests.properties.batches import drawn_rows


@dataclass(frozen=True)
class Corrected:
    """A correction in padded form; outside the mask weights are 0.0, and tokens are not kept."""

    weights: Tensor  # (B, T)
    keep_mask: Tensor  # (B, T)
    nonfinite: Tensor  # (B,)
    saturated: Tensor  # (B,)
    sums: Sums


def corrected(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    rules: CorrectionRules,
    **columns: Tensor | None,
) -> Corrected:
    """`correct` of padded rows (B, T); further columns (B, T), or (B,) of all tokens of a row."""
    lengths = mask.sum(1)
    flat = {
        name: x if x is None else (x[mask] if x.ndim == 2 else x.repeat_interleave(lengths))
        for name, x in columns.items()
    }
    found = correct(log_probs[mask], rollout_log_probs[mask], Units.of_responses(lengths), rules, **flat)
    weights = torch.zeros(mask.shape).masked_scatter(mask, found.weights)
    keep = torch.zeros_like(mask).masked_scatter(mask, found.keep)
    return Corrected(weights, keep, found.nonfinite, found.saturated, found.sums)


@dataclass(frozen=True)
class Batch:
    """What a correction reads, all (B, T)."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    age: Tensor | None = None  # (B,)

    def select(self, rows) -> Batch:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if x is None else x[rows] for name, x in given.items()})

    def padded(self, columns: int) -> Batch:
        """Further padding columns on the right, filled with NaN."""
        shape = (len(self.mask), columns)
        nan = torch.full(shape, math.nan)
        return Batch(
            torch.cat([self.log_probs, nan], 1),
            torch.cat([self.rollout_log_probs, nan], 1),
            torch.cat([self.mask, torch.zeros(shape, dtype=torch.bool)], 1),
            torch.cat([self.advantages, torch.zeros(shape)], 1),
            self.age,
        )

    def correct(self, rules: CorrectionRules) -> Corrected:
        columns = {"advantages": self.advantages, "age": self.age}
        return corrected(self.log_probs, self.rollout_log_probs, self.mask, rules, **columns)


def make_batch(*args: Any, **options: Any) -> Batch:
    """`drawn_rows` with NaN in the padding."""
    train, rollout, mask, advantages = drawn_rows(*args, **options)
    rows = (x.masked_fill(~mask, math.nan) for x in (train, rollout))
    return Batch(*rows, mask, advantages[:, None] * mask)


def factor_and_metrics(
    correction: Corrected | Correction, rules: CorrectionRules
) -> tuple[float, dict[str, float]]:
    """What one mini-batch logs, from its merged sums."""
    host = to_host(correction.sums)
    factor = normalization_factor(host, rules)
    return factor, correction_metrics(normalized(host, factor, rules), rules)
