"""Rules about the gap between trainer and rollout engine, before correction."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Severity, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, detect_crossing, of_crossing
from rlctl.diagnose.signals import (
    change_evidence,
    crossing,
    evidence_over,
    growth,
    steps_text,
)
from rlctl.diagnose.table import DumpEvidence, RunLog, Series
from rlctl.diagnose.thresholds import Levels

_ENTROPY, _LOG_PPL, _PPO_KL = "actor/entropy", "actor/log_ppl", "actor/ppo_kl"
_FAILED = "reward/error_fraction"
_TRAINING_PPL, _ROLLOUT_PPL = "rollout_corr/training_log_ppl", "rollout_corr/rollout_log_ppl"

_LENGTHS = ("response_length/min", "response_length/mean", "response_length/max")

LOG_PROB_MISMATCH = Levels(th.LOG_PROB_GAP.key, (("warning", 0.03), ("critical", 0.15)), relative=True)
#: Levels of |log(mean −log π of the samples / entropy)|, which is 0 where the samples are draws from π.
SAMPLED = Levels(_ENTROPY, (("warning", 0.34), ("critical", 0.69)))
#: Minimum difference between the mean −log π and the entropy, in nats per token, and the share of it by which
#: the log-probs of trainer and engine may differ.
SAMPLED_NATS, SAMPLED_GAP = 0.1, 0.25
#: Mean −log π, in nats per token, below which engine log-probs of exactly 0 may be right.
SURE_NATS = 0.01
TOKEN_ERROR = Levels(
    "mismatch/token_mult_prob_error", (("warning", 0.05), ("critical", 1.0)), relative=True
)  # of the part above 1
#: Mean bounded weight below which the log-probs belong to other weights.
MEAN_VANISHED = Levels("rollout_corr/rollout_is_mean", (("critical", 0.1),), is_floor=True)

#: Wealth at which the test of the sampler's log-probs is reported.
WEALTH: dict[Severity, float] = {"warning": 1e2, "critical": 1e6}
_LOG_WEALTH, _GUARANTEED = "rollout_corr/log_wealth", "rollout_corr/log_wealth_guaranteed"
#: Mean ratio of a step, and whether it is too far below 1 for a sampler of the whole vocabulary.
_UNIT_MEAN = "rollout_corr/unit_mean"
CUT = Levels("rollout_corr/unit_mean_cut", (("warning", 0.5),))

#: Factor from which a gap grows, and difference of probabilities that no precision reaches.
GROWN, FAR_PROBS = 5.0, 0.05
#: Level that the policy's own progress on a batch does not reach.
FAR_LOG_PROBS = Levels(th.LOG_PROB_GAP.key, (("warning", 0.5),))
#: Factor by which a gap of any kind must not grow, and the size, in nats per token, from which it counts
#: where the gap includes the policy's own progress.
TENFOLD, GROWN_NATS = 10.0, 0.01
#: The part of the log-ratio that only engine and trainer explain, and the share from which it explains a gap.
ENGINE_PART, MOSTLY_ENGINE = "rollout_corr/split/engine", 0.5
_APART = "trained and sampling policy are {worst:.3g} nats per token apart {where}"
_NO_CASCADE = fix.by_hand(
    "disable the engine's cascade attention, or upgrade the engine",
    verl="+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn=True",
)
_LOG_PROBS_OF_SAMPLING = fix.by_hand(
    "let the engine report the log-probs it sampled from, at the trainer's temperature",
    verl="actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
)


def _mixed(run: RunLog, key: str) -> Skipped | None:
    """The reason if `key` does not measure mismatch alone; None if it does."""
    if run.gap_is_mismatch:
        return None
    if run.facts.bypass_mode is None and run.facts.updates_per_batch is None:
        return Skipped(f"whether {key} is mismatch or progress depends on the spec", ("spec.yaml",))
    return Skipped("the logged gap includes the policy's own progress (bypass mode or stale samples)")


def _of_implementations(run: RunLog, found: Detection, series: Series, is_far: bool) -> Detection:
    """A detected gap that only the implementations can cause, with what causes one of its size and course."""
    change = growth(Series(series.steps, np.abs(series.values)))
    if change is not None and change.end > GROWN * change.start:
        cause = "the gap grows from near 0: new weights reach the engine late, in part, or not at all"
        fixes = (*fix.fresher(run, fully=True), fix.by_hand("check the weight synchronization"))
    elif is_far:
        cause = (
            "the gap is too large for kernels and precision: log-probs of another temperature, of other "
            "tokens, or of other weights"
        )
        fixes = (fix.FIND_THE_CAUSE, _LOG_PROBS_OF_SAMPLING)
    else:
        cause = (
            "rollout engine and trainer compute in different precision or with different kernels (vLLM's "
            "cascade attention at long contexts is one)"
        )
        fixes = (*fix.same_precision(run), _NO_CASCADE)
    more = () if fix.FIND_THE_CAUSE in fixes else (fix.FIND_THE_CAUSE,)
    doubt = "the gap is pure mismatch in this mode, but the log does not show where it comes from"
    return replace(
        found, cause=cause, fixes=(*fixes, *more, *fix.correct_tokens(run)), sure=("medium", doubt)
    )


@Rule("probability-gap", thresholds=th.PROBS_GAP, needs=(th.PROBS_GAP.key,), uses=th.STALENESS)
def probability_gap(run: RunLog) -> Detection | Skipped | None:
    """Both policies give sampled tokens the same probability."""
    mixed = _mixed(run, th.PROBS_GAP.key)
    if mixed:
        return mixed
    series = run.table.series(th.PROBS_GAP.key)
    crossed = crossing(series, th.PROBS_GAP)
    if crossed is None:
        return None
    found = of_crossing(crossed, "probabilities of the same tokens differ by {worst:.3g} on average {where}")
    return _of_implementations(run, found, series, crossed.worst > FAR_PROBS)


@Rule(
    "policy-gap",
    fixes=(fix.gentler, fix.correct_tokens),
    one_of=(th.KL.key, th.K3.key, th.LOG_PROB_GAP.key),
    uses=(*th.STALENESS, fix.RATE, "rollout_corr/split/<part>"),
)
def policy_gap(run: RunLog) -> Detection | Skipped | None:
    """Sampling and trained policy are close."""
    k3 = th.K3
    if not run.gap_is_mismatch:  # only the level that progress does not reach, and only where no kl is logged
        k3 = replace(k3, tiers=k3.tiers[-1:] if th.KL.key not in run.table.columns else ())
    crossed = crossing(run.table.series(th.KL.key), th.KL) or crossing(run.table.series(k3.key), k3)
    gap = run.table.series(th.LOG_PROB_GAP.key)
    has_k3 = len(run.table.series(k3.key)) > 0
    # `stale-weights` reports a gap over LOG_PROB_GAP, which no mismatch reaches
    if crossed is None and crossing(gap, th.LOG_PROB_GAP) is None:
        if not run.gap_is_mismatch:
            crossed = crossing(gap, FAR_LOG_PROBS)
        elif not has_k3:
            crossed = crossing(gap, LOG_PROB_MISMATCH)
    if crossed is None or crossed.severity == "info":
        return _growing_gap(run) or (of_crossing(crossed, _APART) if crossed else _not_judged(run))
    found = of_crossing(crossed, _APART)
    doubt = ""
    if engine_share(run) >= MOSTLY_ENGINE:
        doubt = "most of it was measured between engine and trainer, but not where it comes from"
    elif run.dumps is not None and run.dumps.wrong_sampler:
        doubt = "the samples do not have the log-probs of the weights that they name"
    if not run.gap_is_mismatch and doubt:
        series = run.table.series(crossed.key)
        found = _of_implementations(run, found, series, crossed.severity == "critical")
        return replace(found, sure=("medium", doubt))
    if not run.gap_is_mismatch:
        return found if crossed.key == th.KL.key else _doubted_of_few(run, found)
    return _of_implementations(run, found, run.table.series(crossed.key), crossed.severity == "critical")


def engine_share(run: RunLog) -> float:
    """Share of the squared log-ratio that is between engine and trainer; 0 where the parts are not logged."""
    parts = {key: run.table.series(key).values for key in run.table.matching("rollout_corr/split/<part>")}
    sizes = {key: max(0.0, float(values.mean())) for key, values in parts.items() if len(values)}
    total = sum(sizes.values())
    return sizes.get(ENGINE_PART, 0.0) / total if total > 0.0 else 0.0


def _doubted_of_few(run: RunLog, found: Detection) -> Detection:
    """A remark instead, where a few rows show a distance that stale samples may have and no age is known."""
    count = max(len(run.table.series(one.metric)) for one in found.evidence)
    has_age = any(len(run.table.series(key)) for key in th.STALENESS)
    if count >= th.MIN_STEPS or has_age:
        return found
    cause = "stale samples, the updates on a batch, or a difference of the two programs"
    doubt = "a few rows show neither how old the samples are nor whether the distance grows"
    missing = f"{th.STALENESS[1]} would show whether staleness explains it"
    remark = replace(found, severity="info", cause=cause, fixes=())
    return remark.with_doubt(("low", doubt), missing)


def _growing_gap(run: RunLog) -> Detection | None:
    """A gap that grows tenfold, while the learning rate does not."""
    rates = run.table.series(fix.RATE)
    rising = rates.steps[rates.values < rates.values.max(initial=0.0) / 2.0]
    for levels in (th.K3, th.KL, LOG_PROB_MISMATCH):
        series = run.table.series(levels.key)
        counts = ~np.isin(series.steps, rising)
        change = growth(Series(series.steps[counts], np.abs(series.values[counts])))
        least = LOG_PROB_MISMATCH.tiers[0][1] if levels is LOG_PROB_MISMATCH else th.K3.tiers[0][1]
        if levels is not LOG_PROB_MISMATCH and not run.gap_is_mismatch:
            least = GROWN_NATS
        if change is None or change.end < TENFOLD * change.start:
            continue
        if np.median(np.abs(series.values[-th.MIN_STEPS :])) < least:
            continue
        times = f"{change.end / change.start:.0f}-fold" if change.start else "from 0"
        message = (
            f"the gap between trained and sampling policy grows {times}, to {change.end:.2g} nats per token"
        )
        seen = change_evidence(levels.key, change.start, change.end, series.steps)
        cause = (
            "new weights reach the engine late, in part, or not at all, or batches move the policy further"
        )
        fixes = (
            fix.by_hand("check the weight synchronization: compare a run with another way of transfer"),
            *fix.fresher(run, fully=True),
            fix.FIND_THE_CAUSE,
        )
        doubt = "the gap grows, but the log does not show whether by the sync or by the updates"
        return Detection(
            severity="warning",
            what=message,
            evidence=(seen,),
            cause=cause,
            fixes=fixes,
            sure=("medium", doubt),
            since=change.since,
        )
    return None


def _not_judged(run: RunLog) -> Skipped | None:
    """Why a gap without a finding is not known to be right; None where its level was judged."""
    is_known = run.facts.bypass_mode is not None or run.facts.updates_per_batch is not None
    if is_known and any(len(run.table.series(key)) for key in (th.KL.key, th.K3.key)):
        return None
    key = run.table.most_logged((th.KL.key, th.K3.key, th.LOG_PROB_GAP.key))
    return _mixed(run, key)


@Rule(
    "sampled-otherwise",
    needs=(_TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY),
    uses=(_LOG_PPL, _PPO_KL, _FAILED, *_LENGTHS),
    signal=f"mean −log π of the samples over `actor/entropy`, if they differ by {SAMPLED_NATS:g} nats and "
    "both sides agree on the log-probs: `actor/log_ppl`, or else `rollout_corr/training_log_ppl`, less "
    "what the lengths of responses may explain",
    fixes=(
        fix.by_hand("give the engine the trainer's temperature, and no generation config"),
        fix.FIND_THE_CAUSE,
    ),
)
def sampled_otherwise(run: RunLog) -> Detection | Skipped | None:
    """Samples are as likely as the policy's entropy implies.

    The mean of −log π over draws from π is its entropy. The ratio ρ does not show a temperature that the
    engine applies and does not report: both log-probs are right, but the samples come from another
    distribution.
    """
    missing = tuple(key for key in _LENGTHS if not len(run.table.series(key)))
    if len(run.table.series(_LOG_PPL)):
        steps, (sampled, entropy, moved, ours, theirs) = run.table.aligned(
            _LOG_PPL, _ENTROPY, _PPO_KL, _TRAINING_PPL, _ROLLOUT_PPL
        )
        gap = np.maximum(np.abs(ours - theirs), np.abs(moved))
    elif missing:
        return Skipped("a mean over responses and one over tokens", missing)
    elif (run.table.series(_FAILED).values > 0).any():
        return Skipped("some samples failed: the two means are not of the same samples")
    else:
        steps, entropy, sampled, gap = _nearest_means(run)
    nats = sampled - entropy
    # Where the log-probs differ too, or the updates on a batch move them, other rules apply.
    counts = (np.abs(nats) > SAMPLED_NATS) & (gap < SAMPLED_GAP * np.abs(nats))
    positive = np.maximum(np.stack([sampled, entropy]), SAMPLED_NATS)
    off = np.where(counts, np.abs(np.log(positive[0] / positive[1])), 0.0)
    crossed = crossing(Series(steps, off), SAMPLED)
    if crossed is None:
        return None
    apart = float(np.median(nats[counts]))
    message = f"sampled tokens are {'less' if apart > 0 else 'more'} likely than tokens drawn from the policy"
    seen = replace(crossed.evidence, figure=f"the samples' −log π is {apart:+.2g} nats from it")
    mild = crossing(Series(steps, off), replace(SAMPLED, tiers=SAMPLED.tiers[:1])) or crossed
    return Detection(crossed.severity, message, (seen,), since=mild.since)


def _nearest_means(
    run: RunLog,
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Steps, entropy, the mean −log π over tokens that is nearest to it, and how far the engine's is from it.

    The entropy is a mean over tokens, the logged −log π one over responses. With lengths from l to h and
    their mean m, the mean over tokens is at least l/m and at most h/m times the mean over responses, because
    −log π is never negative.
    """
    steps, (ours, theirs, entropy, *lengths) = run.table.aligned(
        _TRAINING_PPL, _ROLLOUT_PPL, _ENTROPY, *_LENGTHS
    )
    shortest, mean, longest = (np.maximum(each, 1.0) for each in lengths)
    least = np.minimum(shortest / mean, 1.0)
    most = np.maximum(longest / mean, 1.0)
    scale = np.clip(entropy / np.maximum(ours, SURE_NATS), least, most)
    return steps, entropy, scale * ours, np.abs(scale * (ours - theirs))


