"""Rules about the gap between the two policies, before anything corrects for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Remedy, Severity, Skipped, rule
from rlctl.diagnose.signals import Crossing, change_evidence, crossing, trend
from rlctl.diagnose.table import RunLog, Series

_STALENESS = "training/staleness_max"
_LR = "actor/lr"
#: Measures of the same gap, the most telling first.
GAPS = (th.K3.key, th.LOG_PROB_GAP.key, th.PROBS_GAP.key)
_MASKED, _LENGTH = th.MASKED.key, "response_length/mean"
_ENTROPY, _FAILED = th.SAMPLED.key, "reward/error_fraction"
_TRAINING_PPL, _ROLLOUT_PPL = "rollout_corr/training_log_ppl", "rollout_corr/rollout_log_ppl"


@rule(
    "probability-gap",
    "both policies give sampled tokens the same probability",
    needs=(th.PROBS_GAP.key,),
    uses=(_STALENESS,),
)
def probability_gap(run: RunLog) -> Finding | Skipped | None:
    """The two engines give the same tokens different probabilities."""
    if not run.gap_is_mismatch:
        return mixed(run, th.PROBS_GAP.key)
    crossed = crossing(run.table.series(th.PROBS_GAP.key), th.PROBS_GAP)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"the probabilities of the same tokens differ by {crossed.worst:.3g} on average {crossed.where}",
        (crossed.evidence,),
        "rollout engine and trainer compute in different precision or with different kernels (vLLM's cascade "
        "attention at long contexts is one)",
        th.PROBS_GAP.source,
        (*remedy.same_precision(run), _no_cascade(), remedy.find_the_cause()),
        "medium",
        "the gap is pure mismatch in this mode, but the log does not say where it comes from",
    )


@rule(
    "policy-gap",
    "distance between sampling and trained policy",
    one_of=(th.KL.key, th.K3.key, th.LOG_PROB_GAP.key),
    uses=(_STALENESS,),
)
def policy_gap(run: RunLog) -> Finding | Skipped | None:
    """The KL between the sampling and the trained policy is large, or their log-probs differ much."""
    k3 = th.K3
    if not run.gap_is_mismatch:  # only as large as no progress is either, and where no kl says so
        k3 = replace(k3, tiers=k3.tiers[-1:] if th.KL.key not in run.table.columns else ())
    crossed = crossing(run.table.series(th.KL.key), th.KL)
    if crossed is None and k3.tiers:
        crossed = crossing(run.table.series(k3.key), k3)
    if crossed is None and run.gap_is_mismatch:
        crossed = _log_prob_mismatch(run)
    if crossed is None:
        return None
    if run.gap_is_mismatch:
        cause = "rollout engine and trainer differ: kernel, precision, parallelism, or stale weights"
        remedies = (*remedy.same_precision(run), remedy.find_the_cause())
        why = "the gap is pure mismatch in this mode, but the log does not say where it comes from"
    else:
        cause = "rollout engine and trainer differ, or the policy moves far while it uses up one batch"
        remedies = remedy.gentler(run)
        why = "the logged gap holds the policy's own progress too, or nothing tells"
    return Finding(
        crossed.severity,
        f"trained and sampling policy are {crossed.worst:.3g} nats per token apart {crossed.where}",
        (crossed.evidence,),
        cause,
        th.KL.source,
        (*remedies, *remedy.correct_tokens(run)),
        "medium",
        why,
    )


def _log_prob_mismatch(run: RunLog) -> Crossing | None:
    """Of logs without a KL; what no mismatch of implementations gives is the matter of `stale-weights`."""
    series = run.table.series(th.LOG_PROB_GAP.key)
    if len(run.table.series(th.K3.key)) or crossing(series, th.LOG_PROB_GAP) is not None:
        return None
    return crossing(series, th.LOG_PROB_MISMATCH)


@rule(
    "sampled-otherwise",
    "samples are as likely as the policy's entropy says",
    needs=(_TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY),
    uses=(_FAILED,),
)
def sampled_otherwise(run: RunLog) -> Finding | None:
    """Both sides agree on the samples' log-probs, but draws from the policy would be likelier, or less so.

    The mean of −log π over draws from π is its entropy. The ratio ρ cannot see a temperature that the
    engine applies and does not report: both log-probs are right, and the samples are another policy's.
    """
    steps, (ours, theirs, entropy) = run.table.aligned(_TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY)
    nats = ours - entropy
    # Where the log-probs differ as well other rules know more; a failed sample is in one mean only.
    counts = (np.abs(nats) > th.SAMPLED_NATS) & (np.abs(ours - theirs) < th.SAMPLED_GAP * np.abs(nats))
    if (run.table.series(_FAILED).values > 0).any():
        return None
    positive = np.maximum(np.stack([ours, entropy]), th.SAMPLED_NATS)
    off = np.where(counts, np.abs(np.log(positive[0] / positive[1])), 0.0)
    crossed = crossing(Series(steps, off), th.SAMPLED)
    if crossed is None:
        return None
    apart = float(np.median(nats[counts]))
    hotter, figure = apart > 0, f"−log π of the samples is {apart:+.2g} nats from it"
    return Finding(
        crossed.severity,
        f"sampled tokens are {'less' if hotter else 'more'} likely than draws from the policy would be",
        (Evidence(_ENTROPY, figure, crossed.first_step, crossed.last_step),),
        f"the engine samples {'hotter' if hotter else 'colder'} than it reports: another temperature, top-p "
        "or top-k, those of the model's generation config for one",
        th.SAMPLED.source,
        (remedy.by_hand("give the engine the trainer's temperature, and no generation config"),
         remedy.find_the_cause()),
        "medium",
        "both log-probs agree, so the sampling differs; responses of unequal length move the figure a little",
    )  # fmt: skip


@rule(
    "token-error",
    "no token is off by a factor, and none gets worse",
    needs=(th.TOKEN_ERROR.key,),
    beside=lambda run: (
        "`policy-gap` judges the same gap"
        if th.K3.key in run.table.columns and th.TOKEN_ERROR.key not in run.table.columns
        else ""
    ),
)
def token_error(run: RunLog) -> Finding | Skipped | None:
    """The mean factor between both policies' token probabilities is large, or grows."""
    series = run.table.series(th.TOKEN_ERROR.key)
    crossed = _excess(series)
    rise = _rising_error(series) if crossed is None or crossed.excuse else None
    severity: Severity = "warning"
    if rise is not None:
        what, evidence = "the factor by which token probabilities are off keeps rising", rise
    elif crossed is not None:
        severity, evidence = crossed.severity, crossed.evidence
        what = f"token probabilities are off by ×{crossed.worst:.3g} {crossed.where}"
    else:
        return None
    return Finding(
        severity,
        what,
        (evidence,),
        "weights reach the engine incompletely or late, or its tensor-parallel kernels differ",
        th.TOKEN_ERROR.source,
        (remedy.by_hand("score a fixed sequence on both sides after every hand-over of weights"),),
        "medium",
        "bad hand-over and kernels look alike in this figure",
    )


