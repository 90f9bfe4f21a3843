"""Criteria for crossed levels, the run's start, trends and spikes, and levels that several rules share.

A level is crossed when the median of `WINDOW` consecutive values is beyond it, so that no single step of a
long log raises an alarm. Steps are those at which the metric was logged. With fewer than `MIN_STEPS` values
only critical levels and exact values (a gradient of 0, a share of 1) count: these need no window.

A critical level always counts. Some metrics have a healthy size that depends on the model (`relative`). A
milder level of such a metric is only a remark if the metric is near its value at the run's start: published
healthy ranges differ by a factor of a hundred, so the run's own start is the better reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.diagnose.finding import SEVERITIES, Severity

#: Values per window; odd, so that a median is a value of the window.
WINDOW = 11
#: Minimum number of values for levels below critical, and for concluding that nothing is wrong.
MIN_STEPS = 5

GUIDE = "healthy ranges of a guide to verl's rollout correction"
NEMO = "NeMo-RL's documentation of log-prob errors"
TRL = "TRL's documentation of the sampling metrics"
FIELD = "practice reported by several frameworks"
OWN = "rlctl's own; no alarm on its simulated healthy runs"
LOGIC = "follows from the definition"


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of one metric."""

    key: str  # the metric
    tiers: tuple[tuple[Severity, float], ...]  # (severity, value), mildest first
    is_floor: bool = False  # the metric must stay above the levels, not below
    absolute: bool = False  # the metric's absolute value is compared
    is_share: bool = False  # of samples, where exactly half counts as half: a value at a level is beyond it
    relative: bool = False  # levels below `critical` also require the metric to be far from the run's start

    def __str__(self) -> str:
        """`— / > 0.1 / > 0.3`: for info, warning and critical."""
        sign = ">"
        if self.is_floor:
            sign = "<"
        elif self.is_share:
            sign = "≥"
        limits = {severity: f"{sign} {value:g}" for severity, value in self.tiers}
        return " / ".join(limits.get(severity, "—") for severity in reversed(SEVERITIES))


# --- the run's own start --------------------------------------------------------------------------
#: Maximum and minimum number of steps in the start; with fewer steps there is no start to compare with.
START_STEPS, START_MIN_STEPS = 20, 10
#: Steps needed to separate the start from the rest of the run.
MOVE_STEPS = 2 * START_MIN_STEPS
#: Relative levels ignore a start with a trend of this significance (Kendall's τ) whose halves differ by this
#: share of its median. (Significance alone does not suffice, because the noise of real logs drifts.)
START_TREND_P, START_TREND_SIZE = 0.01, 0.25
#: A value is far from the start beyond this many robust standard deviations, where a deviation is at least
#: this share of the median.
FAR_SIGMAS, SIGMA_FLOOR = 4.0, 0.05
#: Maximum number of window medians that a trend is fitted to, and minimum number of steps per window.
TREND_POINTS, TREND_WINDOW = 200, 3
#: Significance and strength (Kendall's τ) of a trend.
TREND_P, TREND_TAU = 0.005, 0.5
#: A log begins at the run's start if its first step is at most this.
FIRST_STEP = 1
#: A spike is this many robust standard deviations and this many medians above the steps before.
SPIKE_SIGMAS, SPIKE_MEDIANS = 8.0, 3.0
#: Maximum and minimum number of preceding steps that a spike is compared with.
SPIKE_HISTORY, SPIKE_MIN_HISTORY = 51, 21

#: Levels of a series between which it alternates: share of their distance within which a median of so many
#: values is at one; probability below which a stay is longer than earlier ones explain, also where the only
#: earlier one is the log's beginning; most values between the levels where the series jumps.
LEVEL_EDGE, LEVEL_WINDOW = 0.25, 5
LEVEL_P, LEVEL_P_FIRST, LEVEL_JUMP = 0.002, 0.25, 2

# --- metrics and levels that several rules, or guardrails, share -----------------------------------
_CORR = "rollout_corr/"
#: Levels of the gap between the policies. `PROBS_GAP` and the warning of `K3` apply only where nothing but
#: the implementations can cause the gap.
PROBS_GAP = Levels(
    "training/rollout_probs_diff_mean", (("warning", 0.005), ("critical", 0.01)), relative=True
)
K3 = Levels(f"{_CORR}k3_kl", (("warning", 1e-3), ("critical", 0.1)), relative=True)
KL = Levels(f"{_CORR}kl", (("critical", 0.1),), absolute=True)
LOG_PROB_GAP = Levels("mismatch/log_prob_abs_diff_mean", (("critical", 1.0),))
#: Age of the samples, in optimizer updates.
STALENESS = ("training/staleness_max", "training/staleness_mean")
RAW_ESS = Levels(f"{_CORR}rollout_is_raw_eff_sample_size", (("warning", 0.3),), is_floor=True)
ESS = Levels(f"{_CORR}rollout_is_eff_sample_size", (("info", 0.5), ("critical", 0.3)), is_floor=True)
MASKED = Levels(f"{_CORR}rollout_rs_masked_fraction", (("info", 0.3), ("critical", 0.5)), is_share=True)
GRAD_NORM = Levels("actor/grad_norm", (("warning", 10.0),), relative=True)
REF_KL = tuple(
    Levels(key, (("warning", 0.5), ("critical", 2.0))) for key in ("actor/kl_loss", "actor/reward_kl_penalty")
)
ENTROPY = Levels("actor/entropy", (("warning", 0.01),), is_floor=True)
TRUNCATED = Levels(
    "response_length/clip_ratio", (("info", 0.05), ("warning", 0.1), ("critical", 0.3)), is_share=True
)
#: Mean, best and worst single reward of a batch; validation scores, one per data source; mean length.
SCORE, BEST, WORST = REWARDS = ("critic/score/mean", "critic/score/max", "critic/score/min")
VALIDATION, LENGTH = "val/<data_source>/reward_mean", "response_length/mean"
#: Mean reward, as a share of its range, from which the data counts as learned, and as mostly right.
LEARNED, MOSTLY_RIGHT = 0.9, 0.5
ZERO_SPREAD = Levels("reward/zero_spread_groups", (("warning", 0.5), ("critical", 0.75)), is_share=True)
#: Standard deviation of the rewards within a group; at 0 the group gives no learning signal.
GROUP_STD = "reward/group_std"
#: Share of steps with an exact zero (gradient, advantages, reward spread) from which rules report it: exact
#: zeros are not noise.
ZERO_SHARE = 0.4
#: Weights within this distance of 1 count as exactly 1, and policies with a gap below it as equal.
EXACT = 1e-9
#: Tokens per response from which a product of ratios counts as long.
LONG_RESPONSE = 100.0
#: Gain below which the reward counts as flat, as a share of its range.
FLAT_REWARD = 0.05

# --- rules that other rules explain -----------------------------------------------------------------
#: Rules of figures that a gap between the policies changes.
GAP_RULES = (
    *("sampled-otherwise", "probability-gap", "policy-gap", "token-error", "stale-weights"),
    *("weight-mean", "effective-samples", "hidden-tail", "rejected", "who-sampled"),
)
#: Rules of what a damaged policy does, without and with those of its length.
REWARD_RULES = (
    *("reward-fell", "zero-reward", "zero-spread-groups", "zero-advantages", "no-gradient", "truncated"),
    *(
        "entropy",
        "entropy-rise",
        "flat-reward",
        "reward-hacking",
        "reward-terms",
        "random-tokens",
        "no-format",
    ),
)
COLLAPSE_RULES = (*REWARD_RULES, "length-collapse", "length-growth")
