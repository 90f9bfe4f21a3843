"""Every threshold of every rule, and where it comes from.

A level counts as crossed when the median of `WINDOW` consecutive steps is beyond it, so that no single
step raises an alarm. Steps are those at which the metric was logged.

What wins when: a critical level counts always. A milder level of a metric whose healthy size differs from
model to model (`relative`) is only a remark where the run began just as it is, because published
healthy ranges differ a hundredfold and the run's own start is the better judge.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.diagnose.finding import Severity

#: Odd, so that a median is a value of the window.
WINDOW = 11
#: A metric logged fewer times than this is not judged.
MIN_STEPS = 5

GUIDE = "the reference guide's healthy ranges"
VERL = "verl's documentation of rollout correction"
NEMO = "NeMo-RL's documentation of log-prob errors"
TRL = "TRL's documentation of the sampling metrics"
SLIME = "slime's checks of a run's first step"
DAPO = "DAPO (Yu et al. 2025), sections 3.1 and 3.4"
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
        relative: milder levels than `critical` want the metric far from the run's own start, too.
    """

    key: str
    tiers: tuple[tuple[Severity, float], ...]
    source: str
    is_floor: bool = False
    absolute: bool = False
    relative: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """How far a metric must get from where the run started, to count among metrics that move together.

    Attributes:
        key: the metric.
        factor: times its start; above 1 at least, below 1 at most.
        beyond: the value it must also pass, in the same direction: small numbers may double.
    """

    key: str
    factor: float
    beyond: float | None = None


_CORR = "rollout_corr/"

# --- the run's own start -------------------------------------------------------------------------
#: Steps that make up the start: at most, and at least (otherwise there is none to compare with).
START_STEPS, START_MIN_STEPS = 20, 10
#: Steps it takes to tell a start from what came after.
MOVE_STEPS = 2 * START_MIN_STEPS
#: A start with a trend of this significance (Kendall's τ), and of this share of its median between its
#: halves, is no measure. (The noise of real logs drifts, which the significance takes for a trend.)
START_TREND_P, START_TREND_SIZE = 0.01, 0.25
#: Far from the start: so many robust standard deviations, each at least this share of the median.
FAR_SIGMAS, SIGMA_FLOOR = 4.0, 0.05
#: Window medians that trends are judged by, at most, and steps per window, at least.
TREND_POINTS, TREND_WINDOW = 200, 3
#: Significance and strength (Kendall's τ) of a trend.
TREND_P, TREND_TAU = 0.005, 0.5
#: A run's log begins at its start if its first step is at most this.
FIRST_STEP = 1

# --- distance of the two policies: how large where only the implementations differ ---------------
PROBS_GAP = Levels(
    "training/rollout_probs_diff_mean", (("warning", 0.005), ("critical", 0.01)), OWN, relative=True
)
K3 = Levels(f"{_CORR}k3_kl", (("warning", 1e-3), ("critical", 0.1)), FIELD, relative=True)
# ... and how large at all
KL = Levels(f"{_CORR}kl", (("critical", 0.1),), FIELD, absolute=True)
CHI2_TOKEN = Levels(f"{_CORR}chi2_token", (("warning", 1.0),), VERL)
LOG_PROB_GAP = Levels("mismatch/log_prob_abs_diff_mean", (("critical", 1.0),), TRL)
#: The same where only the implementations differ.
LOG_PROB_MISMATCH = Levels(LOG_PROB_GAP.key, (("warning", 0.03), ("critical", 0.15)), OWN, relative=True)
#: |log| of what the samples' −log π is over the policy's entropy: 1 where they are its own.
SAMPLED = Levels("actor/entropy", (("warning", 0.34), ("critical", 0.69)), OWN)
#: Nats per token by which they must differ at all, and share of it that the two log-probs may.
SAMPLED_NATS, SAMPLED_GAP = 0.1, 0.25
TOKEN_ERROR = Levels(
    "mismatch/token_mult_prob_error", (("warning", 1.05), ("critical", 2.0)), NEMO, relative=True
)
#: A token error that rises: the part above 1 grew by this factor, to at least this.
TOKEN_ERROR_RISE, TOKEN_ERROR_EXCESS = 2.0, 0.02
#: At the first step, where trainer and engine hold the same weights: |ppo_kl|, clipped tokens, mean
#: |log-prob gap|. (Frameworks' own tests ask for 1e-9 and 1e-10, which only deterministic kernels keep.)
FIRST_PPO_KL, FIRST_CLIPFRAC, FIRST_LOG_PROB_GAP = 1e-3, 0.01, 0.03
#: |kl| per token of an instruct model whose prompt lost its chat template: near 0.8.
TEMPLATE_KL = (0.5, 1.2)
#: A gap that grows with no learning: by this factor, over at least so many steps.
FROZEN_GROWTH, FROZEN_STEPS = 1.5, 20

