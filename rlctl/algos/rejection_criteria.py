"""Rejection criteria: statistics that are compared with thresholds.

Every criterion is `criterion(log_ratio, params) -> values`, registered by its name (`rlctl.registry`): (M,)
with `unit="token"`, (R,) with `unit="sequence"`. `log_ratio` is a `LogRatio`; responses are independent.
`rlctl.algos.correction` compares the values with the bounds and rejects the token or the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlctl.algos.more_losses import symmetric_binary_kl
from rlctl.registry import REJECTION_CRITERIA

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.correction import LogRatio

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
    """−log ρ_t, of either sign; 0 where the policies agree."""
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
    return log_ratio.token.expm1() - log_ratio.token


@REJECTION_CRITERIA.register(
    label="KPop: the larger of both binary KLs",
    formula="max(KL(π‖μ), KL(μ‖π)) of {sampled token, any other}",
    source="Guo et al. 2026, KPop; from prime-rl's code, threshold 0.1",
    thresholds=["0.1", "0.01"],
    experimental=True,
)
def kpop(log_ratio: LogRatio, params: Any) -> Tensor:
    """Accepts a wide range of ρ for rare tokens, a narrow range for tokens of probability near 1."""
    return symmetric_binary_kl(log_ratio.train.exp(), log_ratio.rollout.exp())


@REJECTION_CRITERIA.register(
    label="the difference of the token's probabilities",
    formula="|π − μ|",
    source="from prime-rl's code: its loss `ipo`, threshold 0.1",
    thresholds=["0.1", "0.03"],
    experimental=True,
)
def probability_gap(log_ratio: LogRatio, params: Any) -> Tensor:
    """Total variation between {sampled token, any other} of both policies."""
    return (log_ratio.train.exp() - log_ratio.rollout.exp()).abs()


@REJECTION_CRITERIA.register(
    label="multiplicative probability error of the response",
    formula="mean_t exp(|log ρ_t|)",
    source="from NeMo-RL's code: `seq_logprob_error_threshold`",
    unit="sequence",
    thresholds=["1.5"],
    experimental=True,
)
def mult_prob_error(log_ratio: LogRatio, params: Any) -> Tensor:
    """1 where the policies agree; larger if they differ in either direction."""
    return log_ratio.unit.mean(log_ratio.token.abs().exp())


@REJECTION_CRITERIA.register(
    label="optimizer updates since the weights that sampled the response",
    formula="version of the trained policy − version of the sampler",
    source="from xtuner's code: `max_token_staleness`",
    needs={"age"},
    unit="sequence",
    thresholds=["1"],
    experimental=True,
)
def age(log_ratio: LogRatio, params: Any) -> Tensor:
    """The age of a response is that of its oldest token."""
    assert log_ratio.age is not None
    return log_ratio.unit.max(log_ratio.age)
