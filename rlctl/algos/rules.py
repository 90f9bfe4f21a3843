"""Correction rules in the internal form that the algorithms use.

`rlctl.run_spec` translates the user's settings (either dialect) into these records; code below the spec does
not depend on dialects. Imports no torch, so that a dry run can print bands of ρ.

Notation: ρ_t = π_train(t) / π_rollout(t), per token; r = log ρ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA

#: Log-ratios, and sums of them, are clamped to ±this before `exp`.
LOG_RATIO_CLAMP = 20.0

Bound = Literal["clip", "truncate", "mask"]
Reduction = Literal["none", "sum", "mean", "max", "given"]
#: What one violation rejects; `sequence` is a response, see `CorrectionRules.unit`.
Scope = Literal["token", "turn", "sequence", "episode"]
ResponseUnit = Literal["episode", "sequence"]
#: How token losses become one number; see `rlctl.algos.losses.coefficients`.
AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LossDenominator = Literal["before_rejection", "after_rejection"]

#: Statistics whose bounds can be expressed as bounds on ρ.
BASIC_STATISTICS = frozenset({"ratio", "k1", "k2", "k3"})


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Importance weight = level → bound → normalise (three independent choices).

    Attributes:
        level: a registered correction weight: `token` w = ρ_t; `sequence` w = Π ρ_t; `geometric`
            w = (Π ρ_t)^(1/len); …; None: the loss is not weighted, metrics are still computed (per token).
        bound: `clip` to [lower, upper]; `truncate` to at most upper; `mask`: zero outside
            [lower, upper].
        lower: lower bound on w (ignored by `truncate`), > 0.
        upper: upper bound on w.
        normalize: divide by the mean weight of the whole mini-batch, after the bound.
        normalize_over: weights that the mean covers: `survivors` of rejection (the weights applied to the
            loss then average 1), or `all`.
        metrics: a registered metric convention; None: `rollout_is_*` describe the applied weights.
        params: validated parameters of a weight that has any.
    """

    level: str | None
    bound: Bound = "clip"
    lower: float = 0.5
    upper: float = 2.0
    normalize: bool = False
    normalize_over: Literal["survivors", "all"] = "survivors"
    metrics: str | None = None
    params: Any = field(default=None, hash=False)

    @property
    def unit(self) -> str:
        """What has one weight; `token` without a level: metrics then describe ρ per token."""
        return "token" if self.level is None else CORRECTION_WEIGHTS.part(self.level).unit

    @property
    def by_token(self) -> bool:
        """Whether weights are per token."""
        return self.unit == "token"

    @property
    def lower_edge(self) -> float:
        """Threshold of `ratio_fraction_low`: the lower bound, or 1/c for a truncation at c."""
        return 1.0 / self.upper if self.bound == "truncate" else self.lower

    def band(self) -> tuple[float, float]:
        """Interval of w outside which the bound changes the weight."""
        return (0.0, self.upper) if self.bound == "truncate" else (self.lower, self.upper)


@dataclass(frozen=True, slots=True)
class RejectRule:
    """One rejection criterion = statistic → reduction → bounds → scope.

    Attributes:
        name: the user's name of the criterion; metrics are `rollout_rs_<name>_*`.
        statistic: a registered criterion, per token `ratio` ρ; `k1` = −log ρ; `k2` = ½ log² ρ;
            `k3` = ρ − 1 − log ρ; ….
        reduction: `none` compares each token's value; `sum`, `mean`, `max` compare that reduction over the
            sequence; `given`: the statistic is already one value per sequence. `ratio` is summed and averaged
            in log space (product, geometric mean).
        lower: smallest accepted value (None: no lower bound).
        upper: largest accepted value (None: no upper bound).
        scope: what one violation rejects: the token or its whole sequence. A reduced
            statistic always rejects the sequence.
        negative_advantage_only: reject only where the sequence's advantage is negative
            (off-policy sequence masking of DeepSeek-V3.2).
        params: validated parameters of a statistic that has any.

    Raises:
        ValueError: the scope is `token`, but the criterion compares whole sequences.
    """

    name: str
    statistic: str
    reduction: Reduction
    lower: float | None
    upper: float | None
    scope: Scope
    negative_advantage_only: bool = False
    params: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.scope == "token" and (self.reduction != "none" or self.negative_advantage_only):
            raise ValueError(f"{self.name} compares whole sequences: its scope must be `sequence`")

    @property
    def bounds_ratio(self) -> bool:
        """Whether the statistic's bounds can be expressed as bounds on ρ, see `band`."""
        return self.statistic in BASIC_STATISTICS

    def band(self) -> tuple[float, float]:
        """The accepted interval as bounds on ρ.

        For `none` and `max` it bounds each token's ρ_t; for `sum` with `ratio`/`k1` the product
        Π ρ; for `mean` with `ratio`/`k1` the geometric mean. For sums and means of k2 and k3 it
        bounds a single token's ρ_t, assuming that the other tokens contribute 0 (`sum`) or that all
        tokens are equal (`mean`). For a statistic that does not bound ρ it is (0, ∞).
        """
        if not self.bounds_ratio:
            return 0.0, math.inf
        lower = -math.inf if self.lower is None else self.lower
        upper = math.inf if self.upper is None else self.upper
        if self.statistic == "ratio":
            return max(lower, 0.0), upper
        if self.statistic == "k1":
            return _exp(-upper), _exp(-lower)
        if self.statistic == "k2":
            width = math.sqrt(2.0 * upper) if upper < math.inf else math.inf
            return _exp(-width), _exp(width)
        return _k3_band(upper)


