"""A correction weight and a rejection criterion in one file.

rlctl train --preset rloo-seq-is \
    algorithm.rollout_correction.rollout_is=examples/custom_correction.py:tempered \
    algorithm.rollout_correction.rollout_is_params.exponent=0.5 \
    algorithm.rollout_correction.rollout_rs=examples/custom_correction.py:worst_tokens \
    algorithm.rollout_correction.rollout_rs_threshold=0.5
"""

from __future__ import annotations

from pydantic import BaseModel, Field
from torch import Tensor

from rlctl.parts import CORRECTION_WEIGHTS, REJECTION_CRITERIA, LogRatio


class Tempered(BaseModel, extra="forbid"):
    """Parameters of the weight: `algorithm.rollout_correction.rollout_is_params.*`."""

    exponent: float = Field(default=0.5, gt=0, le=1, description="1 is the exact sequence weight.")


@CORRECTION_WEIGHTS.register(
    label="the product of a response's ρ, flattened",
    formula="(Π_t ρ_t)^exponent",
    source="an example",
    unit="sequence",
    thresholds=["2.0"],
    params=Tempered,
    experimental=True,
)
def tempered(log_ratio: LogRatio, params: Tempered) -> Tensor:
    """(R,) log w: the exact weight flattened towards 1, less variance for more bias."""
    return params.exponent * log_ratio.total


@REJECTION_CRITERIA.register(
    label="mean |log ρ| of a response's two worst tokens",
    formula="½ (|log ρ|₍₁₎ + |log ρ|₍₂₎)",
    source="an example",
    unit="sequence",
    thresholds=["0.5"],
    experimental=True,
)
def worst_tokens(log_ratio: LogRatio, params: None) -> Tensor:
    """(R,): one number per response, compared with the threshold."""
    gap = log_ratio.unit.padded(log_ratio.token.abs())
    return gap.topk(min(2, gap.shape[-1])).values.sum(-1) / 2
