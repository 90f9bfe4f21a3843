"""What rollout correction passes on: ratios, criteria, weights, and the sums its metrics follow from.

Sums are () float64 tensors (V = Tensor) and, merged and brought to the host, floats (V = float). Sequences
without response tokens count nowhere; those with NaN or infinite log-probs only where a comment says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

from torch import Tensor

from rlctl.algos.metric_sums import LARGEST, Additive, Moments, V, ratio


@dataclass(frozen=True)
class LogRatio:
    """log ρ of a batch: what weights and criteria read. Rows that are not `finite` hold no meaning."""

    token: Tensor  # (B, T) float32, clamped to ±20; 0.0 outside the mask
    sequence: Tensor  # (B, 1) float64, Σ_t log ρ_t, not clamped
    length: Tensor  # (B, 1) float64, response tokens
    finite: Tensor  # (B, 1) bool: has response tokens, and none with a NaN or infinite log-prob
    mask: Tensor  # (B, T) bool
    train: Tensor  # (B, T) log π_train, 0.0 outside the mask
    rollout: Tensor  # (B, T) log π_rollout, 0.0 outside the mask
    advantages: Tensor | None  # (B, T), 0.0 outside the mask
    age: Tensor | None  # (B,) optimizer updates since the weights that sampled the response

    @property
    def mean(self) -> Tensor:
        """(B, 1) float64: log of the geometric mean of ρ."""
        return self.sequence / self.length.clamp(min=1)

    @cached_property
    def ratio(self) -> Tensor:
        """(B, T): ρ, 1.0 outside the mask."""
        return self.token.exp()

    @cached_property
    def excess(self) -> Tensor:
        """(B, T): ρ − 1, exact where ρ is near 1; 0.0 outside the mask."""
        return self.token.expm1()


@dataclass(frozen=True, slots=True)
class Weights:
    """Importance weights before normalisation: (B, T) float32 at token level, else (B, 1) float64."""

    log: Tensor  # log of the raw weight, before the clamp
    raw: Tensor
    bounded: Tensor
    applied: Tensor  # (B, T) float32: bounded, 0.0 where rejected


@dataclass(frozen=True, slots=True)
class CriterionResult:
    """What one criterion finds; (B, T) where it compares tokens, (B, 1) where it compares sequences."""

    values: Tensor  # its statistic
    num_above: Tensor  # (B, 1): how many are over the upper bound
    num_below: Tensor  # (B, 1): how many are under the lower bound
    rejected: Tensor  # bool (B, T) or (B, 1): what it rejects


@dataclass(frozen=True, slots=True)
class TokenSums(Additive):
    """Of one value per token, in each row: (B,)."""

    total: Tensor
    squares: Tensor
    offset: Tensor  # Σ (value − 1)
    offset_squares: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, slots=True)
class TokenWeightRows(Additive):
    """Of weights per token, in each row: (B,)."""

    raw: TokenSums
    described: TokenSums
    above: Tensor  # tokens over the upper bound
    below: Tensor
    applied: Tensor  # Σ w of kept tokens
    unrejected: Tensor  # Σ w of all tokens


@dataclass(frozen=True, slots=True)
class SequenceWeightRows(Additive):
    """The weight of each row's sequence: (B,)."""

    raw: Tensor
    excess: Tensor  # raw − 1
    bounded: Tensor


@dataclass(frozen=True, slots=True)
class CriterionRows(Additive):
    """Of one criterion in each row, (B,)."""

    tokens: TokenSums | None  # of a statistic of tokens
    value: Tensor | None  # a statistic of the sequence
    above: Tensor
    below: Tensor
    rejected: Tensor | None  # the whole sequence; None: single tokens are rejected
    held: Tensor | None  # for a metric convention
    held_squares: Tensor | None


