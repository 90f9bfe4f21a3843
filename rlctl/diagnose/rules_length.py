"""Rules about the length of responses."""

from __future__ import annotations

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Finding, Remedy, Skipped, rule
from rlctl.diagnose.rules_reward import (
    BEST,
    SCORE,
    VALIDATION,
    WORST,
    ends,
    reward_span,
    validation_of,
)
from rlctl.diagnose.signals import change_evidence, crossing, trend
from rlctl.diagnose.table import RunLog

_LENGTH = "response_length/mean"


@rule("truncated", "responses end before the length limit", needs=(th.TRUNCATED.key,))
def truncated(run: RunLog) -> Finding | Skipped | None:
    """Responses are cut off at the length limit."""
    crossed = crossing(run.table.series(th.TRUNCATED.key), th.TRUNCATED)
    if crossed is None:
        return None
    return Finding(
        crossed.severity,
        f"{crossed.worst:.1%} of the responses are cut off at the length limit {crossed.where}",
        (crossed.evidence,),
        "the limit is too short for the task, or the policy no longer ends its responses",
        th.TRUNCATED.source,
        (_higher_limit(run.facts.max_response_length), *_penalty(run)),
        "medium",
        "too short a limit and responses that never end look alike in this figure",
    )


def _higher_limit(limit: int | None) -> Remedy:
    if limit:
        return remedy.change(f"data.max_response_length={2 * limit}")
    return remedy.by_hand(
        "raise the length limit",
        verl="data.max_response_length",
        trl="max_completion_length",
        openrlhf="--rollout.max_new_tokens",
    )


def _penalty(run: RunLog) -> tuple[Remedy, ...]:
    """A reward that falls towards the limit (DAPO, section 3.4), unless there is one."""
    limit, spec = run.facts.max_response_length, run.spec
    if not limit or limit < 8 or (spec is not None and spec.reward.overlong.buffer_length > 0):
        return ()
    return (
        remedy.change(
            f"reward.overlong.buffer_length={limit // 4}",
            why="a penalty that grows towards the limit",
            trl="mask_truncated_completions=True",
        ),
    )


@rule(
    "length-growth",
    "longer responses pay in validation",
    needs=(_LENGTH, VALIDATION),
    uses=(SCORE, BEST, WORST),
    min_steps=th.VAL_MIN,
)
def length_growth(run: RunLog) -> Finding | Skipped | None:
    """Responses get much longer and validation does not gain."""
    series, span = run.table.series(_LENGTH), reward_span(run.table)
    if span is None:
        return Skipped("the rewards' range is not logged", (BEST, WORST))
    rise = trend(series)
    if rise is None or not rise.rises or rise.end < th.LENGTH_GROWTH * rise.start:
        return None
    validation = validation_of(run.table)
    if len(validation) < th.VAL_MIN:
        return Skipped("data sources are never validated together", (VALIDATION,))
    before, after = ends(validation.values, th.VAL_ENDS)
    if (after - before) / (span[1] - span[0]) >= th.FLAT_REWARD:
        return None
    mode = run.spec.actor.loss_agg_mode if run.spec else None
    per_token = (remedy.change("actor.loss_agg_mode=token-mean", trl="loss_type=dapo"),)
    return Finding(
        "warning",
        f"responses got {rise.end / rise.start - 1:.0%} longer and validation did not gain",
        (
            change_evidence(_LENGTH, rise.start, rise.end, series.steps),
            change_evidence(VALIDATION, before, after, validation.steps),
        ),
        "a loss or reward that favours length: a mean per response makes long wrong answers cheap",
        th.FIELD,
        (*(per_token if mode != "token-mean" else ()), *_penalty(run)),
        "medium",
        "the length pays nothing; what rewards it, the log does not say",
    )


RULES = (
    truncated,
    length_growth,
)