def _excess(series: Series) -> Crossing | None:
    """The level that the factor crossed; how far that is from the start is judged by the part above 1."""
    tiers = tuple((severity, level - 1.0) for severity, level in th.TOKEN_ERROR.tiers)
    crossed = crossing(Series(series.steps, series.values - 1.0), replace(th.TOKEN_ERROR, tiers=tiers))
    return crossed and replace(crossed, worst=crossed.worst + 1.0, limit=crossed.limit + 1.0)


def _rising_error(series: Series) -> Evidence | None:
    rise = trend(series)
    if rise is None or not rise.rises or rise.end - 1.0 < th.TOKEN_ERROR_EXCESS:
        return None
    if rise.end - 1.0 < th.TOKEN_ERROR_RISE * max(rise.start - 1.0, 0.0):
        return None
    return change_evidence(th.TOKEN_ERROR.key, rise.start, rise.end, series.steps)


@rule(
    "frozen-gap",
    "the gap does not grow while nothing is learned",
    one_of=GAPS,
    uses=(_LR,),
    min_steps=th.FROZEN_STEPS,
)
def frozen_gap(run: RunLog) -> Finding | Skipped | None:
    """A mismatch that grows with a learning rate of zero is no off-policyness."""
    key = most_logged(run, GAPS)
    series = run.table.series(key)
    if run.facts.lr != 0.0:
        if not len(run.table.series(_LR)):
            known = run.facts.lr is not None
            return Skipped("the policy learns") if known else Skipped("not logged", (_LR,))
        steps, (lr, gap) = run.table.aligned(_LR, key)
        series = Series(steps[lr == 0.0], gap[lr == 0.0])
    if len(series) < th.FROZEN_STEPS:
        return Skipped("the policy learns: a growing gap may be progress")
    rise = trend(series)
    if rise is None or not rise.rises or rise.end < th.FROZEN_GROWTH * max(rise.start, th.EXACT):
        return None
    return Finding(
        "critical",
        "the gap between the policies grows although the learning rate is 0",
        (change_evidence(key, rise.start, rise.end, series.steps),),
        "a fault of the engine or of the scoring: caches, memory, or weights that are handed over wrongly",
        th.LOGIC,
        (remedy.find_the_cause(),),
        "high",
        "a policy that does not learn cannot leave its sampler",
    )


