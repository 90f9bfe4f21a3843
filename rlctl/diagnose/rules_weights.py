"""Rules about importance weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rlctl.algos.usable_length import usable_length
from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Fix, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, crossings, of_crossing, worst_of
from rlctl.diagnose.rules_engines import among_survivors
from rlctl.diagnose.signals import crossing
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import Levels

_CORR = "rollout_corr/"
_RAW_MEAN = f"{_CORR}rollout_is_raw_mean"
RAW_MEAN_HIGH = Levels(_RAW_MEAN, (("info", 1.2), ("critical", 2.0)))
RAW_MEAN_LOW = Levels(_RAW_MEAN, (("info", 0.8), ("critical", 0.5)), is_floor=True)
MEAN_LOW = Levels(f"{_CORR}rollout_is_mean", (("warning", 0.5), ("critical", 0.01)), is_floor=True)
WEIGHT_STD = Levels(f"{_CORR}rollout_is_std", (("warning", 1.0),))
#: Level of the weights → the metric with χ² at this level.
CHI2 = {"token": f"{_CORR}chi2_token", "sequence": f"{_CORR}chi2_seq"}


def _no_weights(run: RunLog) -> str:
    return "no weights are applied" if run.facts.rollout_is == "off" else ""


@Rule(
    "weight-mean",
    one_of=(RAW_MEAN_HIGH.key, MEAN_LOW.key),
    fixes=(fix.FIND_THE_CAUSE, fix.reject_outliers, fix.gentler),
)
def weight_mean(run: RunLog) -> Detection | None:
    """Importance weights average 1."""
    has_raw = len(run.table.series(_RAW_MEAN)) > 0
    found = crossings(run, (RAW_MEAN_HIGH, RAW_MEAN_LOW) if has_raw else (MEAN_LOW,))
    if not found:
        return None
    kind = "raw" if has_raw else "bounded"
    one = of_crossing(worst_of(found), kind + " importance weights average {worst:.3g} instead of 1 {where}")
    if has_raw:
        return one
    return one.with_doubt(
        ("medium", "only bounded weights are logged, and a heavy tail lowers their mean too"),
        "the mean of the weights before their bound is not logged",
    )


@Rule(
    "effective-samples",
    one_of=(th.ESS.key, WEIGHT_STD.key),
    uses=(th.MASKED.key,),
    not_applicable=_no_weights,
    fixes=(fix.reject_outliers, fix.wider_bound, fix.gentler),
)
def effective_samples(run: RunLog) -> Detection | None:
    """Applied weights are spread over the samples.

    A rejected sample has weight zero and lowers the effective sample size. The rule `rejected` reports that,
    so this rule divides by the surviving share.
    """
    series = among_survivors(run, th.ESS.key)
    crossed = crossing(series, th.ESS)
    spread = crossing(run.table.series(WEIGHT_STD.key), WEIGHT_STD)
    long_count_more: Sure = ("medium", "the figure counts long responses more than once")
    sure = long_count_more if run.facts.ess_length_weighted else None
    if crossed is not None:
        text = "the effective sample size is only {worst:.0%} of the number of samples {where}"
        seen = crossed.evidence
        if run.facts.naming != "verl" and th.MASKED.key in run.table.columns:
            seen = replace(seen, figure=f"{seen.figure}, without rejected samples")
        evidence = (seen, spread.evidence) if spread else (seen,)
        severity = "warning" if crossed.severity == "info" and spread else crossed.severity
        return replace(of_crossing(crossed, text), severity=severity, evidence=evidence, sure=sure)
    if spread is None or len(series):
        return None
    text = "importance weights vary by {worst:.2g} around their mean {where}"
    return replace(of_crossing(spread, text), sure=sure)


def _of_tokens(run: RunLog) -> Iterator[Fix]:
    """Weights per token, where a product of ratios grows with a long response."""
    lengths = run.table.series(th.LENGTH).values
    if run.facts.rollout_is == "sequence" and len(lengths) and np.median(lengths) > th.LONG_RESPONSE:
        yield fix.change(
            f"{fix.RC}rollout_is=token",
            why="a product of ratios over a long response exceeds any bound",
            trl="vllm_importance_sampling_mode=token_truncate",
            **{
                "ms-swift": "--rollout_importance_sampling_mode token_truncate",
                "nemo-rl": "loss_fn.sequence_level_importance_ratios=false",
            },
        )


@Rule(
    "hidden-tail",
    thresholds=th.RAW_ESS,
    needs=(th.ESS.key,),
    one_of=(th.RAW_ESS.key, *CHI2.values()),
    uses=(th.LENGTH,),
    not_applicable=_no_weights,
    fixes=(_of_tokens, fix.reject_outliers, fix.geometric, fix.gentler),
)
def hidden_tail(run: RunLog) -> Detection | Skipped | None:
    """No heavy tail is hidden by the bound."""
    found = raw_ess(run)
    if found is None:
        return Skipped("not logged for this level of weights", (th.RAW_ESS.key, *CHI2.values()))
    key, series = found
    raw = crossing(series, replace(th.RAW_ESS, key=key))
    applied = crossing(run.table.series(th.ESS.key), th.ESS)
    if raw is None or (applied is not None and applied.severity == "critical"):
        return None
    ess = run.table.series(th.ESS.key).values
    seen = Evidence(th.ESS.key, f"{np.median(ess):.3g} (median of all steps)", raw.first_step, raw.last_step)
    one = of_crossing(raw, "the bound hides a heavy tail: raw effective sample size {worst:.3g} {where}")
    if key == th.RAW_ESS.key:
        return replace(one, evidence=(raw.evidence, seen))
    tail = replace(raw.evidence, figure=f"1 / (1 + χ²) = {raw.evidence.figure}")
    doubt: Sure = ("medium", "the raw figure is estimated from χ²")
    return replace(one, evidence=(tail, seen)).with_doubt(
        doubt, "the raw effective sample size is not logged"
    )


@Rule(
    "usable-length",
    needs=(CHI2["token"], th.LENGTH),
    fixes=(_of_tokens, fix.geometric, fix.gentler),
    not_applicable=lambda run: (
        "" if run.facts.rollout_is in {None, "sequence"} else "no weights of sequences are applied"
    ),
)
def usable_length_of_weights(run: RunLog) -> Detection | Skipped | None:
    """Responses are not longer than weights of sequences are useful."""
    if run.facts.rollout_is is None:
        return Skipped("the log does not say which weights are applied", ("spec.yaml",))
    steps, (chi2, lengths) = run.table.aligned(CHI2["token"], th.LENGTH)
    if len(steps) < th.MIN_STEPS or np.isnan(chi2).all():
        return None
    usable = usable_length(float(np.nanmedian(chi2)))
    typical = float(np.median(lengths))
    if typical <= usable:
        return None
    what = (
        f"sequence weights keep half of the sample up to about {max(usable, 1.0):,.0f} tokens; "
        f"responses have {typical:,.0f}"
    )
    first = int(steps[0])
    last = int(steps[-1])
    seen = Evidence(CHI2["token"], f"{float(np.nanmedian(chi2)):.3g} (median of all steps)", first, last)
    return Detection("info", what, (seen, Evidence(th.LENGTH, f"{typical:,.0f} (median)", first, last)))


def raw_ess(run: RunLog) -> tuple[str, Series] | None:
    """Effective sample size before any bound, and the metric that it comes from.

    The logged one, or 1 / (1 + χ²) at the level of the weights (the mean ratio is 1, so E[w²] = 1 + χ²).
    """
    series = run.table.series(th.RAW_ESS.key)
    if len(series):
        return th.RAW_ESS.key, series
    if run.facts.rollout_is not in {None, "off", *CHI2}:
        return None
    key = CHI2.get(run.facts.rollout_is or "", CHI2["token"])
    series = run.table.series(key)
    if not len(series):
        return None
    return key, Series(series.steps, 1.0 / (1.0 + series.values.clip(min=0.0)))
