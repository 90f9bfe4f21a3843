"""Rules about episodes of several turns: tools, limits, time, and observations in the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Skipped
from rlctl.diagnose.rule import Detection, Rule, detect_crossing
from rlctl.diagnose.signals import change_evidence, lasting_change, rises
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import Levels

_TURNS, _MESSAGES = "episode/num_turns/mean", "episode/num_messages/mean"
_CALLS, _ERRORS, _ERROR_SHARE = "episode/num_tool_calls", "episode/tool_errors", "episode/tool_error_fraction"
_POLICY, _WAITING, _ENVIRONMENT = (f"episode/seconds/{who}" for who in ("policy", "waiting", "environment"))
_STOP, _OBSERVED = "episode/stop/", "episode/observation_fraction"
_KL, _K3, _WEIGHT = th.KL.key, th.K3.key, "rollout_corr/rollout_is_mean"

FAILING = Levels(_ERROR_SHARE, (("warning", 0.5),), is_share=True)
#: Rise of the share of failing calls that is reported, and the share from which it is critical.
RISE, MOSTLY = 0.15, 0.5
#: Turns per episode at the run's start and at its end between which an episode has lost its turns.
SEVERAL, ONE = 1.5, 1.1
#: Stop reasons that are limits of the number of turns, calls, and time.
LIMITS = ("max_turns", "max_tool_calls", "context_overflow", "timeout")
AT_LIMIT = Levels(f"{_STOP}max_turns", (("warning", 0.8),), is_share=True)
SLOW = Levels(_ENVIRONMENT, (("warning", 1.0),))
#: Of the deficit 1 − E[π_train/π_rollout], with a difference of log-probs of at least `APART` nats per token.
DEFICIT = Levels(_KL, (("warning", 0.05), ("critical", 0.2)))
APART = 0.1


def _num_turns(run: RunLog) -> tuple[str, Series]:
    """Turns of the policy per episode, and the metric that they come from.

    A question is followed by turns of the policy and answers to them: two messages per turn. Where only calls
    of tools are logged, a turn follows each.
    """
    key = next((key for key in (_TURNS, _MESSAGES) if len(run.table.series(key))), _CALLS)
    series = run.table.series(key)
    if key == _MESSAGES:
        series = replace(series, values=series.values / 2.0)
    return key, replace(series, values=series.values + 1.0) if key == _CALLS else series


def _gains(run: RunLog) -> bool:
    """Whether the run learns, whatever its episodes look like."""
    return run.has_learned or run.has_gained or rises(run.table, th.SCORE)


@Rule(
    "tool-errors",
    source=th.OWN,
    one_of=(_ERRORS, _ERROR_SHARE),
    uses=(_CALLS,),
    signal="share of the tool calls that could not be read, raised or timed out",
    thresholds="— / + 15 points, or ≥ 50 % without a fall / + 15 points to ≥ 50 %",
    cause="the policy drifts from the tools' format or arguments, or a tool or its service fails",
    fixes=(
        fix.by_hand("read calls and answers of early and late steps: `rlctl samples`"),
        fix.by_hand("try the tools without a model: `rlctl environment test NAME`"),
    ),
    sure=("medium", "calls that the policy spoils and tools that fail are counted together"),
    explains=th.COLLAPSE_RULES,
)
def tool_errors(run: RunLog) -> Detection | Skipped | None:
    """Tool calls succeed."""
    key = _ERROR_SHARE
    series = run.table.series(_ERROR_SHARE)
    if not len(series):
        key = _ERRORS
        steps, (errors, calls) = run.table.aligned(_ERRORS, _CALLS)
        tried = np.maximum(errors, calls)  # a call that cannot be read is an error only
        some = tried > 0.0
        series = Series(steps[some], errors[some] / tried[some])
    if len(series) < th.MIN_STEPS:
        return Skipped(f"tools were called on {len(series)} of the steps", needs_steps=th.MIN_STEPS)
    change = lasting_change(series)
    if change is not None and change.end - change.start >= RISE:
        message = f"the share of tool calls that fail rises from {change.start:.0%} to {change.end:.0%}"
        seen = change_evidence(key, change.start, change.end, series.steps[series.steps >= change.since])
        return Detection("critical" if change.end >= MOSTLY else "warning", message, (seen,))
    if change is not None and change.start - change.end >= RISE:
        return None  # the policy learns the format
    return detect_crossing(
        run, replace(FAILING, key=key), "{worst:.0%} of the tool calls fail {where}", series
    )


@Rule(
    "turns-collapsed",
    source=th.OWN,
    one_of=(_TURNS, _MESSAGES, _CALLS),
    uses=th.REWARDS,
    signal=f"turns of an episode, from at least {SEVERAL:g} to at most {ONE:g}, and the reward",
    thresholds="while the reward rises / while it does not / —",
    cause="the policy stopped calling tools or going on: calls fail, or cost more reward, tokens or turns "
    "than they earn",
    fixes=(
        fix.by_hand("read episodes of early and late steps: `rlctl samples`"),
        fix.by_hand("reward what only the observations make possible; drop penalties for turns and calls"),
    ),
    sure=("medium", "the log shows the turns, not why they ended"),
    explains=("reward-fell", "zero-spread-groups", "flat-reward"),
)
def turns_collapsed(run: RunLog) -> Detection | None:
    """Episodes keep their turns, or need them no more."""
    key, series = _num_turns(run)
    change = lasting_change(series)
    if len(series) < th.MIN_STEPS or change is None or change.start < SEVERAL or change.end > ONE:
        return None
    if run.has_learned:
        return None
    message = f"turns per episode fall from {change.start:.3g} to {change.end:.3g}"
    seen = change_evidence(key, change.start, change.end, series.steps[series.steps >= change.since])
    return Detection("info" if _gains(run) else "warning", message, (seen,))


@Rule(
    "episodes-at-limit",
    thresholds=AT_LIMIT,
    source=th.OWN,
    uses=th.REWARDS,
    one_of=tuple(_STOP + reason for reason in LIMITS),
    signal=f"share of episodes that a limit ends: {', '.join(f'`{_STOP}{reason}`' for reason in LIMITS)}; "
    "a remark while the reward rises",
    cause="the limit is lower than the task needs, or the policy never ends an episode",
    fixes=(
        fix.by_hand("read the last turns of some episodes: `rlctl samples`"),
        fix.by_hand("raise the limit of the section `environment`, or reward ending early"),
    ),
    sure=("high", "the reasons are counted"),
    explains=("zero-reward", "zero-spread-groups", "zero-advantages", "no-gradient", "flat-reward"),
)
def episodes_at_limit(run: RunLog) -> Detection | None:
    """Episodes end before their limits."""
    keys = [key for reason in LIMITS if len(run.table.series(key := _STOP + reason))]
    steps, shares = run.table.aligned(*keys)
    most = max(zip(keys, shares, strict=True), key=lambda one: float(one[1].sum()))[0]
    crossed = detect_crossing(
        run,
        replace(AT_LIMIT, key=most),
        f"{{worst:.0%}} of the episodes end at a limit, mostly {most.removeprefix(_STOP)}, {{where}}",
        Series(steps, np.sum(shares, axis=0)),
    )
    return replace(crossed, severity="info") if crossed and _gains(run) else crossed


@Rule(
    "slow-environment",
    source=th.OWN,
    needs=(_POLICY, _ENVIRONMENT),
    uses=(_WAITING,),
    signal=f"`{_ENVIRONMENT}` over the time of an episode's turns, waiting for the policy included",
    thresholds="— / > 1 / —",
    cause="tools, games or their servers take longer than the sampling, so the engine idles",
    fixes=(
        fix.by_hand("run more episodes at once (`environment.concurrency`)"),
        fix.by_hand("make calls faster: less work per call, a faster server, a lower time limit"),
    ),
    sure=("high", "the times are measured"),
)
def slow_environment(run: RunLog) -> Detection | None:
    """Environments answer faster than the policy speaks."""
    keys = [key for key in (_ENVIRONMENT, _POLICY, _WAITING) if key in run.table.columns]
    steps, (environment, *parts) = run.table.aligned(*keys)
    of_turns = np.sum(parts, axis=0)
    some = of_turns > 0.0
    message = "an episode spends {worst:.3g} times as long in its environment as in its turns {where}"
    return detect_crossing(run, SLOW, message, Series(steps[some], environment[some] / of_turns[some]))


def _has_observations(run: RunLog) -> str:
    if _OBSERVED in run.table.columns:
        return "its losses and metrics are over sampled tokens only"
    turns = _num_turns(run)[1].values
    return "no episode has several turns" if len(turns) and turns.max() <= ONE else ""


@Rule(
    "observation-tokens",
    source=th.LOGIC,
    one_of=(_TURNS, _MESSAGES, _CALLS),
    uses=(_KL, _K3, _WEIGHT, th.LOG_PROB_GAP.key, _OBSERVED),
    not_applicable=_has_observations,
    signal="in runs with several turns, 1 − mean π_train/π_rollout per token: `rollout_corr/kl` − "
    "`rollout_corr/k3_kl`, or 1 − the mean weight; with log-probs at least "
    f"{APART:g} nats apart",
    thresholds="— / ≥ 0.05 / ≥ 0.2",
    cause="outputs of tools or turns of the user are in the loss: frameworks store log-prob 0 for tokens "
    "that were not sampled, and the mask does not leave them out",
    fixes=(
        fix.by_hand(
            "set the mask to 0 for every token that the policy did not sample: `response_mask` of an agent "
            "loop (verl), `env_mask` of a rollout function (TRL)"
        ),
        fix.by_hand("give every observation a log-prob, and count where the mask is 1"),
    ),
    sure=("medium", "log-probs of other tokens or of another temperature lower the mean ratio too"),
    explains=(*th.GAP_RULES, *th.COLLAPSE_RULES, "gradient-norm"),
)
def observation_tokens(run: RunLog) -> Detection | Skipped | None:
    """What the environment said is in no loss.

    Over tokens drawn from π_rollout the ratio π_train/π_rollout averages 1, however far the policies are
    apart. A token with a stored log-prob of 0 that was not drawn adds its probability instead, at most 1. So
    1 − the mean ratio is a lower bound of the share of such tokens. With d = log π_train − log π_rollout, kl
    is −E[d] and k3 is E[exp d − 1 − d].
    """
    steps, (kl, k3) = run.table.aligned(_KL, _K3)
    key = _KL
    deficit = kl - k3
    apart = kl
    if not len(steps):
        steps, (weight, apart) = run.table.aligned(_WEIGHT, th.LOG_PROB_GAP.key)
        key = _WEIGHT
        deficit = 1.0 - weight
        if not len(steps) or run.facts.rollout_is not in {None, "token"}:
            return Skipped("the log has no mean ratio of single tokens", (_KL, _K3))
    series = Series(steps, np.where(apart >= APART, deficit, 0.0))
    message = "at least {worst:.0%} of the tokens in the loss were not sampled {where}"
    return detect_crossing(run, replace(DEFICIT, key=key), message, series)