@Rule(
    "missing-log-probs",
    needs=(_ROLLOUT_PPL,),
    uses=(_TRAINING_PPL,),
    fixes=(
        fix.by_hand(
            "let the engine return the log-probs of the sampled tokens",
            verl="actor_rollout_ref.rollout.calculate_log_probs=True",
        ),
    ),
)
def missing_log_probs(run: RunLog) -> Detection | None:
    """The engine reports log-probs."""
    steps, (theirs, ours) = run.table.aligned(_ROLLOUT_PPL, _TRAINING_PPL)
    zero = steps[(theirs == 0.0) & (np.abs(ours) > SURE_NATS)]
    if not len(zero):
        return None
    message = f"the engine's log-probs are exactly 0 in {steps_text(int(zero[0]), int(zero[-1]))}"
    seen = evidence_over(zero, _ROLLOUT_PPL, f"exactly 0 on {len(zero):,} step(s)")
    return Detection("critical", message, (seen,))


@Rule(
    "sampler-log-probs",
    uses=(_LOG_WEALTH, _GUARANTEED),
    fixes=(
        fix.PROVE_THE_SYNC,
        fix.by_hand("find the tokens: `rlctl diagnose RUN --sampler-test`, then `--who-sampled`"),
    ),
)
def sampler_log_probs(run: RunLog) -> Detection | Skipped | None:
    """The sampler draws with the log-probs that it reports."""
    has_dumps = run.dumps is not None and bool(run.dumps.sampler)
    if not len(run.table.series(_LOG_WEALTH)) and not has_dumps:
        return Skipped("not logged", (_LOG_WEALTH,))
    return _by_log(run) or (_by_dumps(run.dumps) if run.dumps and run.dumps.accuses_sampler else None)