@dataclass(frozen=True, slots=True)
class LossRule:
    """The policy loss and its parameters; each loss reads only its own.

    Attributes:
        name: which loss, as registered in `rlctl.registry.POLICY_LOSSES`.
        clip_low, clip_high: `ppo_clip`, `gspo`, `cispo`: the ratio's interval is
            [1 − clip_low, 1 + clip_high]; `dppo`: largest divergence downwards and upwards.
        clip_c: `ppo_clip`: dual clip, the surrogate of a negative advantage is at least clip_c · A;
            `dppo`: upper bound of the ratio. None: neither.
        tau_pos, tau_neg: `sapo`: temperature of the gate for positive and negative advantages.
        divergence: `dppo`: total variation or KL of the binary distribution (sampled token, all others).
        params: validated parameters of a loss that has any; None: it has none.
        batch_statistics: what the loss reads of the whole mini-batch; None until it is computed.
    """

    name: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    divergence: Literal["tv", "kl"] = "tv"
    params: Any = None
    batch_statistics: Any = None

    @property
    def interval(self) -> tuple[float, float]:
        """The ratio's interval, 1 − clip_low and 1 + clip_high."""
        return 1.0 - self.clip_low, 1.0 + self.clip_high

    @property
    def has_ratio(self) -> bool:
        """Whether the loss contains π_θ/π_old, which in bypass mode is itself the correction."""
        return "old_log_probs" in POLICY_LOSSES.part(self.name).needs

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss reads `batch_statistics`, which depend on π_θ."""
        return POLICY_LOSSES.part(self.name).batch_statistics is not None


@dataclass(frozen=True, slots=True)
class CorrectionRules:
    """All settings of rollout correction that the update uses."""

    weight: WeightRule
    reject: tuple[RejectRule, ...] = ()
    loss_denominator: LossDenominator = "before_rejection"
    unit: ResponseUnit = "episode"  # what is one response where a rule speaks of a sequence

    def responses(self, units: Any) -> Any:
        """The `Segments` of the responses, of `Units`: an episode with two sequences is one, or is two."""
        return units.of(self.unit)

    def segments(self, units: Any, level: str) -> Any:
        """The `Segments` of a rule's level: `token`, `turn`, `sequence` (a response) or `episode`."""
        return self.responses(units) if level == "sequence" else units.of(level)

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `LogRatio` that weights and criteria read in addition to the log-probs."""
        parts = [REJECTION_CRITERIA.part(rule.statistic) for rule in self.reject]
        parts += [CORRECTION_WEIGHTS.part(self.weight.level)] if self.weight.level else []
        by_sign = any(rule.negative_advantage_only for rule in self.reject)
        return frozenset[str]().union(*(part.needs for part in parts), {"advantages"} if by_sign else ())


def _exp(value: float) -> float:
    """`exp` that saturates to infinity instead of raising."""
    return math.inf if value > 700.0 else math.exp(value)


def _k3_band(upper: float) -> tuple[float, float]:
    """Solves ρ − 1 − log ρ = upper for its two roots around 1, in log ρ."""
    from scipy.optimize import brentq  # slow to import

    if upper == math.inf:
        return 0.0, math.inf

    def excess(log_ratio: float) -> float:
        return _exp(log_ratio) - 1.0 - log_ratio - upper

    edges = -(upper + 2.0), math.log(upper + 2.0) + 2.0
    low, high = (_exp(brentq(excess, 0.0, edge, xtol=1e-15)) for edge in edges)
    return low, high
