"""Every threshold of every rule, and where it comes from.

A level counts as crossed when the median of `WINDOW` consecutive steps is beyond it, so that no single
step raises an alarm. Steps are those at which the metric was logged.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.diagnose.finding import Severity

WINDOW = 10
#: A metric logged fewer times than this is not judged.
MIN_STEPS = 5

GUIDE = "the reference guide's healthy ranges"
VERL = "verl's documentation of rollout correction"
FIELD = "practice reported by several frameworks"
OWN = "rlctl's own, quiet on its built-in healthy runs"
LOGIC = "follows from the definition"


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of one metric.

    Attributes:
        key: the metric.
        tiers: (severity, value), from the mildest.
        source: where they come from.
        is_floor: the metric must stay above them, not below.
        absolute: the metric's absolute value is meant.
    """

    key: str
    tiers: tuple[tuple[Severity, float], ...]
    source: str
    is_floor: bool = False
    absolute: bool = False


_CORR = "rollout_corr/"

# --- distance of the two policies: how large where only the implementations differ ---------------
PROBS_GAP = Levels("training/rollout_probs_diff_mean", (("warning", 0.005), ("critical", 0.01)), OWN)
K3 = Levels(f"{_CORR}k3_kl", (("warning", 1e-3),), FIELD)
# ... and how large at all
KL = Levels(f"{_CORR}kl", (("critical", 0.1),), FIELD, absolute=True)
CHI2_TOKEN = Levels(f"{_CORR}chi2_token", (("warning", 1.0),), VERL)

# --- importance weights -----------------------------------------------------------------------
_RAW_MEAN = f"{_CORR}rollout_is_raw_mean"
RAW_MEAN_HIGH = Levels(_RAW_MEAN, (("info", 1.2), ("critical", 2.0)), GUIDE)
RAW_MEAN_LOW = Levels(_RAW_MEAN, (("info", 0.8), ("critical", 0.5)), GUIDE, is_floor=True)
ESS = Levels(f"{_CORR}rollout_is_eff_sample_size", (("info", 0.5), ("critical", 0.3)), GUIDE, is_floor=True)
RAW_ESS = Levels(f"{_CORR}rollout_is_raw_eff_sample_size", (("warning", 0.3),), OWN, is_floor=True)
WEIGHT_STD = Levels(f"{_CORR}rollout_is_std", (("warning", 1.0),), VERL)
RATIO_HIGH = Levels(f"{_CORR}rollout_is_ratio_fraction_high", (("warning", 0.1),), OWN)
#: Tokens from which a product of ratios is called long.
LONG_RESPONSE = 100.0
#: Share of a batch's sequences whose weight is only the clamp.
SATURATED_SHARE = 0.01
#: Weights within this of 1 are taken for exactly 1, and k3 below it for equal policies.
EXACT = 1e-9

# --- rejection, clipping -----------------------------------------------------------------------
MASKED = Levels(f"{_CORR}rollout_rs_masked_fraction", (("info", 0.3), ("critical", 0.5)), GUIDE)
CLIPPED_ON_POLICY = Levels("actor/pg_clipfrac", (("warning", 0.05),), OWN)

# --- update -------------------------------------------------------------------------------------
GRAD_NORM = Levels("actor/grad_norm", (("warning", 10.0),), FIELD)
#: A spike is both this many robust standard deviations and this many medians above the steps before.
SPIKE_SIGMAS, SPIKE_MEDIANS = 8.0, 3.0
#: Steps before that a spike is compared with: at most, and at least.
SPIKE_HISTORY, SPIKE_MIN_HISTORY = 50, 20
#: From this share of the steps, and this many of them, spikes are a warning and not a remark.
SPIKE_SHARE, SPIKE_COUNT = 0.01, 3
ZERO_GRADIENT_SHARE = 0.4
NONFINITE_WARNING_SHARE, NONFINITE_CRITICAL_SHARE = 0.01, 0.1
#: |pg_loss| below this with a gradient norm above that is the healthy cancellation.
PG_LOSS_ZERO, GRAD_NORM_NONZERO = 0.01, 1e-6

# --- rewards, lengths, entropy ------------------------------------------------------------------
ZERO_SPREAD = Levels("reward/zero_spread_groups", (("warning", 0.5), ("critical", 0.75)), FIELD)
ZERO_REWARD_STEPS = 20
TRUNCATED = Levels("response_length/clip_ratio", (("info", 0.05), ("warning", 0.1), ("critical", 0.3)), FIELD)
ENTROPY = Levels("actor/entropy", (("warning", 0.01),), FIELD, is_floor=True)
#: Entropy that fell to this share of its start, over at least so many steps, ...
ENTROPY_SHARE, ENTROPY_STEPS = 0.5, 40
#: ... while the reward gained less than this share of its range.
FLAT_REWARD = 0.05
#: Mean reward, as a share of its range, from which the data counts as learned.
LEARNED = 0.9