def _by_dumps(dumps: DumpEvidence) -> Detection:
    """Reports what the test of the dumped rollouts says."""
    seen = Evidence("dumped rollouts", f"{dumps.num_tokens:,} tokens (`rlctl diagnose RUN --sampler-test`)")
    if not dumps.no_guarantee:
        return Detection("critical", dumps.sampler, (seen,), since=dumps.alarm_step, is_first=True)
    sure: Sure = ("medium", dumps.no_guarantee)
    return Detection("warning", dumps.sampler, (seen,), sure=sure, since=dumps.alarm_step)


def _by_log(run: RunLog) -> Detection | None:
    """Reports the largest wealth of the log."""
    steps, (log_wealth, guaranteed) = run.table.aligned(_LOG_WEALTH, _GUARANTEED)
    if not len(steps):
        series = run.table.series(_LOG_WEALTH)
        steps = series.steps
        log_wealth = series.values
        guaranteed = np.zeros(len(series.values))
    reached = {level: np.flatnonzero(log_wealth > np.log(wealth)) for level, wealth in WEALTH.items()}
    severity: Severity = "critical" if len(reached["critical"]) else "warning"
    if not len(reached[severity]):
        return None
    first = int(reached[severity][0])
    has_guarantee = bool(guaranteed[: first + 1].all())
    if not has_guarantee and severity == "warning":
        return None
    odds = f"if they were, this had a probability of at most 1 in {WEALTH[severity]:,.0f}"
    message = f"the sampler's log-probs are not those that it drew its tokens with (step {int(steps[first])})"
    seen = evidence_over(steps[reached[severity]], _LOG_WEALTH, f"up to {float(log_wealth.max()):.3g}")
    if has_guarantee:
        return Detection(severity, f"{message}: {odds}", (seen,), is_first=severity == "critical")
    doubt = "what was trained on depends on what was drawn, so that the test has no guarantee"
    return Detection("warning", message, (seen,), sure=("medium", doubt))


