"""Rules about a run's first step, where nothing has been learned yet."""

from __future__ import annotations

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Skipped, rule
from rlctl.diagnose.rules_gap import mixed
from rlctl.diagnose.table import RunLog

_STALENESS, _DRIFT, _CLIPPED = "training/staleness_max", "actor/ppo_kl", "actor/pg_clipfrac"


@rule(
    "first-step",
    "at the first step trainer and engine hold the same policy",
    one_of=(_DRIFT, _CLIPPED, th.LOG_PROB_GAP.key),
    facts=("updates_per_batch", "bypass_mode"),
    min_steps=1,
)
def first_step(run: RunLog) -> Finding | Skipped | None:
    """Before anything was learned, nothing can differ but implementations."""
    if run.table.steps[0] > th.FIRST_STEP:
        return Skipped("the log does not begin at the run's start")
    limits = {th.LOG_PROB_GAP.key: th.FIRST_LOG_PROB_GAP}
    if not run.facts.bypass_mode:  # there π_old is another policy
        limits |= {_DRIFT: th.FIRST_PPO_KL, _CLIPPED: th.FIRST_CLIPFRAC}
    if run.facts.updates_per_batch != 1:
        return Skipped("several updates per batch: the first step's figures hold progress")
    if not any(key in run.table.columns for key in limits):
        return Skipped("in bypass mode drift and clipping hold the gap of the engines")
    found = []
    for key, limit in limits.items():
        series = run.table.series(key)  # begins after step 0 where that held a validation only
        if len(series) and series.steps[0] <= th.FIRST_STEP and abs(series.values[0]) > limit:
            step, figure = int(series.steps[0]), f"{series.values[0]:.3g}, over {limit:g}"
            found.append(Evidence(key, figure, step, step))
    if not found:
        return None
    return Finding(
        "warning",
        "at the first step, with nothing learned yet, the two policies differ already",
        tuple(found),
        "the engine holds other weights than the trainer, or one of them is not deterministic",
        th.SLIME,
        (remedy.by_hand("stop, and mend this before it costs more"), remedy.find_the_cause()),
        "high",
        "nothing but the implementations can differ before the first update",
    )


@rule(
    "template",
    "both sides read the same prompt",
    needs=(th.KL.key,),
    uses=(_STALENESS,),
    min_steps=1,
)
def template(run: RunLog) -> Finding | Skipped | None:
    """The first step's KL is of the size that a lost chat template gives."""
    series = run.table.series(th.KL.key)
    if series.steps[0] > th.FIRST_STEP:
        return Skipped("the log does not begin at the run's start")
    if not run.gap_is_mismatch:
        return mixed(run, th.KL.key)
    kl, (low, high) = float(abs(series.values[0])), th.TEMPLATE_KL
    if not low <= kl <= high:
        return None
    step = int(series.steps[0])
    return Finding(
        "critical",
        f"the first step's KL is {kl:.2g} nats per token: the two sides seem to read different prompts",
        (Evidence(th.KL.key, f"{series.values[0]:.3g}, between {low:g} and {high:g}", step, step),),
        "the chat template, or special tokens, are applied on one side only",
        th.FIELD,
        (remedy.by_hand("compare the token ids of one prompt on both sides"), remedy.find_the_cause()),
        "medium",
        "a wrong temperature or other weights may give a KL of this size too",
    )


RULES = (
    first_step,
    template,
)
