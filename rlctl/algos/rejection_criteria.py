"""Rejection criteria: the statistics that are compared with a threshold.

Every criterion is `criterion(log_ratio, params) -> values`, registered by its name (`rlctl.registry`): (B, T)
with `unit="token"`, (B, 1) with `unit="sequence"`. `log_ratio` is a `LogRatio`; rows depend on nothing but
themselves. The core compares the values with the bounds and rejects the token or the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlctl.registry import REJECTION_CRITERIA

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.correction_records import LogRatio

_SCHULMAN = "Schulman 2020, Approximating KL divergence"


@REJECTION_CRITERIA.register(
    label="each token's ρ", formula="ρ_t", source="by definition", thresholds=["0.5_2.0"]
)
def ratio(log_ratio: LogRatio, params: Any) -> Tensor:
    """ρ_t; 1 where the policies agree."""
    return log_ratio.ratio


@REJECTION_CRITERIA.register(
    label="k1 of each token", formula="−log ρ_t", source=_SCHULMAN, thresholds=["0.5_2.0"]
)
def k1(log_ratio: LogRatio, params: Any) -> Tensor:
    """−log ρ_t; 0 where the policies agree, of either sign."""
    return -log_ratio.token


@REJECTION_CRITERIA.register(
    label="k2 of each token", formula="½ log² ρ_t", source=_SCHULMAN, thresholds=["0.1"]
)
def k2(log_ratio: LogRatio, params: Any) -> Tensor:
    """½ log² ρ_t; 0 where the policies agree, never negative."""
    return 0.5 * log_ratio.token.square()


@REJECTION_CRITERIA.register(
    label="k3 of each token", formula="ρ_t − 1 − log ρ_t", source=_SCHULMAN, thresholds=["0.1"]
)
def k3(log_ratio: LogRatio, params: Any) -> Tensor:
    """ρ_t − 1 − log ρ_t; 0 where the policies agree, never negative."""
    return log_ratio.excess - log_ratio.token