# --- importance weights -----------------------------------------------------------------------
_RAW_MEAN = f"{_CORR}rollout_is_raw_mean"
RAW_MEAN_HIGH = Levels(_RAW_MEAN, (("info", 1.2), ("critical", 2.0)), GUIDE)
RAW_MEAN_LOW = Levels(_RAW_MEAN, (("info", 0.8), ("critical", 0.5)), GUIDE, is_floor=True)
MEAN_LOW = Levels(f"{_CORR}rollout_is_mean", (("warning", 0.5),), GUIDE, is_floor=True)
#: Mean bounded weight that says the log-probs are of another model.
MEAN_VANISHED = Levels(f"{_CORR}rollout_is_mean", (("critical", 0.1),), TRL, is_floor=True)
ESS = Levels(f"{_CORR}rollout_is_eff_sample_size", (("info", 0.5), ("critical", 0.3)), GUIDE, is_floor=True)
RAW_ESS = Levels(f"{_CORR}rollout_is_raw_eff_sample_size", (("warning", 0.3),), OWN, is_floor=True)
WEIGHT_STD = Levels(f"{_CORR}rollout_is_std", (("warning", 1.0),), VERL)
RATIO_HIGH = Levels(f"{_CORR}rollout_is_ratio_fraction_high", (("warning", 0.1),), OWN)
#: Tokens from which a product of ratios is called long.
LONG_RESPONSE = 100.0
#: Share of a batch's sequences whose weight is only the clamp.
SATURATED_SHARE = 0.01
#: Σ |log ρ| of a typical response (tokens × k3) from which its weight is only the clamp.
CLAMP = 20.0
#: Weights within this of 1 are taken for exactly 1, and k3 below it for equal policies.
EXACT = 1e-9
#: The raw effective sample size falls to this share of its start and below that value ...
ESS_FALL = (0.7, 0.5)
#: ... while the gradient norm grows by this factor, or spikes at least so often.
COLLAPSE_NORM, COLLAPSE_SPIKES = 2.0, 2

# --- rejection, clipping -----------------------------------------------------------------------
MASKED = Levels(f"{_CORR}rollout_rs_masked_fraction", (("info", 0.3), ("critical", 0.5)), GUIDE)
CLIPPED_ON_POLICY = Levels("actor/pg_clipfrac", (("warning", 0.05),), OWN)
#: Rejection gets blind: it falls to this share of a start of at least that much ...
BLIND_FALL, BLIND_START = 0.7, 0.02
#: ... while the gap grows by this factor, beyond its mildest level.
BLIND_GROWTH = 2.0