@rule(
    "stale-weights",
    "the engine's log-probs are of the policy in training",
    one_of=(th.LOG_PROB_GAP.key, th.MEAN_VANISHED.key),
    uses=(_MASKED, _LENGTH),
    beside=lambda run: (
        "`policy-gap` judges the same gap"
        if run.facts.rollout_is == "off" and th.LOG_PROB_GAP.key not in run.table.columns
        else ""
    ),
)
def stale_weights(run: RunLog) -> Finding | Skipped | None:
    """Log-probs so far apart that they are of two different models."""
    crossed = crossing(run.table.series(th.LOG_PROB_GAP.key), th.LOG_PROB_GAP)
    if crossed is not None:
        what = f"log-probs of the same tokens differ by {crossed.worst:.3g} nats on average {crossed.where}"
    elif (crossed := _vanished_weights(run)) is not None:
        what = f"importance weights are {crossed.worst:.2g} on average {crossed.where}"
    else:
        return None
    hand_over = remedy.by_hand(
        "hand the weights over after every update, and let the engine report the log-probs it sampled from",
        verl="actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
        trl="steps_per_generation=<gradient_accumulation_steps>",
    )
    return Finding(
        "critical",
        what,
        (crossed.evidence,),
        "the engine samples with old weights, or reports log-probs before temperature and top-p",
        th.LOG_PROB_GAP.source,
        (*remedy.fresher(run, fully=True), hand_over, remedy.find_the_cause()),
        "medium",
        "old weights and the wrong kind of log-probs look alike in this figure",
    )


def _vanished_weights(run: RunLog) -> Crossing | None:
    """Weights near zero among the survivors; products over long responses get there by themselves."""
    lengths = run.table.series(_LENGTH).values
    if run.facts.rollout_is == "sequence" and (not len(lengths) or np.median(lengths) > th.LONG_RESPONSE):
        return None
    series = run.table.series(th.MEAN_VANISHED.key)
    if len(run.table.series(_MASKED)):
        steps, (mean, masked) = run.table.aligned(th.MEAN_VANISHED.key, _MASKED)
        series = Series(steps, mean / np.maximum(1.0 - masked, mean.clip(min=1e-12)))
    return crossing(series, th.MEAN_VANISHED)


def most_logged(run: RunLog, keys: tuple[str, ...]) -> str:
    """The metric with the most values; the first of equals."""
    return max(keys, key=lambda key: len(run.table.series(key)))


def _no_cascade() -> Remedy:
    return remedy.by_hand(
        "turn the engine's cascade attention off, or upgrade the engine",
        verl="+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
    )


def mixed(run: RunLog, key: str) -> Skipped:
    """Why a rule on pure mismatch has nothing to go by."""
    if run.facts.bypass_mode is None and run.facts.updates_per_batch is None:
        return Skipped(f"whether {key} is mismatch or progress depends on the spec", ("spec.yaml",))
    return Skipped("the logged gap includes the policy's own progress (bypass mode or stale samples)")


RULES = (
    probability_gap,
    policy_gap,
    sampled_otherwise,
    token_error,
    frozen_gap,
    stale_weights,
)
