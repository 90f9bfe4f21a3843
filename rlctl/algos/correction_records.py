"""Records of rollout correction: ratios, criteria, weights, and the sums from which metrics are computed.

Sums are () float64 tensors on the device (V = Tensor) and floats on the host (V = float). They exclude
sequences without response tokens and, unless a comment says otherwise, those with NaN or infinite log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Generic

import torch
from torch import Tensor

from rlctl.algos.metric_sums import LARGEST, Additive, Moments, V, ratio


@dataclass(frozen=True)
class LogRatio:
    """log ρ of a batch, the input of weights and criteria. Rows that are not `finite` are meaningless."""

    token: Tensor  # (B, T) float32, log ρ_t clamped to ±20; 0.0 outside the mask
    sequence: Tensor  # (B, 1) float64, Σ_t log ρ_t, not clamped
    length: Tensor  # (B, 1) float64, number of response tokens
    finite: Tensor  # (B, 1) bool: has response tokens, and none with a NaN or infinite log-prob
    mask: Tensor  # (B, T) bool, the response tokens
    train: Tensor  # (B, T) log π_train, 0.0 outside the mask
    rollout: Tensor  # (B, T) log π_rollout, 0.0 outside the mask
    advantages: Tensor | None  # (B, T), 0.0 outside the mask; set if it is needed
    age: Tensor | None  # (B,) optimizer updates since the weights that sampled it; set if it is needed

    @property
    def mean(self) -> Tensor:
        """(B, 1) float64: log of the geometric mean of ρ."""
        return self.sequence / self.length.clamp(min=1)

    @cached_property
    def response(self) -> Tensor:
        """(B, T) float32: 1 on response tokens, else 0; multiplying by it is faster than masking."""
        return self.mask.view(torch.uint8).float()

    @cached_property
    def ratio(self) -> Tensor:
        """(B, T): ρ, 1.0 outside the mask."""
        return self.token.exp()

    @cached_property
    def excess(self) -> Tensor:
        """(B, T): ρ − 1, exact where ρ is near 1; 0.0 outside the mask."""
        return self.token.expm1()

    def copied(self) -> LogRatio:
        """A copy whose tensors can be changed."""
        given = {part.name: getattr(self, part.name) for part in fields(self)}
        return replace(self, **{name: x.clone() for name, x in given.items() if x is not None})


@dataclass(frozen=True, slots=True)
class Weights:
    """Importance weights before normalisation: (B, T) float32 at token level, else (B, 1) float64."""

    log: Tensor  # log of the raw weight, before the clamp
    raw: Tensor
    bounded: Tensor


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """Result of one criterion; (B, T) if it compares tokens, (B, 1) if it compares sequences."""

    values: Tensor  # its statistic
    num_above: Tensor  # (B, 1): number of values over the upper bound
    num_below: Tensor  # (B, 1): number of values under the lower bound
    rejected: Tensor  # bool (B, T) or (B, 1): rejected tokens or sequences


@dataclass(frozen=True, slots=True)
class TokenWeightRows(Additive):
    """Per-row sums of token weights; tensors are (B,)."""

    raw: Moments[Tensor]
    described: Moments[Tensor]  # of the weights that `rollout_is_*` metrics describe
    above: Tensor  # tokens over the upper bound
    below: Tensor
    normalizer: Tensor  # Σ of the weights whose mean is the normalisation factor


@dataclass(frozen=True, slots=True)
class SequenceWeightRows(Additive):
    """Sequence weight of each row; fields are (B,)."""

    raw: Tensor
    excess: Tensor  # raw − 1
    bounded: Tensor


@dataclass(frozen=True, slots=True)
class CriterionRows(Additive):
    """Sums of one criterion in each row; tensors are (B,)."""

    values: Moments[Tensor]  # of its statistic, per token or one value of the sequence
    above: Tensor
    below: Tensor
    rejected: Tensor | None  # whether the whole sequence is rejected; None: tokens are rejected separately
    clamped: Tensor  # Σ over tokens of the statistic clamped to the bounds, for a metric convention; else 0
    clamped_squares: Tensor


@dataclass(frozen=True, slots=True)
class RowSums(Additive):
    """Per-row sums from which all metrics are computed; tensors are (B,).

    In rows that are not `finite` only `length` and `kept` (0) are meaningful. Moments are over tokens, unless
    a comment says otherwise.
    """

    finite: Tensor  # 1 or 0
    length: Tensor
    kept: Tensor  # tokens
    sequence: Tensor  # Σ log ρ, not clamped
    train: Tensor  # Σ log π_train
    clamped: Tensor  # Σ of the clamped log ρ
    excess: Tensor  # Σ (ρ − 1)
    excess_squares: Tensor
    ratio: Moments[Tensor] | None  # of ρ; None if there are weights
    weights: TokenWeightRows | SequenceWeightRows | None
    criteria: tuple[CriterionRows, ...]
    probabilities: ProbabilitySums[Tensor]


@dataclass(frozen=True, slots=True)
class UnitMoments(Additive, Generic[V]):
    """Moments of weights per token and per sequence."""

    token: Moments[V]
    sequence: Moments[V]  # of sequence weights; at token level, of each sequence's mean token weight


@dataclass(frozen=True, slots=True)
class GapSums(Additive, Generic[V]):
    """Distances between the two policies, independent of the rules."""

    log_ratio: V  # Σ_tokens log ρ
    k3: V  # Σ_tokens ρ − 1 − log ρ
    chi2_token: V  # Σ_tokens ρ² − 1
    chi2_sequence: V  # Σ_sequences (Π ρ)² − 1
    training_log_ppl: V  # Σ_sequences of −mean log π_train, and its exp
    training_ppl: V
    rollout_log_ppl: V
    rollout_ppl: V
    log_ppl_abs_diff: V
    ppl_ratio: V
    log_ppl_diff: Moments[V]


@dataclass(frozen=True, slots=True)
class ProbabilitySums(Additive, Generic[V]):
    """Sums over sampled tokens of their probabilities p and p²."""

    train: V
    train_squares: V
    rollout: V
    rollout_squares: V
    gap: V  # Σ |π_train − π_rollout|
    gap_squares: V
    gap_max: V = field(metadata=LARGEST)


@dataclass(frozen=True, slots=True)
class WeightSums(Additive, Generic[V]):
    """Sums of the importance weights and of the bound's effect on them."""

    described: UnitMoments[V]  # after bound and rejection; rejected and non-finite weights are 0
    above: V  # raw weights over the upper bound: tokens at token level, else sequences
    below: V
    sequences_above: V  # sequences whose mean raw weight is over the upper bound
    sequences_below: V
    normalizer: V  # Σ of the weights whose mean is the normalisation factor
    normalizer_count: V

    @property
    def normalizer_mean(self: WeightSums[float]) -> float:
        """Mean weight; 0.0 if the count is 0."""
        return ratio(self.normalizer, self.normalizer_count)


