"""Rules about the gap between the two policies, and about what corrects for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Remedy, Rule, Skipped
from rlctl.diagnose.remedies import RC, change, gentler, on
from rlctl.diagnose.signals import Crossing, crossing
from rlctl.diagnose.table import RunLog, Series
from rlctl.spec.resolve import correction_rules

_MASKED = th.MASKED.key
_STALENESS = "training/staleness_max"
_SATURATED = "rollout_corr/saturated_sequences"
_TIGHTER = f"{RC}rollout_rs=token_k1 {RC}rollout_rs_threshold=0.6_1.6"


def probability_gap(run: RunLog) -> Finding | Skipped | None:
    """The two engines give the same tokens different probabilities."""
    if not run.gap_is_mismatch:
        return _mixed(run, th.PROBS_GAP.key)
    crossed = crossing(run.table.series(th.PROBS_GAP.key), th.PROBS_GAP)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"the probabilities of the same tokens differ by {crossed.worst:.3g} on average {crossed.where}",
        (crossed.evidence,),
        "rollout engine and trainer compute in different precision or with different kernels",
        th.PROBS_GAP.source,
        on(run, "engine.dtype=fp32", when=lambda spec: spec.engine.dtype == "bf16"),
    )


def policy_gap(run: RunLog) -> Finding | Skipped | None:
    """The KL between the sampling and the trained policy is large."""
    crossed = crossing(run.table.series(th.KL.key), th.KL)
    if crossed is None and run.gap_is_mismatch:
        crossed = crossing(run.table.series(th.K3.key), th.K3)
    if crossed is None:
        return None
    levels = th.KL if crossed.key == th.KL.key else th.K3
    if run.gap_is_mismatch:
        cause = "rollout engine and trainer differ: kernel, precision, parallelism, or stale weights"
        remedies = on(run, "engine.dtype=fp32", when=lambda spec: spec.engine.dtype == "bf16")
    else:
        cause = "rollout engine and trainer differ, or the policy moves far while it uses up one batch"
        remedies = gentler(run)
    correct = f"{RC}rollout_is=token"
    return Finding(
        crossed.severity,
        f"trained and sampling policy are {crossed.worst:.3g} nats per token apart {crossed.where}",
        (crossed.evidence,),
        cause,
        levels.source,
        remedies + on(run, correct, when=lambda spec: spec.algorithm.rollout_correction.rollout_is is None),
    )


def weight_mean(run: RunLog) -> Finding | Skipped | None:
    """Raw importance weights should average 1."""
    series = run.table.series(th.RAW_MEAN_HIGH.key)
    crossings = [crossing(series, levels) for levels in (th.RAW_MEAN_HIGH, th.RAW_MEAN_LOW)]
    found = [crossed for crossed in crossings if crossed is not None]
    if not found:
        return None
    crossed = min(found, key=lambda one: SEVERITIES.index(one.severity))
    return Finding(
        crossed.severity,
        f"raw importance weights average {crossed.worst:.3g} instead of 1 {crossed.where}",
        (crossed.evidence,),
        "log-probs that are missing, shifted or stale; or policies so far apart that few samples say much",
        th.RAW_MEAN_HIGH.source,
        gentler(run),
    )


def effective_samples(run: RunLog) -> Finding | Skipped | None:
    """Few samples carry the applied weight.

    A rejected sample has weight zero and lowers the figure too: that is the matter of `rejected`, so the
    share that survived is divided out (verl's figure is taken before rejection).
    """
    is_verl = run.spec is not None and run.spec.algorithm.rollout_correction.dialect == "verl"
    series = run.table.series(th.ESS.key)
    if not is_verl and len(run.table.series(_MASKED)):
        steps, (ess, masked) = run.table.aligned(th.ESS.key, _MASKED)
        series = Series(steps, ess / np.maximum(1.0 - masked, ess.clip(min=1e-12)))
    crossed = crossing(series, th.ESS)
    if crossed is None:
        return None
    survivors = replace(crossed.evidence, figure=f"{crossed.evidence.figure}, among survivors")
    evidence: tuple[Evidence, ...] = (survivors,)
    spread = crossing(run.table.series(th.WEIGHT_STD.key), th.WEIGHT_STD)
    if spread is not None:
        evidence += (spread.evidence,)
    severity = "warning" if crossed.severity == "info" and spread else crossed.severity
    wider = on(
        run,
        f"{RC}rollout_is_threshold=5",
        when=lambda spec: correction_rules(spec.algorithm.rollout_correction).weight.upper < 5.0,
    )
    return Finding(
        severity,
        f"the surviving samples are worth only {crossed.worst:.0%} of their number {crossed.where}",
        evidence,
        "the policies are far apart: a few samples carry most of the weight",
        th.ESS.source,
        (*_reject(run), *wider, *gentler(run)),
    )


def hidden_tail(run: RunLog) -> Finding | Skipped | None:
    """Raw weights are degenerate while the bounded ones look well."""
    raw = crossing(run.table.series(th.RAW_ESS.key), th.RAW_ESS)
    applied = crossing(run.table.series(th.ESS.key), th.ESS)
    if raw is None or (applied is not None and applied.severity == "critical"):
        return None
    _, (ess,) = run.table.aligned(th.ESS.key)
    seen = Evidence(th.ESS.key, f"{np.median(ess):.3g} (median of all steps)", raw.first_step, raw.last_step)
    return Finding(
        raw.severity,
        f"the bound hides a heavy tail: raw effective sample size {raw.worst:.3g} {raw.where}",
        (raw.evidence, seen),
        "bounding the weights makes their spread look healthy; the policies themselves are far apart",
        th.RAW_ESS.source,
        (*_reject(run), *gentler(run)),
    )


def chi2(run: RunLog) -> Finding | Skipped | None:
    """χ² per token is large."""
    crossed = crossing(run.table.series(th.CHI2_TOKEN.key), th.CHI2_TOKEN)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"χ² between the policies is {crossed.worst:.3g} per token {crossed.where}",
        (crossed.evidence,),
        "the sampled tokens no longer represent the trained policy",
        th.CHI2_TOKEN.source,
        (*_reject(run), *gentler(run)),
    )


def long_products(run: RunLog) -> Finding | Skipped | None:
    """A sequence's weight is a product that grows with its length."""
    spec = run.spec
    if spec is None or spec.algorithm.rollout_correction.rollout_is != "sequence":
        return Skipped("weights are not products over a sequence")
    lengths = run.table.series("response_length/mean").values
    is_long = len(lengths) > 0 and float(np.median(lengths)) > th.LONG_RESPONSE
    crossed = crossing(run.table.series(th.RATIO_HIGH.key), th.RATIO_HIGH) if is_long else None
    crossed = crossed or _saturation(run, spec.data.train_batch_size * spec.rollout.n)
    if crossed is None:
        return None
    share = (
        "sequence weights are only the clamp's" if crossed.key == _SATURATED else "weights are over the bound"
    )
    return Finding(
        "warning",
        f"{crossed.worst:.1%} of the {share} {crossed.where}",
        (crossed.evidence,),
        "a product of ratios over a long response leaves any bound, however close the policies are",
        th.RATIO_HIGH.source,
        (
            change(f"{RC}rollout_is=token"),
            change(f"{RC}rollout_is=geometric {RC}rollout_is_bound=mask {RC}rollout_is_threshold=0.99_1.01"),
        ),
    )


def _saturation(run: RunLog, batch: int) -> Crossing | None:
    """Saturated sequences as a share of the batch; in bypass mode every pass over it counts anew."""
    spec = run.spec
    passes = spec.actor.ppo_epochs if spec and spec.algorithm.rollout_correction.bypass_mode else 1
    counts = run.table.series(_SATURATED)
    levels = th.Levels(_SATURATED, (("warning", th.SATURATED_SHARE),), th.OWN)
    return crossing(Series(counts.steps, counts.values / (batch * passes)), levels)


def rejected(run: RunLog) -> Finding | Skipped | None:
    """Rejection throws away much of what was sampled."""
    crossed = crossing(run.table.series(_MASKED), th.MASKED)
    if crossed is None:
        return None
    remedies: tuple[Remedy, ...] = ()
    if run.spec is not None:
        rs = f"{RC}rollout_rs"
        off = f"{rs}=null {RC}rollout_rs_threshold=null {RC}rollout_is=sequence"
        wider = f"{rs}=token_k1 {rs}_threshold=0.5_2.0"
        remedies = (change(wider), change(off)) if run.spec.algorithm.rollout_correction.rollout_rs else ()
    return Finding(
        crossed.severity,
        f"rejection drops {crossed.worst:.0%} of the response tokens {crossed.where}",
        (crossed.evidence,),
        "bounds too tight for how far apart the policies are; mend the gap first, if a rule above names it",
        th.MASKED.source,
        remedies,
    )


def silently_off(run: RunLog) -> Finding | Skipped | None:
    """Correction is configured but does nothing."""
    spec = run.spec
    correction = spec.algorithm.rollout_correction if spec else None
    if correction is None or not (correction.rollout_is or correction.rollout_rs):
        return Skipped("no correction is configured")
    wanted = {
        f"{RC}rollout_is": (correction.rollout_is, "rollout_corr/rollout_is_mean"),
        f"{RC}rollout_rs": (correction.rollout_rs, _MASKED),
    }
    names = run.table.names
    absent = [(key, metric) for key, (value, metric) in wanted.items() if value and metric not in names]
    if absent:
        key, metric = absent[0]
        evidence = Evidence(metric, "never logged", int(run.table.steps[0]), int(run.table.steps[-1]))
        what = f"{key} is set, but its metrics are nowhere in the log"
    elif correction.rollout_is and (steps := _untouched(run)) is not None:
        evidence = Evidence("rollout_corr/rollout_is_min", "exactly 1, like the maximum", *steps)
        what = "every weight is exactly 1 and nothing is rejected, although the policies differ"
    else:
        return None
    cause = "the correction is computed from the wrong log-probs, or its result is not used"
    return Finding("critical", what, (evidence,), cause, th.LOGIC)


def _untouched(run: RunLog) -> tuple[int, int] | None:
    """First and last step, if weights never differed from 1 while the policies did."""
    keys = ("rollout_corr/rollout_is_min", "rollout_corr/rollout_is_max", _MASKED, th.K3.key)
    steps, (low, high, masked, k3) = run.table.aligned(*keys)
    idle = (np.abs(low - 1.0) < th.EXACT) & (np.abs(high - 1.0) < th.EXACT) & (masked == 0.0)
    differ = k3 > th.EXACT
    if differ.sum() < th.MIN_STEPS or not idle[differ].all():
        return None
    return int(steps[differ][0]), int(steps[differ][-1])


def clipped_on_policy(run: RunLog) -> Finding | Skipped | None:
    """PPO clips although the policy has not moved."""
    if run.updates_per_batch != 1:
        return Skipped("several updates per batch: clipping is what PPO is for")
    crossed = crossing(run.table.series(th.CLIPPED_ON_POLICY.key), th.CLIPPED_ON_POLICY)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"PPO clips {crossed.worst:.1%} of the tokens although the policy has not moved yet {crossed.where}",
        (crossed.evidence,),
        "rollout engine and trainer disagree, in precision for instance, so the ratio starts away from 1",
        th.CLIPPED_ON_POLICY.source,
        on(run, "engine.dtype=fp32", when=lambda spec: spec.engine.dtype == "bf16"),
    )