def _cut_by_the_spec(run: RunLog) -> str:
    if run.spec is None:
        return ""
    rollout = run.spec.rollout
    is_cut = rollout.top_p < 1.0 or rollout.top_k > 0 or rollout.min_p > 0.0
    return "the vocabulary is cut as the spec says" if is_cut else ""


@Rule(
    "cut-vocabulary",
    needs=(CUT.key,),
    uses=(_UNIT_MEAN,),
    fixes=(
        fix.by_hand(
            "let the engine sample from the whole vocabulary (top_p 1, no top_k, no min_p, no generation "
            "config), or tell the trainer: `rollout.top_p`, `rollout.exact_sampling=true`"
        ),
        fix.by_hand("check that log-probs are not clamped from below"),
        fix.by_hand("find the tokens: `rlctl diagnose RUN --sampler-test`"),
    ),
    not_applicable=_cut_by_the_spec,
)
def cut_vocabulary(run: RunLog) -> Detection | None:
    """The sampler draws from the whole vocabulary that its log-probs are of."""
    crossed = crossing(run.table.series(CUT.key), CUT)
    if crossed is None:
        return None
    means = run.table.series(_UNIT_MEAN).values
    missing = 1.0 - float(np.median(means)) if len(means) else 0.0
    found = of_crossing(crossed, "tokens are drawn from a part of the vocabulary {where}")
    seen = Evidence(
        _UNIT_MEAN, f"{1.0 - missing:.4g} (median of all steps)", crossed.first_step, crossed.last_step
    )
    what = f"{found.what}, without about {missing:.1%} of the trained policy's probability"
    return replace(found, what=what, evidence=(*found.evidence, seen))


