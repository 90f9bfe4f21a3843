"""Rules about the gap between trainer and rollout engine, before correction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Skipped
from rlctl.diagnose.rule import Detection, Rule, detect_crossing, of_crossing
from rlctl.diagnose.signals import change_evidence, crossing, evidence_over, growth, steps_text
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import Levels

_LR = "actor/lr"
_ENTROPY, _FAILED = "actor/entropy", "reward/error_fraction"
_PPO_KL, _CLIPPED = "actor/ppo_kl", "actor/pg_clipfrac"
_TRAINING_PPL, _ROLLOUT_PPL = "rollout_corr/training_log_ppl", "rollout_corr/rollout_log_ppl"

LOG_PROB_MISMATCH = Levels(th.LOG_PROB_GAP.key, (("warning", 0.03), ("critical", 0.15)), relative=True)
#: Levels of |log(mean −log π of the samples / entropy)|, which is 0 where the samples are draws from π.
SAMPLED = Levels(_ENTROPY, (("warning", 0.34), ("critical", 0.69)))
#: Minimum difference between the mean −log π and the entropy, in nats per token, and the share of it by which
#: the log-probs of trainer and engine may differ.
SAMPLED_NATS, SAMPLED_GAP = 0.1, 0.25
#: Mean −log π, in nats per token, below which engine log-probs of exactly 0 may be right.
SURE_NATS = 0.01
TOKEN_ERROR = Levels("mismatch/token_mult_prob_error", (("warning", 1.05), ("critical", 2.0)), relative=True)
#: The token error rises if its part above 1 grows by this factor, to at least the second value.
TOKEN_ERROR_RISE, TOKEN_ERROR_EXCESS = 2.0, 0.02
#: Limits at the first step. (Tests of the frameworks require 1e-9 and 1e-10, which only deterministic kernels
#: reach.)
FIRST_PPO_KL, FIRST_CLIPFRAC = 1e-3, 0.01
#: Range of |kl| per token for an instruct model prompted without its chat template (near 0.8).
TEMPLATE_KL = (0.5, 1.2)
#: Growth factor of a gap that grows without learning, and minimum number of steps.
FROZEN_GROWTH, FROZEN_STEPS = 1.5, 20
#: Mean bounded weight below which the log-probs belong to other weights.
MEAN_VANISHED = Levels("rollout_corr/rollout_is_mean", (("critical", 0.1),), is_floor=True)

_PURE = "the gap is pure mismatch in this mode, but the log does not show where it comes from"


def _mixed(run: RunLog, key: str) -> Skipped | None:
    """The reason if `key` does not measure mismatch alone; None if it does."""
    if run.gap_is_mismatch:
        return None
    if run.facts.bypass_mode is None and run.facts.updates_per_batch is None:
        return Skipped(f"whether {key} is mismatch or progress depends on the spec", ("spec.yaml",))
    return Skipped("the logged gap includes the policy's own progress (bypass mode or stale samples)")


@Rule(
    "probability-gap", thresholds=th.PROBS_GAP, source=th.OWN, sure=("medium", _PURE),
    needs=(th.PROBS_GAP.key,), uses=th.STALENESS,
    signal="`training/rollout_probs_diff_mean`, where the gap is pure mismatch¹; relative",
    cause="rollout engine and trainer compute in different precision or with different kernels (vLLM's "
    "cascade attention at long contexts is one)",
    fixes=(
        fix.same_precision,
        fix.by_hand(
            "disable the engine's cascade attention, or upgrade the engine",
            verl="+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
        ),
        fix.FIND_THE_CAUSE,
    ),
)  # fmt: skip
def probability_gap(run: RunLog) -> Detection | Skipped | None:
    """Both policies give sampled tokens the same probability."""
    what = "the probabilities of the same tokens differ by {worst:.3g} on average {where}"
    return _mixed(run, th.PROBS_GAP.key) or detect_crossing(run, th.PROBS_GAP, what)


@Rule(
    "policy-gap", source=th.FIELD, uses=th.STALENESS,
    signal="`rollout_corr/kl`; where the gap is pure mismatch¹ `rollout_corr/k3_kl`, or without it "
    "`mismatch/log_prob_abs_diff_mean`, both relative",
    thresholds="— / k3 > 0.001, difference > 0.03 / \\|kl\\|, or k3⁴, > 0.1, difference > 0.15",
    cause="rollout engine and trainer differ, samples are stale, or the policy moves far on one batch",
    fixes=(fix.gentler, fix.correct_tokens),
    sure=("medium", "the logged gap includes the policy's own progress, or this is unknown"),
    one_of=(th.KL.key, th.K3.key, th.LOG_PROB_GAP.key),
)  # fmt: skip
def policy_gap(run: RunLog) -> Detection | Skipped | None:
    """Sampling and trained policy are close."""
    k3 = th.K3
    if not run.gap_is_mismatch:  # only the level that progress does not reach, and only where no kl is logged
        k3 = replace(k3, tiers=k3.tiers[-1:] if th.KL.key not in run.table.columns else ())
    crossed = crossing(run.table.series(th.KL.key), th.KL) or crossing(run.table.series(k3.key), k3)
    gap = run.table.series(th.LOG_PROB_GAP.key)
    if (
        crossed is None
        and run.gap_is_mismatch
        and not len(run.table.series(k3.key))
        and crossing(gap, th.LOG_PROB_GAP) is None
    ):  # `stale-weights` reports a gap over LOG_PROB_GAP, which no mismatch reaches
        crossed = crossing(gap, LOG_PROB_MISMATCH)
    if crossed is None:
        return None
    found = of_crossing(crossed, "trained and sampling policy are {worst:.3g} nats per token apart {where}")
    if not run.gap_is_mismatch:
        return found
    return replace(
        found,
        cause="rollout engine and trainer differ: kernel, precision, parallelism, or stale weights",
        fixes=(*fix.same_precision(run), fix.FIND_THE_CAUSE, *fix.correct_tokens(run)),
        sure=("medium", _PURE),
    )


@Rule(
    "sampled-otherwise", thresholds="— / × 1.4 or ÷ 1.4 / × 2 or ÷ 2", source=th.OWN,
    needs=(_TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY), uses=(_FAILED,),
    signal="mean −log π of the samples (`rollout_corr/training_log_ppl`) over `actor/entropy`, if they "
    f"differ by {SAMPLED_NATS:g} nats and both sides agree on the log-probs",
    cause="the engine samples at another temperature, top-p or top-k than it reports, for example from the "
    "model's generation config",
    fixes=(
        fix.by_hand("give the engine the trainer's temperature, and no generation config"), fix.FIND_THE_CAUSE
    ),
    sure=(
        "medium", "both log-probs agree, so the sampling differs; unequal lengths shift the figure a little"
    ),
)  # fmt: skip
def sampled_otherwise(run: RunLog) -> Detection | None:
    """Samples are as likely as the policy's entropy implies.

    The mean of −log π over draws from π is its entropy. The ratio ρ does not show a temperature that the
    engine applies and does not report: both log-probs are right, but the samples come from another
    distribution.
    """
    steps, (ours, theirs, entropy) = run.table.aligned(_TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY)
    nats = ours - entropy
    # Where the log-probs differ too, other rules apply; only one of the means includes failed samples.
    counts = (np.abs(nats) > SAMPLED_NATS) & (np.abs(ours - theirs) < SAMPLED_GAP * np.abs(nats))
    if (run.table.series(_FAILED).values > 0).any():
        return None
    positive = np.maximum(np.stack([ours, entropy]), SAMPLED_NATS)
    off = np.where(counts, np.abs(np.log(positive[0] / positive[1])), 0.0)
    crossed = crossing(Series(steps, off), SAMPLED)
    if crossed is None:
        return None
    apart = float(np.median(nats[counts]))
    what = f"sampled tokens are {'less' if apart > 0 else 'more'} likely than tokens drawn from the policy"
    seen = replace(crossed.evidence, figure=f"the samples' −log π is {apart:+.2g} nats from it")
    return Detection(crossed.severity, what, (seen,))


@Rule(
    "missing-log-probs", thresholds="— / — / on a step", source=th.LOGIC,
    needs=(_ROLLOUT_PPL,), uses=(_TRAINING_PPL,),
    signal="engine's mean log-prob (`rollout_corr/rollout_log_ppl`) exactly 0, and the trainer's not",
    cause="the engine reports zeros instead of log-probs: every importance weight is wrong",
    fixes=(
        fix.by_hand(
            "let the engine return the log-probs of the sampled tokens",
            verl="actor_rollout_ref.rollout.calculate_log_probs=True",
        ),
    ),
    sure=("high", "no sampled response has probability 1 at every token"),
)  # fmt: skip
def missing_log_probs(run: RunLog) -> Detection | None:
    """The engine reports log-probs."""
    steps, (theirs, ours) = run.table.aligned(_ROLLOUT_PPL, _TRAINING_PPL)
    zero = steps[(theirs == 0.0) & (np.abs(ours) > SURE_NATS)]
    if not len(zero):
        return None
    what = f"the engine's log-probs are exactly 0 in {steps_text(int(zero[0]), int(zero[-1]))}"
    seen = evidence_over(zero, _ROLLOUT_PPL, f"exactly 0 on {len(zero):,} step(s)")
    return Detection("critical", what, (seen,))


@Rule(
    "token-error", source=th.NEMO, needs=(TOKEN_ERROR.key,),
    signal="`mismatch/token_mult_prob_error`: level (relative), and a rise",
    thresholds=f"— / > 1.05, or the part above 1 doubled to > {TOKEN_ERROR_EXCESS:g} / > 2",
    cause="weights reach the engine incompletely or late, or its tensor-parallel kernels differ",
    fixes=(fix.by_hand("score a fixed sequence on both sides after every weight synchronization"),),
    sure=("medium", "incomplete weights and different kernels have the same effect on this figure"),
    not_applicable=lambda run: (
        "`policy-gap` covers the same gap"
        if th.K3.key in run.table.columns and TOKEN_ERROR.key not in run.table.columns
        else ""
    ),
)  # fmt: skip
def token_error(run: RunLog) -> Detection | None:
    """Token probabilities agree within a few percent, and the error does not grow."""
    series = run.table.series(TOKEN_ERROR.key)
    excess = Series(series.steps, series.values - 1.0)  # the part above 1 is compared with the start
    tiers = tuple((severity, level - 1.0) for severity, level in TOKEN_ERROR.tiers)
    crossed = crossing(excess, replace(TOKEN_ERROR, tiers=tiers))
    if crossed is None or crossed.remark:
        rise = growth(excess, TOKEN_ERROR_RISE, TOKEN_ERROR_EXCESS)
        if rise is not None:
            seen = change_evidence(TOKEN_ERROR.key, rise.start + 1.0, rise.end + 1.0, series.steps)
            what = "the factor between the policies' token probabilities keeps rising"
            return Detection("warning", what, (seen,))
    if crossed is None:
        return None
    crossed = replace(crossed, worst=crossed.worst + 1.0, limit=crossed.limit + 1.0)
    return of_crossing(crossed, "token probabilities differ by a factor of {worst:.3g} {where}")


@Rule(
    "first-step", source=th.SLIME, one_of=(_PPO_KL, _CLIPPED, th.LOG_PROB_GAP.key),
    facts=("updates_per_batch", "bypass_mode"),
    signal="first step of a run with one update per batch²: `actor/ppo_kl`, `actor/pg_clipfrac`, "
    "`mismatch/log_prob_abs_diff_mean`",
    thresholds=f"— / \\|kl\\| > {FIRST_PPO_KL:g}, > {FIRST_CLIPFRAC:g}, > {th.FIRST_LOG_PROB_GAP:g} / —",
    cause="the engine holds other weights than the trainer, or one of them is not deterministic",
    fixes=(fix.by_hand("stop, and correct this before you continue"), fix.FIND_THE_CAUSE),
    sure=("high", "before the first update only the implementations can differ"),
)  # fmt: skip
def first_step(run: RunLog) -> Detection | Skipped | None:
    """At the first step trainer and engine hold the same policy."""
    if run.table.steps[0] > th.FIRST_STEP:
        return Skipped("the log does not begin at the run's start")
    if run.facts.updates_per_batch != 1:
        return Skipped("several updates per batch: the first step's figures include progress")
    limits = {th.LOG_PROB_GAP.key: th.FIRST_LOG_PROB_GAP}
    if not run.facts.bypass_mode:  # there π_old is another policy
        limits |= {_PPO_KL: FIRST_PPO_KL, _CLIPPED: FIRST_CLIPFRAC}
    if not any(key in run.table.columns for key in limits):
        return Skipped("in bypass mode KL and clipping include the gap of the engines")
    found = []
    for key, limit in limits.items():
        series = run.table.series(key)  # begins after step 0 if only a validation was logged there
        if len(series) and series.steps[0] <= th.FIRST_STEP and abs(series.values[0]) > limit:
            found.append(evidence_over(series.steps[:1], key, f"{series.values[0]:.3g}, over {limit:g}"))
    what = "at the first step, before anything was learned, the two policies differ"
    return Detection("warning", what, tuple(found)) if found else None


@Rule(
    "template", source=th.FIELD, needs=(th.KL.key,), uses=th.STALENESS,
    signal="first step's `rollout_corr/kl`, where the gap is pure mismatch¹",
    thresholds=f"— / — / between {TEMPLATE_KL[0]:g} and {TEMPLATE_KL[1]:g}",
    cause="the chat template, or special tokens, are applied on one side only",
    fixes=(fix.by_hand("compare the token ids of one prompt on both sides"), fix.FIND_THE_CAUSE),
    sure=("medium", "a wrong temperature or other weights can cause a KL of this size too"),
)  # fmt: skip
def template(run: RunLog) -> Detection | Skipped | None:
    """Both sides read the same prompt."""
    series = run.table.series(th.KL.key)
    if series.steps[0] > th.FIRST_STEP:
        return Skipped("the log does not begin at the run's start")
    if mixed := _mixed(run, th.KL.key):
        return mixed
    kl, (low, high) = float(abs(series.values[0])), TEMPLATE_KL
    if not low <= kl <= high:
        return None
    figure = f"{series.values[0]:.3g}, between {low:g} and {high:g}"
    what = f"the first step's KL is {kl:.2g} nats per token: the two sides probably read different prompts"
    return Detection("critical", what, (evidence_over(series.steps[:1], th.KL.key, figure),))


@Rule(
    "frozen-gap", thresholds=f"— / — / × {FROZEN_GROWTH:g}", source=th.LOGIC,
    one_of=th.GAPS, uses=(_LR,), min_steps=FROZEN_STEPS,
    signal="trend of the gap while the learning rate is 0",
    cause="a fault of the engine or of the scoring: caches, memory, or wrong weight synchronization",
    fixes=(fix.FIND_THE_CAUSE,),
    sure=("high", "a policy that does not learn cannot move away from its sampler"),
)  # fmt: skip
def frozen_gap(run: RunLog) -> Detection | Skipped | None:
    """The gap does not grow while nothing is learned."""
    key = run.table.most_logged(th.GAPS)
    series = run.table.series(key)
    if run.facts.lr != 0.0:
        if not len(run.table.series(_LR)):
            return Skipped("not logged", (_LR,)) if run.facts.lr is None else Skipped("the policy learns")
        steps, (lr, gap) = run.table.aligned(_LR, key)
        series = Series(steps[lr == 0.0], gap[lr == 0.0])
    if len(series) < FROZEN_STEPS:
        return Skipped("the policy learns: a growing gap may be progress")
    rise = growth(series, FROZEN_GROWTH, FROZEN_GROWTH * th.EXACT)
    if rise is None:
        return None
    what = "the gap between the policies grows although the learning rate is 0"
    return Detection("critical", what, (change_evidence(key, rise.start, rise.end, series.steps),))


@Rule(
    "stale-weights", thresholds="— / — / > 1; < 0.1", source=th.TRL,
    one_of=(th.LOG_PROB_GAP.key, MEAN_VANISHED.key), uses=(th.MASKED.key, th.LENGTH),
    signal="`mismatch/log_prob_abs_diff_mean`; mean bounded weight without rejected samples "
    f"(not of products over {th.LONG_RESPONSE:g} tokens and more)",
    cause="the engine samples with old weights, or reports log-probs before temperature and top-p",
    fixes=(
        partial(fix.fresher, fully=True),
        fix.by_hand(
            "synchronize the weights after every update; let the engine report the log-probs it sampled from",
            verl="actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
            trl="steps_per_generation=<gradient_accumulation_steps>",
        ),
        fix.FIND_THE_CAUSE,
    ),
    sure=("medium", "old weights and the wrong kind of log-probs have the same effect on this figure"),
    not_applicable=lambda run: (
        "`policy-gap` covers the same gap"
        if run.facts.rollout_is == "off" and th.LOG_PROB_GAP.key not in run.table.columns
        else ""
    ),
)  # fmt: skip
def stale_weights(run: RunLog) -> Detection | None:
    """The engine's log-probs are those of the policy in training."""
    what = "log-probs of the same tokens differ by {worst:.3g} nats on average {where}"
    if found := detect_crossing(run, th.LOG_PROB_GAP, what):
        return found
    # Not for products over long responses, which are near zero without a fault. Where the level is unknown,
    # only products are so small although the log-probs, which are logged too, agree.
    lengths, level = run.table.series(th.LENGTH).values, run.facts.rollout_is
    are_products = level == "sequence" or (level is None and len(run.table.series(th.LOG_PROB_GAP.key)) > 0)
    if are_products and (not len(lengths) or np.median(lengths) > th.LONG_RESPONSE):
        return None
    what = "importance weights are {worst:.2g} on average {where}"
    return detect_crossing(run, MEAN_VANISHED, what, among_survivors(run, MEAN_VANISHED.key))


def among_survivors(run: RunLog, key: str) -> Series:
    """Converts a mean over all samples, with rejected ones as 0, to the mean over survivors, at most 1.

    verl computes these figures before rejection: they are returned as they are.
    """
    if run.facts.dialect == "verl" or not len(run.table.series(th.MASKED.key)):
        return run.table.series(key)
    steps, (mean, masked) = run.table.aligned(key, th.MASKED.key)
    return Series(steps, mean / np.maximum(1.0 - masked, mean.clip(min=1e-12)))