def bypass_repeats(run: RunLog) -> Finding | Skipped | None:
    """Several passes in bypass mode."""
    spec = run.spec
    if spec is None or not spec.algorithm.rollout_correction.bypass_mode or spec.actor.ppo_epochs == 1:
        return None
    return Finding(
        "warning",
        f"bypass mode with {spec.actor.ppo_epochs} passes over each batch",
        (Evidence("actor.ppo_epochs", str(spec.actor.ppo_epochs)),),
        "π_old stays the sampling policy while π_θ moves on: every pass is further off-policy than the last",
        th.LOGIC,
        (change(f"{RC}bypass_mode=false"), change("actor.ppo_epochs=1")),
    )


def _mixed(run: RunLog, key: str) -> Skipped:
    """Why a rule on pure mismatch has nothing to go by."""
    if run.spec is None:
        return Skipped(f"whether {key} is mismatch or progress depends on the spec", ("spec.yaml",))
    return Skipped("the logged gap includes the policy's own progress (bypass mode or stale samples)")


def _reject(run: RunLog) -> tuple[Remedy, ...]:
    """Rejection of outliers, unless something is rejected already."""
    return on(run, _TIGHTER, when=lambda spec: not spec.algorithm.rollout_correction.rollout_rs)


RULES = (
    Rule(
        "probability-gap",
        "both policies give sampled tokens the same probability",
        probability_gap,
        needs=(th.PROBS_GAP.key,),
        uses=(_STALENESS,),
    ),
    Rule(
        "policy-gap",
        "KL between sampling and trained policy",
        policy_gap,
        needs=(th.KL.key, th.K3.key),
        uses=(_STALENESS,),
    ),
    Rule("weight-mean", "raw importance weights average 1", weight_mean, needs=(th.RAW_MEAN_HIGH.key,)),
    Rule(
        "effective-samples",
        "applied weights are spread over the samples",
        effective_samples,
        needs=(th.ESS.key,),
        uses=(_MASKED, th.WEIGHT_STD.key),
    ),
    Rule("hidden-tail", "no heavy tail behind the bound", hidden_tail, needs=(th.RAW_ESS.key, th.ESS.key)),
    Rule("chi2", "χ² between the policies", chi2, needs=(th.CHI2_TOKEN.key,)),
    Rule(
        "long-products",
        "sequence weights have not outgrown their bound",
        long_products,
        needs=(_SATURATED,),
        uses=("response_length/mean", th.RATIO_HIGH.key),
        needs_spec=True,
    ),
    Rule("rejected", "share of tokens rejected", rejected, needs=(_MASKED,)),
    Rule(
        "silently-off",
        "configured correction takes effect",
        silently_off,
        uses=("rollout_corr/rollout_is_min", "rollout_corr/rollout_is_max", _MASKED, th.K3.key),
        needs_spec=True,
    ),
    Rule(
        "clipped-on-policy",
        "no clipping before the policy moves",
        clipped_on_policy,
        needs=(th.CLIPPED_ON_POLICY.key,),
        needs_spec=True,
    ),
    Rule("bypass-repeats", "bypass mode passes over a batch once", bypass_repeats, needs_spec=True),
)
