"""The criteria for levels, starts, trends and spikes, and the levels that several rules share.

A level is crossed when the median of `WINDOW` consecutive values is beyond it, so that no single step of a
long log raises an alarm. Steps are those at which the metric was logged. With fewer than `MIN_STEPS` values
only critical levels and exact values (a gradient of 0, a share of 1) count: these need no window.

A critical level always counts. A milder level of a metric whose healthy size differs from model to model
(`relative`) is only a remark where the run began just as it is: published healthy ranges differ by a factor
of a hundred, and the run's own start is the better reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.diagnose.finding import SEVERITIES, Severity

#: Odd, so that a median is a value of the window.
WINDOW = 11
#: Values that a level below critical needs, and those from which the absence of findings is a result.
MIN_STEPS = 5

GUIDE = "the reference guide's healthy ranges"
VERL = "verl's documentation of rollout correction"
NEMO = "NeMo-RL's documentation of log-prob errors"
TRL = "TRL's documentation of the sampling metrics"
SLIME = "slime's checks of a run's first step"
FIELD = "practice reported by several frameworks"
OWN = "rlctl's own, quiet on its simulated healthy runs"
LOGIC = "follows from the definition"


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of one metric."""

    key: str  # the metric
    tiers: tuple[tuple[Severity, float], ...]  # (severity, value), mildest first
    is_floor: bool = False  # the metric must stay above them, not below
    absolute: bool = False  # the metric's absolute value is compared
    relative: bool = False  # levels milder than `critical` also need the metric far from the run's own start
    min_steps: int = MIN_STEPS  # values needed to apply those below critical

    def __str__(self) -> str:
        """`— / > 0.1 / > 0.3`: for info, warning and critical."""
        limits = dict(self.tiers)
        sign = "<" if self.is_floor else ">"
        return " / ".join(f"{sign} {limits[s]:g}" if s in limits else "—" for s in reversed(SEVERITIES))


@dataclass(frozen=True, slots=True)
class Move:
    """How far a metric must get from where the run started."""

    key: str  # the metric
    factor: float  # times its start; above 1 at least, below 1 at most
    #: the value it must also pass, in the same direction: small numbers may double
    beyond: float | None = None


# --- the run's own start --------------------------------------------------------------------------
#: Steps that make up the start: at most, and at least (otherwise there is none to compare with).
START_STEPS, START_MIN_STEPS = 20, 10
#: Steps needed to separate a start from what came after.
MOVE_STEPS = 2 * START_MIN_STEPS
#: A start with a trend of this significance (Kendall's τ), and of this share of its median between its
#: halves, is not used. (The noise of real logs drifts, which the significance alone takes for a trend.)
START_TREND_P, START_TREND_SIZE = 0.01, 0.25
#: Far from the start: so many robust standard deviations, each at least this share of the median.
FAR_SIGMAS, SIGMA_FLOOR = 4.0, 0.05
#: Window medians that a trend is fitted to, at most, and steps per window, at least.
TREND_POINTS, TREND_WINDOW = 200, 3
#: Significance and strength (Kendall's τ) of a trend.
TREND_P, TREND_TAU = 0.005, 0.5
#: A log begins at the run's start if its first step is at most this.
FIRST_STEP = 1
#: A spike is this many robust standard deviations and this many medians above the steps before.
SPIKE_SIGMAS, SPIKE_MEDIANS = 8.0, 3.0
#: Steps before that a spike is compared with: at most, and at least.
SPIKE_HISTORY, SPIKE_MIN_HISTORY = 51, 21

# --- levels that several rules, or guardrails, share ----------------------------------------------
_CORR = "rollout_corr/"
#: Gaps that only the implementations cause; `KL` whatever the cause.
PROBS_GAP = Levels(
    "training/rollout_probs_diff_mean", (("warning", 0.005), ("critical", 0.01)), relative=True
)
K3 = Levels(f"{_CORR}k3_kl", (("warning", 1e-3), ("critical", 0.1)), relative=True)
KL = Levels(f"{_CORR}kl", (("critical", 0.1),), absolute=True)
LOG_PROB_GAP = Levels("mismatch/log_prob_abs_diff_mean", (("critical", 1.0),))
#: Mean |log-prob difference| at the first step, where trainer and engine hold the same weights.
FIRST_LOG_PROB_GAP = 0.03
#: Metrics of the same gap, the most specific first.
GAPS = (K3.key, LOG_PROB_GAP.key, PROBS_GAP.key)
RAW_ESS = Levels(f"{_CORR}rollout_is_raw_eff_sample_size", (("warning", 0.3),), is_floor=True)
MASKED = Levels(f"{_CORR}rollout_rs_masked_fraction", (("info", 0.3), ("critical", 0.5)))
GRAD_NORM = Levels("actor/grad_norm", (("warning", 10.0),), relative=True)
ZERO_SPREAD = Levels("reward/zero_spread_groups", (("warning", 0.5), ("critical", 0.75)))
#: Rewards' standard deviation within a group; 0: a group has nothing to compare.
GROUP_STD = "reward/group_std"
#: Share of steps without a gradient from which a warning is due: exact zeros are no noise.
ZERO_SHARE = 0.4
#: Weights within this of 1 count as exactly 1, and a k3 below it as equal policies.
EXACT = 1e-9
#: Tokens from which a product of ratios is called long.
LONG_RESPONSE = 100.0
#: Gain below which the reward counts as flat, as a share of its range.
FLAT_REWARD = 0.05