@dataclass(frozen=True, slots=True)
class RowSums(Additive):
    """What the metrics need of each row, (B,). Of rows that are not `finite` only the length is meant."""

    finite: Tensor  # 1 or 0
    length: Tensor
    kept: Tensor  # tokens
    sequence: Tensor  # Σ log ρ, not clamped
    train: Tensor  # Σ log π_train
    clamped: Tensor  # Σ of the clamped log ρ
    excess: Tensor  # Σ (ρ − 1)
    excess_squares: Tensor
    ratio: TokenSums | None  # without a weight
    weights: TokenWeightRows | SequenceWeightRows | None
    criteria: tuple[CriterionRows, ...]
    probabilities: tuple[Tensor, ...]  # in the order of `ProbabilitySums`


@dataclass(frozen=True, slots=True)
class UnitMoments(Additive, Generic[V]):
    """Moments of weights by unit."""

    token: Moments[V]
    sequence: Moments[V]  # each sequence's weight; at token level its mean token weight


@dataclass(frozen=True, slots=True)
class GapSums(Additive, Generic[V]):
    """How far apart the policies are, whatever the rules."""

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
    """Probabilities of the sampled tokens, as distances from 1, where those of a sharp policy lie."""

    train: V
    train_squares: V
    rollout: V
    rollout_squares: V
    gap: V  # Σ |π_train − π_rollout|
    gap_squares: V
    gap_max: V = field(metadata=LARGEST)


@dataclass(frozen=True, slots=True)
class WeightSums(Additive, Generic[V]):
    """Importance weights and what the bound does to them."""

    described: UnitMoments[V]  # after the bound and rejection, rejected and non-finite ones 0
    above: V  # raw weights over the upper bound: tokens at token level, else sequences
    below: V
    sequences_above: V  # sequences whose mean raw weight is over the upper bound
    sequences_below: V
    normalizer: V  # Σ of the weights that the factor is the mean of
    normalizer_count: V

    @property
    def normalizer_mean(self: WeightSums[float]) -> float:
        """The mean weight; 0.0 of nothing."""
        return ratio(self.normalizer, self.normalizer_count)


@dataclass(frozen=True, slots=True)
class CriterionSums(Additive, Generic[V]):
    """One rejection criterion by itself."""

    values: Moments[V]  # of its statistic
    above: V
    below: V
    masked_tokens: V  # what it alone rejects
    masked_sequences: V
    token_total: V  # Σ over tokens of the statistic, a sequence's counted for each of its tokens
    held: V  # the same, of the statistic held within the bounds, if the convention needs it (else 0)
    held_squares: V


@dataclass(frozen=True, slots=True)
class CorrectionSums(Additive, Generic[V]):
    """Everything that the metrics and denominators of a mini-batch follow from."""

    tokens: V  # those of non-finite sequences included
    sequences: V
    finite_tokens: V
    finite_sequences: V
    kept_tokens: V
    kept_sequences: V  # with a kept token
    rejected_sequences: V  # with a rejected token, non-finite ones included
    saturated: V  # |Σ log ρ| ≥ 20
    gap: GapSums[V]
    probabilities: ProbabilitySums[V]
    raw: UnitMoments[V]  # weights before bound, rejection and normalisation; per token without a level
    weights: WeightSums[V] | None
    criteria: tuple[CriterionSums[V], ...]


@dataclass(frozen=True, slots=True)
class Correction:
    """What correction does to one (part of a) mini-batch.

    Attributes:
        weights: (B, T) float32, detached: after the bound, 0.0 where rejected, **not yet normalised** (the
            factor belongs to the whole mini-batch, `normalization_factor`). None when the rule has no level.
        keep_mask: (B, T) bool, response tokens that survive rejection.
        nonfinite: (B,) bool, sequences with a NaN or infinite log-prob (always rejected).
        sums: what the metrics and denominators follow from.
    """

    weights: Tensor | None
    keep_mask: Tensor
    nonfinite: Tensor
    sums: CorrectionSums[Tensor]