@Rule(
    "token-error",
    needs=(TOKEN_ERROR.key,),
    fixes=(fix.by_hand("score a fixed sequence on both sides after every weight synchronization"),),
    not_applicable=lambda run: "" if TOKEN_ERROR.key in run.table.columns else "only NeMo-RL logs it",
)
def token_error(run: RunLog) -> Detection | None:
    """Token probabilities agree within a few percent."""
    series = run.table.series(TOKEN_ERROR.key)
    excess = Series(series.steps, series.values - 1.0)  # the part above 1 is compared with the start
    message = "token probabilities differ by a factor of 1 + {worst:.3g} {where}"
    return detect_crossing(run, TOKEN_ERROR, message, excess)


@Rule(
    "stale-weights",
    one_of=(th.LOG_PROB_GAP.key, MEAN_VANISHED.key),
    uses=(th.MASKED.key, th.LENGTH),
    signal="`mismatch/log_prob_abs_diff_mean`; mean bounded weight without rejected samples "
    f"(not of products over {th.LONG_RESPONSE:g} tokens and more)",
    fixes=(
        partial(fix.fresher, fully=True),
        fix.by_hand(
            "synchronize the weights after every update; let the engine report the log-probs it sampled from",
            verl="actor_rollout_ref.rollout.logprobs_mode=processed_logprobs",
            trl="steps_per_generation=<gradient_accumulation_steps>",
        ),
        fix.FIND_THE_CAUSE,
    ),
    not_applicable=lambda run: (
        "`policy-gap` covers the same gap"
        if run.facts.rollout_is == "off" and th.LOG_PROB_GAP.key not in run.table.columns
        else ""
    ),
)
def stale_weights(run: RunLog) -> Detection | None:
    """The engine's log-probs are those of the policy in training."""
    message = "log-probs of the same tokens differ by {worst:.3g} nats on average {where}"
    found = detect_crossing(run, th.LOG_PROB_GAP, message)
    if found:
        return found
    # Not for products over long responses, which are near zero without a fault. Where the level is unknown,
    # only products are so small although the log-probs, which are logged too, agree.
    lengths = run.table.series(th.LENGTH).values
    level = run.facts.rollout_is
    are_products = level == "sequence" or (level is None and len(run.table.series(th.LOG_PROB_GAP.key)) > 0)
    if are_products and (not len(lengths) or np.median(lengths) > th.LONG_RESPONSE):
        return None
    message = "importance weights are {worst:.2g} on average {where}"
    return detect_crossing(run, MEAN_VANISHED, message, among_survivors(run, MEAN_VANISHED.key))


def among_survivors(run: RunLog, key: str) -> Series:
    """Converts a mean over all samples, with rejected ones as 0, to the mean over survivors, at most 1.

    Steps without survivors are left out. verl computes these figures before rejection: they are returned as
    they are.
    """
    if run.facts.naming == "verl" or not len(run.table.series(th.MASKED.key)):
        return run.table.series(key)
    steps, (mean, masked) = run.table.aligned(key, th.MASKED.key)
    some = mean > 0.0
    return Series(steps[some], mean[some] / np.maximum(1.0 - masked[some], mean[some]))
