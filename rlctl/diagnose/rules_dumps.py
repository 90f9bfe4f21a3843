"""Rules about what dumped rollouts and checkpoints show: who sampled, what was rewarded, what is lost."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.diagnose import fixes as fix
from rlctl.diagnose.equal_responses import NOISY_PROMPTS, NOISY_SHARE, REPEATS, is_common
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule
from rlctl.diagnose.table import RewardNoise, RunLog

_DUMP = "dumped rollouts"
_CAUSES = {
    "never delivered": "a weight sync is confirmed, but the engine goes on with its old weights",
    "late": "the engine samples while, or before, it receives the weights that it names",
    "base": "the engine samples without the adapter",
    "unknown": "the engine has weights that the run never had, or computes otherwise",
}


@Rule("who-sampled", thresholds="— / none of the kept weights / others than recorded")
def sampled_by_others(run: RunLog) -> Detection | Skipped | None:
    """The weights that a rollout names are those that sampled it."""
    if run.dumps is None or not run.dumps.who_sampled:
        return Skipped("no dumped rollouts were compared with two kept versions of the weights")
    fault = run.dumps.wrong_sampler
    if not fault:
        return None
    severity: Severity = "warning" if fault == "unknown" else "critical"
    seen = Evidence(_DUMP, f"{run.dumps.who_sampled} (`rlctl diagnose RUN --who-sampled`)")
    check = (fix.by_hand(run.dumps.fix), fix.PROVE_THE_SYNC)
    is_known = severity == "critical"
    # Weights that nobody knows are what any gap looks like: a rule that says which gap explains them.
    first_step = _first_step(run)
    return Detection(
        severity=severity,
        what=run.dumps.who_sampled,
        evidence=(seen,),
        cause=_CAUSES.get(fault),
        fixes=check,
        since=None if is_known else first_step,
        explains=None if is_known else (),
        is_first=is_known,
    )


def _first_step(run: RunLog) -> int | None:
    return int(run.table.steps[0]) if len(run.table.steps) else None


#: Share of the updates that an optimizer's state must remember, and updates from which it is asked.
REMEMBERED, UPDATES = 0.5, 10


@Rule(
    "optimizer-state",
    thresholds=f"— / fewer than {REMEMBERED:.0%} of {UPDATES} updates or more / —",
    fixes=(
        fix.by_hand(
            "find what rebuilds or clears the optimizer: offloading, an engine that is made anew, a resume "
            "without its state"
        ),
    ),
)
def optimizer_state(run: RunLog) -> Detection | Skipped | None:
    """The optimizer remembers the updates that were made."""
    state = run.dumps.optimizer if run.dumps else None
    if state is None:
        return Skipped("no optimizer's state with a count of updates was read (those of FSDP are not)")
    if state.made < UPDATES:
        return Skipped(f"the newest checkpoint is of {state.made} updates, fewer than {UPDATES}")
    if state.remembered >= REMEMBERED * state.made:
        return None
    lost_at = round(state.step * (1.0 - state.remembered / state.made))
    return Detection(
        severity="warning",
        what=f"the optimizer's state remembers {state.remembered:,} of {state.made:,} updates, last lost "
        f"after step {lost_at:,}",
        evidence=(
            Evidence(
                "checkpoint",
                f"{state.remembered:,} of {state.made:,} updates, in that of step {state.step:,}",
            ),
        ),
        since=_first_step(run),  # it may have been lost before, any number of times
    )


#: Share of the rewards' variance that certainly does not depend on the response.
NOISY: tuple[tuple[Severity, float], ...] = (("warning", 0.5), ("critical", 0.8))
_JUDGES, _MOST_VOTES = ("judge", "judge_group"), 64


def _steadier(run: RunLog) -> Iterator[Fix]:
    """More votes of a judge that is noisy; for another grader the one that the data names, or advice."""
    noise = run.dumps.reward_noise if run.dumps else None
    noisiest = noise.term if noise else ""
    terms = run.spec.reward.all_terms if run.spec else ()
    graders = {term.name for term in terms if noisiest in ("", term.label)}
    if run.spec is not None and graders.intersection(_JUDGES):
        votes = run.spec.reward.judge.votes
        if votes < _MOST_VOTES:
            why = "the noise falls with the number of votes"
            yield fix.change(f"reward.judge.votes={min(4 * votes, _MOST_VOTES)}", why=why)
    else:
        yield from fix.other_grader(run)
    yield fix.by_hand("grade one stored response several times; check that each response gets its own reward")


@Rule(
    "unsteady-reward",
    thresholds=f"any, and where learned³ / ≥ {NOISY[0][1]:.0%} of the variance, with 95 % confidence, in "
    f"{NOISY_PROMPTS} prompts and {NOISY_SHARE:.0%} of them / ≥ {NOISY[1][1]:.0%}, or rewards of "
    f"other rows, where {REPEATS} repeats differ; agents: at most a warning",
    fixes=_steadier,
)
def unsteady_reward(run: RunLog) -> Detection | Skipped | None:
    """Equal responses to a prompt get equal rewards."""
    noise = run.dumps.reward_noise if run.dumps else None
    if noise is None:
        return Skipped("no dumped rollouts with a prompt that got the same response twice in a step")
    if noise.first_step is None:
        return None
    reached = [severity for severity, least in NOISY if noise.low >= least]
    # Where nearly all is right, or a grader rarely fails, all of a small variance is noise.
    is_limited = not is_common(noise) or run.has_learned
    severity: Severity = "info" if is_limited or not reached else "critical" if noise.shift else reached[-1]
    is_agent = run.spec is not None and run.spec.environment.name != "single_turn"
    if is_agent and severity == "critical":
        severity = "warning"
    count = f"{noise.num_repeats:,} repeated responses to {noise.num_prompts:,} prompts"
    seen = Evidence(
        _DUMP, f"{noise.share:.0%} of the variance is among equal responses (95 %: {noise.low:.0%} to "
        f"{noise.high:.0%}; {count})"
    )  # fmt: skip
    of_term = f", most of all by {noise.term}" if noise.term else ""
    message = (
        f"equal responses to a prompt get different rewards{of_term}: {noise.share:.0%} of the rewards' "
        "variance does not depend on the response"
    )
    if noise.shift:
        return _shifted(noise, seen, severity)
    if severity != "info" and is_agent:
        cause = "the grader, or a state of the environment that the episode does not show, is random"
        sure: Sure = ("low", "an environment may reward at random on purpose")
        since = noise.first_step
        return Detection("warning", message, (seen,), cause=cause, sure=sure, since=since, explains=())
    is_most = severity != "info"
    return Detection(severity, message, (seen,), since=noise.first_step, is_first=is_most)


def _shifted(noise: RewardNoise, seen: Evidence, severity: Severity) -> Detection:
    """Rewards that belong to the responses of other rows."""
    count = "1 row" if abs(noise.shift) == 1 else f"{abs(noise.shift)} rows"
    where = f"{count} {'later' if noise.shift > 0 else 'earlier'}"
    return Detection(
        severity=severity,
        what=f"responses get the rewards of those {where}: moved back, equal responses have equal rewards",
        evidence=(seen,),
        cause="rewards and responses are in different orders, or the grader keeps a state between responses",
        fixes=(fix.by_hand(f"put rewards and responses in one order: the rewards are those of {where}"),),
        sure=("high", "shifted back, the rewards are a function of the response"),
        since=noise.first_step,
        explains=None if severity == "critical" else (),
        is_first=severity == "critical",
    )
