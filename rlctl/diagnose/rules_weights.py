"""Rules about importance weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Remedy, Skipped, rule
from rlctl.diagnose.remedies import OPENRLHF_IS, RC
from rlctl.diagnose.signals import Crossing, crossing
from rlctl.diagnose.table import RunLog, Series

_MASKED = th.MASKED.key
_SATURATED, _LENGTH = "rollout_corr/saturated_sequences", "response_length/mean"
CHI2 = {"token": th.CHI2_TOKEN.key, "sequence": "rollout_corr/chi2_seq"}


def _no_weights(run: RunLog) -> str:
    return "no weights are applied" if run.facts.rollout_is == "off" else ""


@rule(
    "weight-mean",
    "importance weights average 1",
    one_of=(th.RAW_MEAN_HIGH.key, th.MEAN_LOW.key),
)
def weight_mean(run: RunLog) -> Finding | Skipped | None:
    """Raw importance weights should average 1; bounded ones at least not far below."""
    series = run.table.series(th.RAW_MEAN_HIGH.key)
    tiers: tuple[th.Levels, ...] = (th.RAW_MEAN_HIGH, th.RAW_MEAN_LOW)
    is_raw = len(series) > 0 or run.facts.weights_are == "raw"
    if not len(series):
        series = run.table.series(th.MEAN_LOW.key)
        key = th.MEAN_LOW.key
        tiers = tuple(replace(level, key=key) for level in tiers) if is_raw else (th.MEAN_LOW,)
    found = [crossed for level in tiers if (crossed := crossing(series, level)) is not None]
    if not found:
        return None
    crossed = min(found, key=lambda one: SEVERITIES.index(one.severity))
    which = "raw" if is_raw else "bounded"
    return Finding(
        crossed.severity,
        f"{which} importance weights average {crossed.worst:.3g} instead of 1 {crossed.where}",
        (crossed.evidence,),
        "log-probs that are missing, shifted or stale; or policies so far apart that few samples say much",
        th.RAW_MEAN_HIGH.source,
        (remedy.find_the_cause(), *remedy.reject_outliers(run), *remedy.gentler(run)),
        "medium",
        "wrong log-probs and a large gap look alike in the mean"
        if is_raw
        else "the log holds bounded weights only, whose mean a heavy tail lowers too",
        () if is_raw else ("the mean of the weights before their bound is not logged",),
    )


@rule(
    "effective-samples",
    "applied weights are spread over the samples",
    one_of=(th.ESS.key, th.WEIGHT_STD.key),
    uses=(_MASKED,),
    beside=_no_weights,
)
def effective_samples(run: RunLog) -> Finding | Skipped | None:
    """Few samples carry the applied weight.

    A rejected sample has weight zero and lowers the figure too: that is the matter of `rejected`, so the
    share that survived is divided out (verl's figure is taken before rejection).
    """
    series = run.table.series(th.ESS.key)
    if run.facts.dialect != "verl" and len(run.table.series(_MASKED)):
        steps, (ess, masked) = run.table.aligned(th.ESS.key, _MASKED)
        series = Series(steps, ess / np.maximum(1.0 - masked, ess.clip(min=1e-12)))
    crossed = crossing(series, th.ESS)
    spread = crossing(run.table.series(th.WEIGHT_STD.key), th.WEIGHT_STD)
    if crossed is None and (spread is None or len(series)):
        return None
    evidence: tuple[Evidence, ...] = (spread.evidence,) if spread else ()
    if crossed is not None:
        survivors = replace(crossed.evidence, figure=f"{crossed.evidence.figure}, among survivors")
        evidence = (survivors, *evidence)
        severity = "warning" if crossed.severity == "info" and spread else crossed.severity
        what = f"the surviving samples are worth only {crossed.worst:.0%} of their number {crossed.where}"
    elif spread is not None:
        severity = spread.severity
        what = f"importance weights vary by {spread.worst:.2g} around their mean {spread.where}"
    weighted = run.facts.ess_length_weighted
    return Finding(
        severity,
        what,
        evidence,
        "the policies are far apart: a few samples carry most of the weight",
        th.ESS.source,
        (*remedy.reject_outliers(run), *remedy.wider_bound(run), *remedy.gentler(run)),
        "medium" if weighted else "high",
        "the figure counts long responses more than once" if weighted else "the figure is the definition",
    )


@rule(
    "hidden-tail",
    "no heavy tail behind the bound",
    needs=(th.ESS.key,),
    one_of=(th.RAW_ESS.key, *CHI2.values()),
    beside=_no_weights,
)
def hidden_tail(run: RunLog) -> Finding | Skipped | None:
    """Raw weights are degenerate while the bounded ones look well."""
    if run.facts.ess_after_truncation is False:
        return Skipped("the logged effective sample size is of raw weights already")
    found = raw_ess(run)
    if found is None:
        return Skipped("not logged for this level of weights", (th.RAW_ESS.key, *CHI2.values()))
    key, series = found
    raw = crossing(series, replace(th.RAW_ESS, key=key))
    applied = crossing(run.table.series(th.ESS.key), th.ESS)
    if raw is None or (applied is not None and applied.severity == "critical"):
        return None
    _, (ess,) = run.table.aligned(th.ESS.key)
    seen = Evidence(th.ESS.key, f"{np.median(ess):.3g} (median of all steps)", raw.first_step, raw.last_step)
    is_exact = key == th.RAW_ESS.key
    tail = raw.evidence
    if not is_exact:
        tail = replace(tail, figure=f"1 / (1 + χ²) = {tail.figure}")
    return Finding(
        raw.severity,
        f"the bound hides a heavy tail: raw effective sample size {raw.worst:.3g} {raw.where}",
        (tail, seen),
        "bounding the weights makes their spread look healthy; the policies themselves are far apart",
        th.RAW_ESS.source,
        (*remedy.reject_outliers(run), *_geometric(run), *remedy.gentler(run)),
        "high" if is_exact else "medium",
        "raw and applied weights are both logged" if is_exact else "the raw figure is estimated from χ²",
        () if is_exact else ("the raw effective sample size is not logged",),
    )


def raw_ess(run: RunLog) -> tuple[str, Series] | None:
    """The effective sample size before any bound, and the metric it comes from.

    As logged, or 1 / (1 + χ²) at the level of the weights (ratios average 1, so that E[w²] = 1 + χ²).
    """
    series = run.table.series(th.RAW_ESS.key)
    if len(series):
        return th.RAW_ESS.key, series
    if run.facts.rollout_is == "geometric":
        return None
    key = CHI2.get(run.facts.rollout_is or "", th.CHI2_TOKEN.key)
    series = run.table.series(key)
    if not len(series):
        return None
    return key, Series(series.steps, 1.0 / (1.0 + series.values.clip(min=0.0)))


@rule("chi2", "χ² between the policies", needs=(th.CHI2_TOKEN.key,))
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
        (*remedy.reject_outliers(run), *remedy.gentler(run)),
        "high",
        "χ² is measured before anything is bounded",
    )


@rule(
    "long-products",
    "sequence weights have not outgrown their bound",
    one_of=(_SATURATED, th.RATIO_HIGH.key, th.K3.key),
    uses=(_LENGTH,),
    facts=("rollout_is",),
    beside=lambda run: (
        "" if run.facts.rollout_is in {None, "sequence"} else "weights are not products over a sequence"
    ),
)
def long_products(run: RunLog) -> Finding | Skipped | None:
    """A sequence's weight is a product that grows with its length."""
    lengths = run.table.series(_LENGTH).values
    is_long = len(lengths) > 0 and float(np.median(lengths)) > th.LONG_RESPONSE
    if is_long and (crossed := crossing(run.table.series(th.RATIO_HIGH.key), th.RATIO_HIGH)):
        what = f"{crossed.worst:.1%} of the weights are over the bound {crossed.where}"
    elif (crossed := _saturation(run)) is not None:
        what = f"{crossed.worst:.1%} of the sequence weights are only the clamp's {crossed.where}"
    elif (crossed := _expected_saturation(run)) is not None:
        what = (
            f"a typical response's log-ratios add up to {crossed.worst:.3g}, beyond the clamp {crossed.where}"
        )
    else:
        return None
    return Finding(
        "warning",
        what,
        (crossed.evidence,),
        "a product of ratios over a long response leaves any bound, however close the policies are",
        th.RATIO_HIGH.source,
        (
            remedy.change(
                f"{RC}rollout_is=token",
                trl="vllm_importance_sampling_mode=token_truncate",
            ),
            *_geometric(run),
        ),
        "high",
        "weights per sequence and long responses: the product does what products do",
    )


def _geometric(run: RunLog) -> tuple[Remedy, ...]:
    """A weight that does not grow with the length, kept near 1 (verl and TRL have none)."""
    if run.facts.rollout_is == "geometric":
        return ()
    settings = ("rollout_is=geometric", "rollout_is_bound=mask", "rollout_is_threshold=0.99_1.01")
    others = {"openrlhf": f"{OPENRLHF_IS}enable {OPENRLHF_IS}type seq-mask-tis"}
    return (Remedy(tuple(RC + s for s in settings), "a weight that does not grow with the length", others),)


def _saturation(run: RunLog) -> Crossing | None:
    """Saturated sequences as a share of the batch; in bypass mode every pass over it counts anew."""
    counts, batch = run.table.series(_SATURATED), run.facts.batch_size
    if not len(counts) or not batch:
        return None
    passes = (run.facts.ppo_epochs or 1) if run.facts.bypass_mode else 1
    levels = th.Levels(_SATURATED, (("warning", th.SATURATED_SHARE),), th.OWN)
    return crossing(Series(counts.steps, counts.values / (batch * passes)), levels)


def _expected_saturation(run: RunLog) -> Crossing | None:
    """Tokens × k3: the size of a typical response's Σ |log ρ|, where nobody counts the clamped ones."""
    steps, (length, k3) = run.table.aligned(_LENGTH, th.K3.key)
    return crossing(Series(steps, length * k3), th.Levels(th.K3.key, (("warning", th.CLAMP),), th.LOGIC))


RULES = (
    weight_mean,
    effective_samples,
    hidden_tail,
    chi2,
    long_products,
)
