"""Rules about gradients, rewards, lengths and entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Remedy, Rule, Severity, Skipped
from rlctl.diagnose.remedies import change, on
from rlctl.diagnose.signals import crossing, longest_true, spikes
from rlctl.diagnose.table import RunLog, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SCORE, _BEST, _WORST = "critic/score/mean", "critic/score/max", "critic/score/min"
_NORM = th.GRAD_NORM.key
_LOSS, _DRIFT = "actor/pg_loss", "actor/ppo_kl"
_ERRORS = "reward/error_fraction"


def not_finite(run: RunLog) -> Finding | Skipped | None:
    """A loss or gradient was not a number."""
    logged = {key: run.table.nonfinite[key] for key in (_NORM, _LOSS) if key in run.table.nonfinite}
    if not logged:
        present = {_NORM, _LOSS} & run.table.names
        return None if present else Skipped("neither was logged", (_NORM, _LOSS))
    key, steps = max(logged.items(), key=lambda item: len(item[1]))
    share = len(steps) / len(run.table.steps)
    severity: Severity = "info"
    if share >= th.NONFINITE_CRITICAL_SHARE:
        severity = "critical"
    elif share >= th.NONFINITE_WARNING_SHARE and len(steps) > 1:
        severity = "warning"
    return Finding(
        severity,
        f"{key} is not a finite number on {_steps(len(steps))}",
        (Evidence(key, f"NaN or infinite on {share:.1%} of the steps", int(steps[0]), int(steps[-1])),),
        "overflow in low precision, too large a learning rate, or log-probs that are not finite",
        th.OWN,
        _calmer(run),
    )


def gradient_norm(run: RunLog) -> Finding | Skipped | None:
    """The gradient norm jumps, or is large throughout."""
    series = run.table.series(_NORM)
    crossed = crossing(series, th.GRAD_NORM)
    if crossed is not None:
        what = f"the gradient norm is {crossed.worst:.3g} {crossed.where}"
        cause = "the update is unstable, or the loss is a sum where a mean was meant"
        return Finding("warning", what, (crossed.evidence,), cause, th.GRAD_NORM.source, _calmer(run))
    jumps = spikes(series)
    if len(jumps) == 0:
        return None
    many = len(jumps) >= max(th.SPIKE_COUNT, th.SPIKE_SHARE * len(series))
    largest = int(np.argmax(jumps.values))
    value, median = float(jumps.values[largest]), float(np.median(series.values))
    figure = f"{value:.3g} at step {jumps.steps[largest]}, median {median:.3g}"
    return Finding(
        "warning" if many else "info",
        f"the gradient norm jumps on {_steps(len(jumps))}, to as much as {value / max(median, 1e-12):.0f} "
        "times its median",
        (Evidence(_NORM, figure, int(jumps.steps[0]), int(jumps.steps[-1])),),
        "single batches with extreme weights or advantages; a collapse announces itself the same way",
        th.OWN,
        _calmer(run) if many else (),
    )


def no_gradient(run: RunLog) -> Finding | Skipped | None:
    """The gradient is exactly zero on many steps."""
    series = run.table.series(_NORM)
    idle = series.values == 0.0
    share = float(idle.mean())
    if share < th.ZERO_GRADIENT_SHARE:
        return None
    steps = series.steps[idle]
    return Finding(
        "critical",
        f"the gradient is exactly zero on {share:.0%} of the steps",
        (Evidence(_NORM, f"0 on {_steps(len(steps))}", int(steps[0]), int(steps[-1])),),
        "no group of responses has both better and worse ones, or everything is rejected or frozen",
        th.FIELD,
    )


def dead_groups(run: RunLog) -> Finding | Skipped | None:
    """Groups whose rewards are all equal teach nothing."""
    crossed = crossing(run.table.series(th.ZERO_SPREAD.key), th.ZERO_SPREAD)
    if crossed is None:
        return None
    steps, (score,) = run.table.aligned(_SCORE)
    inside = (steps >= crossed.first_step) & (steps <= crossed.last_step)
    position = _position(run.table, float(np.median(score[inside])) if inside.any() else None)
    if position is None:
        which, severity = "all right or all wrong", crossed.severity
        cause = "the prompts are too easy or too hard (the rewards that would tell are not logged)"
    elif position >= th.LEARNED:  # success, not sickness: what is left to learn is elsewhere
        which, severity = "mostly all right", "info"
        cause = "the policy has learned these prompts: stop, or bring harder ones"
    elif position >= 0.5:
        which, severity = "mostly all right", crossed.severity
        cause = "the prompts are too easy: filter those always solved, or bring harder ones"
    else:
        which, severity = "mostly all wrong", crossed.severity
        cause = "the prompts are too hard, or the grader cannot read the answers: check some, start easier"
    more = () if severity == "info" or run.spec is None else (change(f"rollout.n={2 * run.spec.rollout.n}"),)
    return Finding(
        severity,
        f"{crossed.worst:.0%} of the groups have equal rewards, {which}: they teach nothing {crossed.where}",
        (crossed.evidence,),
        cause,
        th.ZERO_SPREAD.source,
        more,
    )


def zero_reward(run: RunLog) -> Finding | Skipped | None:
    """Not one response is ever rewarded."""
    steps, (score, best) = run.table.aligned(_SCORE, _BEST)
    start, length = longest_true((score == 0.0) & (best == 0.0))
    if length < th.ZERO_REWARD_STEPS:
        return None
    first, last = int(steps[start]), int(steps[start + length - 1])
    evidence: tuple[Evidence, ...] = (Evidence(_SCORE, f"exactly 0 on {_steps(length)}", first, last),)
    errors = run.table.series(_ERRORS).values
    if len(errors):
        evidence += (Evidence(_ERRORS, f"{errors.mean():.1%} on average", first, last),)
    if (score[:start] > 0.0).any():
        cause = "the policy has collapsed: it was rewarded before"
        remedies = _calmer(run)
    else:
        cause = "the grader rejects everything: wrong answer format, wrong grader, or a task beyond the model"
        remedies = on(run, "reward.name=auto", when=lambda spec: spec.reward.name != "auto")
    what = f"every reward is exactly 0 for {_steps(length)}"
    return Finding("critical", what, evidence, cause, th.FIELD, remedies)


def truncated(run: RunLog) -> Finding | Skipped | None:
    """Responses are cut off at the length limit."""
    crossed = crossing(run.table.series(th.TRUNCATED.key), th.TRUNCATED)
    if crossed is None:
        return None
    length = run.spec.data.max_response_length if run.spec else 0
    return Finding(
        crossed.severity,
        f"{crossed.worst:.1%} of the responses are cut off at the length limit {crossed.where}",
        (crossed.evidence,),
        "the limit is too short for the task, or the policy no longer ends its responses",
        th.TRUNCATED.source,
        (change(f"data.max_response_length={2 * length}"),) if length else (),
    )


def entropy(run: RunLog) -> Finding | Skipped | None:
    """The policy stops exploring before it has learned."""
    series = run.table.series(th.ENTROPY.key)
    score = run.table.series(_SCORE).values
    newest = float(np.median(score[-th.WINDOW :])) if len(score) else None
    position = _position(run.table, newest)
    if position is not None and position >= th.LEARNED:
        return None  # sure of itself because it is right
    crossed = crossing(series, th.ENTROPY)
    if crossed is not None:
        what, evidence = f"entropy is {crossed.worst:.2g} nats {crossed.where}", crossed.evidence
    elif (fall := _halved_for_nothing(run.table)) is not None:
        start, end = fall
        what = f"entropy fell from {start:.3g} to {end:.3g} nats while the reward stayed where it was"
        figure = f"{end / start:.0%} of its start"
        evidence = Evidence(th.ENTROPY.key, figure, int(series.steps[0]), int(series.steps[-1]))
    else:
        return None
    return Finding(
        "warning",
        what,
        (evidence,),
        "exploration is gone: responses to a prompt are nearly alike and have little to learn from",
        th.ENTROPY.source,
        on(
            run,
            "actor.clip_ratio_high=0.28",
            when=lambda spec: (
                spec.algorithm.rollout_correction.loss_type == "ppo_clip"
                and (spec.actor.clip_ratio_high or spec.actor.clip_ratio) < 0.28
            ),
        )
        + on(run, "rollout.temperature=1.0", when=lambda spec: spec.rollout.temperature < 1.0),
    )


def healthy_loss(run: RunLog) -> Finding | Skipped | None:
    """A policy loss of about zero that needs no mending: say so."""
    spec = run.spec
    if spec is None or spec.algorithm.rollout_correction.loss_type != "ppo_clip":
        return Skipped("only a clipped loss is near zero on-policy")
    if spec.algorithm.adv_estimator not in {"rloo", "grpo"}:
        return Skipped("advantages are not centred within groups")
    steps, (loss, norm, drift) = run.table.aligned(_LOSS, _NORM, _DRIFT)
    if len(steps) == 0:
        return Skipped("loss, gradient norm and drift are never logged together")
    typical = float(np.median(np.abs(loss)))
    is_healthy = typical < th.PG_LOSS_ZERO and float(np.median(norm)) > th.GRAD_NORM_NONZERO
    if not is_healthy or float(np.median(np.abs(drift))) > th.PG_LOSS_ZERO:
        return None
    return Finding(
        "info",
        f"the policy loss is near zero ({typical:.2g}), and that is healthy",
        (
            Evidence(_LOSS, f"|loss| {typical:.2g} (median)", int(steps[0]), int(steps[-1])),
            Evidence(_NORM, f"{np.median(norm):.3g} (median)", int(steps[0]), int(steps[-1])),
        ),
        "near on-policy the ratio is 1 and advantages centred within groups add up to 0: the value cancels, "
        "the gradient does not",
        th.LOGIC,
    )


def _position(table: Table, score: float | None) -> float | None:
    """Where a mean reward lies between the worst (0) and the best (1) single reward of the run."""
    best, worst = table.series(_BEST).values, table.series(_WORST).values
    if score is None or len(best) == 0 or len(worst) == 0 or best.max() <= worst.min():
        return None
    return float((score - worst.min()) / (best.max() - worst.min()))


def _halved_for_nothing(table: Table) -> tuple[float, float] | None:
    """Entropy at both ends of the run, if it halved while the reward gained next to nothing."""
    steps, (values, score) = table.aligned(th.ENTROPY.key, _SCORE)
    if len(steps) < th.ENTROPY_STEPS:
        return None
    width = max(th.WINDOW, len(steps) // 10)
    start, end = _ends(values, width)
    before, after = _ends(score, width)
    first, last = _position(table, before), _position(table, after)
    if first is None or last is None or last - first >= th.FLAT_REWARD or end > th.ENTROPY_SHARE * start:
        return None
    return start, end


def _ends(values: NDArray[np.float64], width: int) -> tuple[float, float]:
    return float(np.median(values[:width])), float(np.median(values[-width:]))


def _calmer(run: RunLog) -> tuple[Remedy, ...]:
    """Smaller steps."""
    if run.spec is None:
        return ()
    clip = on(run, "actor.grad_clip=1.0", when=lambda spec: spec.actor.grad_clip == 0.0)
    return (*clip, change(f"actor.lr={run.spec.actor.lr / 2:g}"))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"


RULES = (
    Rule("not-finite", "loss and gradient are numbers", not_finite, uses=(_LOSS, _NORM)),
    Rule("gradient-norm", "gradient norm neither jumps nor stays large", gradient_norm, needs=(_NORM,)),
    Rule("no-gradient", "there is a gradient", no_gradient, needs=(_NORM,)),
    Rule(
        "dead-groups",
        "groups have both better and worse responses",
        dead_groups,
        needs=(th.ZERO_SPREAD.key,),
        uses=(_SCORE, _BEST, _WORST),
    ),
    Rule("zero-reward", "something is rewarded", zero_reward, needs=(_SCORE, _BEST), uses=(_ERRORS,)),
    Rule("truncated", "responses end before the length limit", truncated, needs=(th.TRUNCATED.key,)),
    Rule(
        "entropy",
        "the policy explores until it has learned",
        entropy,
        needs=(th.ENTROPY.key,),
        uses=(_SCORE, _BEST, _WORST),
    ),
    Rule(
        "healthy-loss",
        "explains a loss near zero",
        healthy_loss,
        needs=(_LOSS, _NORM, _DRIFT),
        needs_spec=True,
    ),
)
