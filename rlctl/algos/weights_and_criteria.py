"""Importance weights and rejection criteria: functions of the ratios ρ_t, registered by name.

Every weight is `weight(log_ratio, params) -> log w`, from sums of log-ratios as they are (`gap`):
`rlctl.algos.correction` clamps log w to ±20, takes `exp`, applies bound and rejection, and computes the
normalisation factor. Every criterion is `criterion(log_ratio, params) -> values`: `rlctl.algos.correction`
compares the values with the bounds and rejects the token or the sequence. Both return (M,) with
`unit="token"`, else one float64 per segment of their `unit`: `turn`, `sequence` (a response) or `episode`.
`log_ratio` is a `LogRatio`; responses are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from rlctl.algos.more_losses import symmetric_binary_kl
from rlctl.errors import known
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.correction import LogRatio

_SCHULMAN = "Schulman 2020, Approximating KL divergence"


@CORRECTION_WEIGHTS.register(
    label="each token's ρ",
    formula="ρ_t",
    source="Yao et al. 2025, truncated importance sampling",
    thresholds=("1.2", "1.5", "2.0", "3.0", "5.0"),
)
def token(log_ratio: LogRatio, params: Any) -> Tensor:
    """w_t = ρ_t: low variance; biased if the policies also differ on earlier tokens of the response."""
    return log_ratio.token


@CORRECTION_WEIGHTS.register(
    label="the product of a response's ρ",
    formula="Π_t ρ_t",
    source="Kahn and Marshall 1953",
    unit="sequence",
    thresholds=("1.2", "1.5", "2.0", "3.0", "5.0"),
    unbiased=True,
)
def sequence(log_ratio: LogRatio, params: Any) -> Tensor:
    """w = Π_t ρ_t, the same for all tokens: unbiased without a bound; its variance grows with the length."""
    return log_ratio.total


@CORRECTION_WEIGHTS.register(
    label="the product of a turn's ρ",
    formula="Π_{t in turn} ρ_t",
    source="by definition",
    unit="turn",
    thresholds=("1.2", "1.5", "2.0", "3.0", "5.0"),
)
def turn(log_ratio: LogRatio, params: Any) -> Tensor:
    """w = Π ρ_t over a turn, the same for all of its tokens; biased if the policies differ on earlier turns.

    With one turn per response it is `sequence`.
    """
    return log_ratio.units.turn.sum(log_ratio.gap)


@CORRECTION_WEIGHTS.register(
    label="the product of an episode's ρ",
    formula="Π_{t in episode} ρ_t",
    source="Kahn and Marshall 1953",
    unit="episode",
    thresholds=("1.2", "1.5", "2.0", "3.0", "5.0"),
    unbiased=True,
)
def episode(log_ratio: LogRatio, params: Any) -> Tensor:
    """w = Π ρ_t over all sequences of an episode, however its tokens are divided among them."""
    return log_ratio.units.episode.sum(log_ratio.gap)


@CORRECTION_WEIGHTS.register(
    label="the geometric mean of a response's ρ",
    formula="(Π_t ρ_t)^(1/length)",
    source="Zheng et al. 2025, GSPO",
    unit="sequence",
    thresholds=("1.01", "1.1", "1.5"),
)
def geometric(log_ratio: LogRatio, params: Any) -> Tensor:
    """w = (Π_t ρ_t)^(1/length), the same for all tokens: very low variance, but biased."""
    return log_ratio.mean


@CORRECTION_WEIGHTS.register(
    label="the product of ρ up to the token",
    formula="Π_{s≤t} ρ_s",
    source="Precup, Sutton and Singh 2000; Zhang et al. 2026, arXiv 2605.07331 (CTPO)",
    thresholds=("1.5", "2.0", "5.0"),
    experimental=True,
)
def prefix(log_ratio: LogRatio, params: Any) -> Tensor:
    """w_t = Π_{s≤t} ρ_s: unbiased if the advantage of token t is Q^π − V^π of its prefix, as from a critic.

    With one advantage per response it is biased, because the tokens after t are sampled from π_rollout.
    """
    return log_ratio.unit.cumsum(log_ratio.gap)


class SelectiveParams(BaseModel, extra="forbid"):
    """Bound M of the rejection test."""

    bound: float = Field(1.0, gt=0)
    """A token is accepted with probability min(1, ρ_t / bound). The abstract names no value."""


@CORRECTION_WEIGHTS.register(
    label="SIS: 1 for accepted tokens, ρ for rejected ones",
    formula="a_t + (1 − a_t) · ρ_t, a_t = min(1, ρ_t / bound): the mean over a random test",
    source="Li et al. 2026, arXiv 2607.04728; from its abstract, the bound as in rejection sampling",
    params=SelectiveParams,
    thresholds=("2.0",),
    experimental=True,
)
def selective(log_ratio: LogRatio, params: SelectiveParams) -> Tensor:
    """The paper draws accept or reject at random; this is the expected weight.

    The expected gradient is the same, its variance is lower, and no random numbers are needed. The paper has
    neither bound nor normalisation: rollout_is_bound: truncate, rollout_is_threshold: 1e9 and
    rollout_is_batch_normalize: false.
    """
    accepted = (log_ratio.ratio / params.bound).clamp(max=1.0)
    return (accepted + (1.0 - accepted) * log_ratio.ratio).log()


# --- rejection criteria ------------------------------------------------------------------------------


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
    return log_ratio.unit.max(known(log_ratio.age))
