"""Aggregation of per-token losses to one number, with denominators of the whole mini-batch.

The mean of micro-batch means is not the mean: tokens of short micro-batches would weigh more. Every mode is
therefore a sum over tokens of loss × coefficient. The coefficients use counts over the whole mini-batch on
all ranks, so the parts' sums add up to the same number for any division of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over a whole mini-batch: all of its micro-batches, on all ranks.

    Attributes:
        num_tokens: response tokens in the denominator.
        num_sequences: responses with at least one such token.
    """

    num_tokens: float
    num_sequences: float


def aggregate(
    values: Tensor, denominator_mask: Tensor, denominators: Denominators, mode: AggMode, *, horizon: int
) -> Tensor:
    """This part's share of the mini-batch loss, a () tensor.

    Args:
        values: (B, T) per-token losses, 0.0 outside the loss mask.
        denominator_mask: (B, T) bool, the tokens that the denominators count.
        denominators: counts of the whole mini-batch.
        mode: `token-mean` Σ/tokens (DAPO); `seq-mean-token-sum` Σ/sequences; `seq-mean-token-mean`
            mean over sequences of each sequence's mean (GRPO); `seq-mean-token-sum-norm`
            Σ/(sequences · horizon) (Dr. GRPO).
        horizon: the constant length of `seq-mean-token-sum-norm`, `data.max_response_length`.
    """
    if mode == "token-mean":
        return values.sum() / max(denominators.num_tokens, 1.0)
    num_sequences = max(denominators.num_sequences, 1.0)
    if mode == "seq-mean-token-sum":
        return values.sum() / num_sequences
    if mode == "seq-mean-token-mean":
        lengths = denominator_mask.sum(-1).clamp(min=1)
        return (values.sum(-1) / lengths).sum() / num_sequences
    return values.sum() / (num_sequences * horizon)