@dataclass(frozen=True, slots=True)
class CriterionSums(Additive, Generic[V]):
    """Sums of one rejection criterion, independent of the other criteria."""

    values: Moments[V]  # of its statistic
    above: V
    below: V
    masked_tokens: V  # rejected by this criterion
    masked_sequences: V
    token_total: V  # Σ over tokens of the statistic; a sequence's statistic counts once per token
    clamped: V  # the same with the statistic clamped to the bounds, if the convention needs it (else 0)
    clamped_squares: V


@dataclass(frozen=True, slots=True)
class CorrectionSums(Additive, Generic[V]):
    """All sums from which the metrics and denominators of a mini-batch are computed."""

    tokens: V  # including those of non-finite sequences
    sequences: V
    finite_tokens: V
    finite_sequences: V
    kept_tokens: V
    kept_sequences: V  # with a kept token
    rejected_sequences: V  # with a rejected token, including non-finite sequences
    saturated: V  # sequences with |Σ log ρ| ≥ 20
    gap: GapSums[V]
    probabilities: ProbabilitySums[V]
    raw: UnitMoments[V]  # of weights before bound, rejection and normalisation; of ρ_t without a level
    weights: WeightSums[V] | None
    criteria: tuple[CriterionSums[V], ...]


@dataclass(frozen=True)
class Correction:
    """Result of rollout correction on a mini-batch or a part of one.

    Attributes:
        weights: (B, T) float32, detached: after the bound, 0.0 where rejected, **not yet normalised** (the
            factor is computed over the whole mini-batch, see `normalization_factor`). None if the rule has no
            level.
        keep_mask: (B, T) bool, response tokens that are not rejected.
        nonfinite: (B,) bool, sequences with a NaN or infinite log-prob (always rejected).
        saturated: (B,) bool, sequences with |Σ log ρ| ≥ 20.
        by_row: the sums of each row; fields are (B,).
    """

    weights: Tensor | None
    keep_mask: Tensor
    nonfinite: Tensor
    saturated: Tensor
    by_row: CorrectionSums[Tensor]

    @cached_property
    def sums(self) -> CorrectionSums[Tensor]:
        """The sums of all rows, from which metrics and denominators are computed."""
        return self.by_row.over_rows()