# --- samples that come late, or not at all --------------------------------------------------------
STALENESS = Levels("training/staleness_max", (("warning", 8.0),), FIELD)
#: Dropped samples grow by this factor, to at least this share of a batch.
DROPPED_GROWTH, DROPPED_SHARE = 2.0, 0.05
#: |mean ratio − 1| and |ppo_kl| where the policy cannot have moved.
RATIO_ON_POLICY = Levels("actor/ppo_ratio_mean", (("warning", 1e-3),), LOGIC, absolute=True)
PPO_KL_ON_POLICY = Levels("actor/ppo_kl", (("warning", 1e-3),), LOGIC, absolute=True)
#: Grading that takes so many times its median and that share of the step, on so many steps and that share
#: of them.
SLOW_GRADING_MEDIANS, SLOW_GRADING_SHARE, SLOW_GRADING_COUNT, SLOW_GRADING_STEPS = 3.0, 0.3, 3, 0.05
IDLE = Levels("perf/trainer_idle_fraction", (("warning", 0.3),), OWN)
FAILED = tuple(
    Levels(key, (("warning", 0.05), ("critical", 0.25)), FIELD)
    for key in ("rollout/error_fraction", "rollout/empty_fraction", "reward/error_fraction")
)

# --- update -------------------------------------------------------------------------------------
GRAD_NORM = Levels("actor/grad_norm", (("warning", 10.0),), FIELD, relative=True)
#: A spike is both this many robust standard deviations and this many medians above the steps before.
SPIKE_SIGMAS, SPIKE_MEDIANS = 8.0, 3.0
#: Steps before that a spike is compared with: at most, and at least.
SPIKE_HISTORY, SPIKE_MIN_HISTORY = 51, 21
#: From this share of the steps, and this many of them, spikes are a warning and not a remark.
SPIKE_SHARE, SPIKE_COUNT = 0.01, 3
ZERO_GRADIENT_SHARE = 0.4
#: A share of groups or tokens from which it is all of them.
ALL_OF_THEM = 0.99
NONFINITE_WARNING_SHARE, NONFINITE_CRITICAL_SHARE = 0.01, 0.1
#: |pg_loss| below this with a gradient norm above that is the healthy cancellation.
PG_LOSS_ZERO, GRAD_NORM_NONZERO = 0.01, 1e-6
REF_KL = tuple(
    Levels(key, (("warning", 0.5), ("critical", 2.0)), FIELD)
    for key in ("actor/kl_loss", "actor/reward_kl_penalty")
)
EXPLAINED = Levels("critic/vf_explained_var", (("warning", 0.1),), FIELD, is_floor=True)
#: Steps a critic is given to learn.
CRITIC_STEPS = 40

# --- rewards, lengths, entropy ------------------------------------------------------------------
ZERO_SPREAD = Levels("reward/zero_spread_groups", (("warning", 0.5), ("critical", 0.75)), FIELD)
ZERO_REWARD_STEPS = 20
TRUNCATED = Levels("response_length/clip_ratio", (("info", 0.05), ("warning", 0.1), ("critical", 0.3)), FIELD)
ENTROPY = Levels("actor/entropy", (("warning", 0.01),), FIELD, is_floor=True)
#: Entropy that fell to this share of its start, over at least so many steps, ...
ENTROPY_SHARE, ENTROPY_STEPS = 0.5, 40
#: ... while the reward gained less than this share of its range.
FLAT_REWARD = 0.05
#: Mean reward, as a share of its range, from which the data counts as learned, and as mostly right.
LEARNED, MOSTLY_RIGHT = 0.9, 0.5
#: Share of the steps that make up either end of a run.
ENDS_SHARE = 0.1
#: Responses that got longer by this factor while validation gained less than `FLAT_REWARD`.
LENGTH_GROWTH = 1.5
#: Validations that make up either end of a run, and that it takes at least.
VAL_ENDS, VAL_MIN = 2, 4
#: Gain of the training reward minus gain of the validation reward, in shares of the reward's range.
HACKING_GAP: tuple[tuple[Severity, float], ...] = (("warning", 0.15), ("critical", 0.30))
#: Entropy, length and gradient norm rise together.
GIBBERISH = (Move("actor/entropy", 1.5), Move("response_length/mean", 1.3), Move("actor/grad_norm", 2.0))
