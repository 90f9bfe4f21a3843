"""Rules about gradients, the KL to the reference, the critic, and the value of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.facts import DECIMALS, is_rounded
from rlctl.diagnose.falls import fall_of
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, crossings, of_crossing, worst_of
from rlctl.diagnose.rules_engines import MOSTLY_ENGINE, engine_share
from rlctl.diagnose.signals import (
    Crossing,
    change_evidence,
    crossing,
    evidence_over,
    is_frequent,
    longest_true,
    rises,
    rolling_median,
    smoothed,
    spikes,
    steps_text,
    trend,
)
from rlctl.diagnose.table import COUNTED, RunLog, Series, ends
from rlctl.diagnose.thresholds import Levels

_NORM, _LOSS, _PPO_KL, _LR = th.GRAD_NORM.key, "actor/pg_loss", "actor/ppo_kl", "actor/lr"
_ADVANTAGE, _KL_COEF, _KL_LOSS = "critic/advantages/mean", "actor/kl_coef", "actor/kl_loss"
_CUT_OFF = "response_length/clip_ratio"
_ADVANTAGE_ENDS = ("critic/advantages/max", "critic/advantages/min")
#: Metrics that must be finite at every step, the most informative first.
_FINITE = (
    *(_NORM, _LOSS, _KL_LOSS, _PPO_KL, "actor/entropy", "critic/vf_loss", "critic/grad_norm"),
    th.SCORE,
)
NONFINITE_WARNING_SHARE, NONFINITE_CRITICAL_SHARE = 0.01, 0.1
#: Gradient norm that no usual loss reaches, for any model.
HUGE_NORM = Levels(_NORM, (("critical", 1e4),))
#: Nats per token by which the updates on a batch usually move the policy at most, and by which they move it
#: far: the median of three steps; one step counts from a multiple. In a tiny update nothing is learned.
USUAL_UPDATE, TINY_UPDATE, ONE_STEP = 3e-3, 1e-6, 5.0
#: Share of the steps on which updates must be tiny: single ones may be larger.
MOST_STEPS = 0.9
#: Updates that would take more times the rate are not made at all.
MOST_TIMES = 1e4
#: Learning rate up to which a run of some length changes nothing.
TINY_RATE = 1e-9
#: Metrics that no two steps share to more than four decimals, and steps in a row that may.
NEVER_EQUAL, FROZEN_STEPS = (_NORM, "actor/entropy", _LOSS), 20
LARGE_UPDATE: tuple[tuple[Severity, float], ...] = (("warning", 0.05), ("critical", 0.1))
_WATCH = fix.by_hand("keep the rate while the reward gains; lower it where the reward falls")
#: Share of the steps, and number, from which spikes are a warning instead of a remark.
SPIKE_SHARE, SPIKE_COUNT = 0.01, 3
_REACH = fix.by_hand(
    "check that trained parameters require a gradient and are in the optimizer; with adapters and gradient "
    "checkpointing call `model.enable_input_require_grads()`"
)
_NO_GRADIENT_OF_CRITIC = (
    "all advantages are 0, everything is rejected, or the loss does not reach the parameters"
)
_IN_FULL = fix.by_hand(
    "compute one batch in full precision, and look for the first tensor that is not finite"
)
#: Metric of a penalized KL to the reference → the coefficient's key.
_COEF_OF = {_KL_LOSS: "actor.kl_loss_coef", "actor/reward_kl_penalty": "algorithm.kl_ctrl.kl_coef"}
#: Coefficient from which the penalty may hold the policy, and the KL, in nats, below which it does.
STRONG_PENALTY, HELD_KL = 0.5, 0.2
#: Share of the largest KL that a KL of the first rows must have to have been there from the start, and rows.
EARLY_SHARE, EARLY_ROWS = 0.4, 5
#: KL in the first step, in nats, that another precision of the same weights does not reach.
APART_AT_ONCE = 0.1
_OTHER_START = (
    "the reference is not the policy that the run began with: another checkpoint, precision or template, "
    "or, with an adapter that was trained before, the model without it"
)
_SAME_START = fix.by_hand(
    "name the weights that the run begins with as the reference, merged if they are an adapter; a "
    "stronger penalty would undo their training"
)
_WRONG_SIGN = (
    "the penalty does not hold the policy: the KL has the wrong sign in the loss, or no gradient (detached, "
    "or the estimator k1 as a loss)"
)
_CHECK_THE_SIGN = fix.by_hand(
    "check the sign and the gradient of the KL term: an update with this term alone must make the KL smaller"
)
#: A share of groups or tokens that counts as all of them.
ALL_OF_THEM = 0.99
REF_KL_OK = th.REF_KL[0].tiers[0][1]
#: On-policy, |pg_loss| below the first value with a gradient norm above the second is normal.
PG_LOSS_ZERO, GRAD_NORM_NONZERO = 0.01, 1e-6


@Rule("not-finite", uses=_FINITE)
def not_finite(run: RunLog) -> Detection | Skipped | None:
    """Losses, gradient norms, KL and entropy are finite."""
    logged = {key: run.table.nonfinite[key] for key in _FINITE if key in run.table.nonfinite}
    if not logged:
        present = set(_FINITE) & run.table.columns.keys()
        return None if present else Skipped("not logged", (_NORM, _LOSS))
    key, steps = max(logged.items(), key=lambda item: len(item[1]))
    since = min(int(bad[0]) for bad in logged.values())
    share = len(steps) / (len(steps) + len(run.table.series(key)))
    is_warning = share >= NONFINITE_WARNING_SHARE and len(steps) > 1
    severity: Severity = "warning" if is_warning else "info"
    return Detection(
        "critical" if share >= NONFINITE_CRITICAL_SHARE else severity,
        f"{key} is not a finite number on {count_of_steps(len(steps))}",
        (evidence_over(steps, key, f"NaN or infinite on {share:.1%} of the steps that logged it"),),
        fixes=(*fix.calmer(run), fix.resume_before(since), _IN_FULL),
        since=since,
    )


def _wanted_rate(run: RunLog, step: int, size: float) -> float | None:
    """Peak learning rate for updates of the usual size, from their size, in nats, at a step; None if unknown.

    The size grows with the square of the rate. The peak is scaled by the wanted factor, so that warm-up and
    decay stay as they are; where updates are too large during the warm-up, from the rate of that step.
    """
    rates = run.table.series(_LR)
    rate = rates.values[rates.steps == step]
    peak = fix.peak_rate(run)
    if not rate.any() or peak is None:
        return None
    factor = math.sqrt(USUAL_UPDATE / size)
    # The warm-up goes on after this step, so that the peak itself has to be of this size.
    is_in_warm_up = factor < 1.0 and step < rates.steps[int(np.argmax(rates.values))]
    is_before_peak = fix.is_warming_up(run) or is_in_warm_up
    return float(rate[0] if is_before_peak else peak) * factor


def _rate_for(run: RunLog, sizes: Series) -> Fix:
    """Fix for updates of these sizes, in nats.

    A policy that the first large update has destroyed hardly moves at any rate, so the step that asks for
    the lowest rate decides. In a warm-up that is far from its peak, larger updates need a shorter one.
    """
    largest = float(sizes.values.max())
    if largest < USUAL_UPDATE and fix.is_warming_up(run):
        return fix.shorter_warm_up(run)
    wanted = [
        _wanted_rate(run, int(step), float(size))
        for step, size in zip(sizes.steps, sizes.values, strict=True)
    ]
    known = [rate for rate in wanted if rate is not None]
    peak = fix.peak_rate(run)
    if known and peak is not None and min(known) > MOST_TIMES * peak:
        return fix.by_hand(
            "check that the optimizer's steps change the weights, and that the policy has them"
        )
    if not known:
        return fix.by_hand(f"{'lower' if largest > USUAL_UPDATE else 'raise'} the learning rate")
    why = f"for updates of about {USUAL_UPDATE:g} nats per batch: they grow with the square of the rate"
    return fix.change(f"actor.lr={min(known):.2g}", why=why)


@Rule(
    "large-updates",
    facts=("updates_per_batch", "bypass_mode"),
    one_of=(th.K3.key, _PPO_KL),
    uses=(*th.STALENESS, _LR, *th.REWARDS),
    thresholds=f"while the reward gains / > {LARGE_UPDATE[0][1]:g} in two of three steps / "
    f"> {LARGE_UPDATE[1][1]:g}, or a step > {LARGE_UPDATE[1][1] * ONE_STEP:g}",
)
def large_updates(run: RunLog) -> Detection | Skipped | None:
    """One batch does not move the policy far."""
    key = th.K3.key if run.facts.bypass_mode else _PPO_KL
    series = run.table.series(key)
    sizes = np.abs(series.values)
    why_not = _why_not_of_updates(run, Series(series.steps, sizes))
    if why_not:
        return Skipped(why_not)
    lasting = np.maximum(smoothed(sizes, 3, "mirror"), sizes / ONE_STEP)
    reached = [severity for severity, limit in LARGE_UPDATE if lasting.max() > limit]
    if not reached:
        return None
    first = int(np.argmax(lasting > LARGE_UPDATE[0][1]))
    window = slice(first, first + th.WINDOW)
    most = first + int(np.argmax(sizes[window]))
    large = sizes[window] >= min(sizes[most], LARGE_UPDATE[0][1])
    size = float(sizes[most])
    step = int(series.steps[most])
    message = f"the updates on one batch move the policy by {size:.2g} nats per token in step {step:,}"
    seen = replace(_update_seen(series, most), metric=key)
    since = int(series.steps[first])
    if _still_gains(run):
        message += ", and the reward gains"
        return Detection("info", message, (seen,), fixes=(_WATCH,), since=since)
    fixes = (_rate_for(run, Series(series.steps[window][large], sizes[window][large])), fix.FIND_THE_CAUSE)
    return Detection(reached[-1], message, (seen,), fixes=fixes, since=since)


def _why_not_of_updates(run: RunLog, sizes: Series) -> str:
    """Why distances (k3 in bypass mode, else the mean log-ratio) are not those of the updates, or empty."""
    if (run.facts.updates_per_batch or 1) < 2 or not len(sizes):
        return "one update per batch moves the policy after everything is measured"
    if run.facts.bypass_mode and _are_stale(run):
        return "the samples are stale"
    if run.facts.bypass_mode and engine_share(run) >= MOSTLY_ENGINE:
        return "most of the log-ratio is between engine and trainer, and not of the updates"
    if _ignores_the_rate(run, sizes):
        return "the figure does not depend on the learning rate, so it is not of the updates"
    return ""


def _still_gains(run: RunLog) -> bool:
    """Whether the reward rose, and has not fallen from its best."""
    score = run.table.series(th.SCORE)
    gains = run.has_gained or run.has_learned or rises(run.table, th.SCORE)
    return gains and (len(score) < th.MIN_STEPS or fall_of(score) is None)


def largest_update(run: RunLog, until: int) -> float | None:
    """Nats per token by which the updates on one batch moved the policy most, up to a step; None: unknown."""
    series = run.table.series(th.K3.key if run.facts.bypass_mode else _PPO_KL)
    sizes = Series(series.steps, np.abs(series.values))
    early = sizes.values[sizes.steps <= until]
    if run.facts.bypass_mode is None or _why_not_of_updates(run, sizes) or not len(early):
        return None
    return float(early.max())


def _ignores_the_rate(run: RunLog, sizes: Series) -> bool:
    """Whether, up to the largest of the first steps, sizes are the same at half of the learning rate or less.

    After the largest, a policy that has collapsed no longer moves.
    """
    rates = run.table.series(_LR)
    _, at_rate, at_size = np.intersect1d(rates.steps, sizes.steps, return_indices=True)
    early = sizes.values[at_size][: th.START_STEPS]
    early = early[: int(np.argmax(early)) + 1] if len(early) else early
    rate = rates.values[at_rate][: len(early)]
    is_low = rate <= rate.max(initial=0.0) / 2.0
    return bool(is_low.any() and not is_low.all() and np.median(early[is_low]) > early[~is_low].max() / 2.0)


@Rule(
    "frozen",
    one_of=NEVER_EQUAL,
    min_steps=th.MIN_STEPS,
    thresholds=f"— / one value of more than 4 decimals on {FROZEN_STEPS} steps in a row / —",
    fixes=(fix.by_hand("check what is logged where a step is skipped, and that batches differ"),),
)
def frozen(run: RunLog) -> Detection | None:
    """Gradient norm, entropy and loss change from step to step."""
    for series, key in ((run.table.series(key), key) for key in NEVER_EQUAL):
        start, length = longest_true(np.diff(series.values) == 0.0)
        during = series.steps[start : start + length + 1]
        if len(during) >= FROZEN_STEPS and series.values[start] != round(series.values[start], DECIMALS):
            message = f"{key} has one value in {steps_text(int(during[0]), int(during[-1]))}"
            seen = evidence_over(during, key, f"exactly {series.values[start]:.6g}")
            return Detection("warning", message, (seen,))
    return None


@Rule(
    "small-updates",
    needs=(_NORM,),
    uses=(th.K3.key, _PPO_KL, th.LENGTH, th.TRUNCATED.key, *th.REWARDS, _LR),
    thresholds=f"— / rate 0, or < {TINY_RATE:g} for {th.MOVE_STEPS} steps, or < {TINY_UPDATE:g} nats per "
    f"batch on {MOST_STEPS:.0%} of the steps and the reward does not gain / —",
)
def small_updates(run: RunLog) -> Detection | Skipped | None:
    """The updates move the policy."""
    rates = run.table.series(_LR)
    peak = float(rates.values.max()) if len(rates) >= th.MIN_STEPS and not is_rounded(run.table) else None
    least = TINY_RATE if len(rates) >= th.MOVE_STEPS else 0.0
    if run.facts.lr == 0.0 or (peak is not None and peak <= least):
        seen = evidence_over(run.table.steps, _LR, f"at most {peak or 0.0:.2g}")
        fixes = (fix.shorter_warm_up(run),) if run.facts.lr and peak else fix.usual_rate(run)
        return Detection("warning", f"the learning rate is {peak or 0.0:.2g}", (seen,), fixes=fixes)
    norm = run.table.series(_NORM).values
    key, sizes = _sizes_of_updates(run)
    if not len(sizes) or not len(norm):
        return Skipped("no metric shows how far the updates of a batch move the policy")
    most = int(np.argsort(sizes.values)[int(MOST_STEPS * (len(sizes) - 1))])
    size = float(sizes.values[most])
    if not 0.0 < size < TINY_UPDATE or not np.median(norm) or run.has_gained or run.has_learned:
        return None
    message = (
        f"the updates hardly move the policy: by {size:.1g} nats per token and batch, or less on most steps"
    )
    cut = run.table.series(th.TRUNCATED.key).values
    is_mostly_cut = len(cut) > 0 and np.median(cut) > th.TRUNCATED.tiers[-1][1]
    return Detection(
        "warning",
        message,
        (replace(_update_seen(sizes, most), metric=key),),
        fixes=(_rate_for(run, Series(sizes.steps[most : most + 1], sizes.values[most : most + 1])),),
        since=int(run.table.steps[0]),
        # A policy that stays where it is does not learn to end its responses either.
        explains=None if is_mostly_cut else ("flat-reward", "truncated"),
    )


def _sizes_of_updates(run: RunLog) -> tuple[str, Series]:
    """Nats per token by which the updates of single batches move the policy, and the metric; empty: unknown.

    In bypass mode it is at most the k3 to the sampling policy. Otherwise `actor/ppo_kl`, the mean
    log-ratio of N tokens, shows it: if the log-ratios of single tokens vary around 0 with a mean square of
    2 s, s in nats, then their mean varies with one of 2 s / N, and of more if they depend on each other.
    """
    none = Series(np.empty(0, dtype=np.int64), np.empty(0))
    if (run.facts.updates_per_batch or 1) < 2:
        return "", none
    if run.facts.bypass_mode:
        series = run.table.series(th.K3.key)
        return th.K3.key, series if len(series) >= th.MOVE_STEPS else none
    kl = run.table.series(_PPO_KL)
    lengths = run.table.series(th.LENGTH).values
    num_responses = run.facts.batch_size
    if run.facts.bypass_mode is None or num_responses is None or not len(lengths):
        return "", none
    if len(kl) < th.MOVE_STEPS or is_rounded(run.table):
        return "", none
    num_tokens = num_responses * float(np.mean(lengths))
    squares = np.convolve(kl.values**2, np.full(th.WINDOW, 1.0 / th.WINDOW), "valid")
    return _PPO_KL, Series(kl.steps[th.WINDOW - 1 :], num_tokens * squares / 2.0)


def _are_stale(run: RunLog) -> bool:
    return any(run.table.series(age).values.any() for age in th.STALENESS)


def _update_seen(series: Series, at: int) -> Evidence:
    figure = f"{series.values[at]:.2g}, usual is about {USUAL_UPDATE:g}"
    return evidence_over(series.steps[at : at + 1], th.K3.key, figure)


@Rule("gradient-norm", fixes=fix.calmer, needs=(_NORM,))
def gradient_norm(run: RunLog) -> Detection | None:
    """Gradient norm neither jumps nor stays large."""
    series = run.table.series(_NORM)
    crossed = crossing(series, HUGE_NORM) or crossing(series, th.GRAD_NORM)
    jumps = spikes(series)
    if crossed is not None and not (crossed.remark and len(jumps)):
        found = of_crossing(crossed, "the gradient norm is {worst:.3g} {where}")
        usual: Sure = ("low", "the run began like this, so it may be usual for this model and loss")
        return replace(found, fixes=(), sure=usual) if crossed.remark else found
    if not len(jumps):
        return None
    largest = int(np.argmax(jumps.values / jumps.before))
    value = float(jumps.values[largest])
    before = float(jumps.before[largest])
    is_often = len(jumps) >= max(SPIKE_COUNT, SPIKE_SHARE * len(series))
    many = is_often or jumps.values.max() > HUGE_NORM.tiers[0][1]
    figure = f"{value:.3g} at step {jumps.steps[largest]}, median of the steps before it {before:.3g}"
    count = count_of_steps(len(jumps))
    return Detection(
        "warning" if many else "info",
        f"the gradient norm jumps on {count}, at most to {value / before:.2g} times the median before it",
        (evidence_over(jumps.steps, _NORM, figure),),
        cause="single batches with extreme weights or advantages; a collapse begins the same way",
        fixes=None if many else (),
        sure=("medium", "the norm alone does not show which samples caused it"),
    )


@Rule(
    "no-gradient",
    needs=(_NORM,),
    uses=(th.ZERO_SPREAD.key, th.GROUP_STD, th.MASKED.key, _CUT_OFF, *_ADVANTAGE_ENDS),
    thresholds=f"— / — / ≥ {th.ZERO_SHARE * 100:g} % of the steps, or all of fewer than {th.MIN_STEPS}",
    fixes=(fix.larger_groups, _REACH),
)
def no_gradient(run: RunLog) -> Detection | None:
    """The gradient is not zero."""
    series = run.table.series(_NORM)
    is_zero = series.values == 0.0
    share = float(is_zero.mean())
    if not is_frequent(is_zero):
        return None
    steps = series.steps[is_zero]
    evidence = [evidence_over(steps, _NORM, f"0 on {count_of_steps(len(steps))}")]
    message = f"the gradient is exactly zero on {share:.0%} of the steps"
    reasons: dict[str, tuple[str, Iterable[Fix]]] = {
        th.MASKED.key: ("everything is rejected", (fix.by_hand("widen the bounds of rejection"),)),
        _CUT_OFF: (
            "every response is cut off, and cut off responses may be masked",
            (fix.by_hand("raise the length limit, or do not mask cut off responses"),),
        ),
        th.ZERO_SPREAD.key: ("all responses of each group have the same reward", fix.larger_groups(run)),
    }
    if run.facts.has_critic:
        del reasons[th.ZERO_SPREAD.key]
    if run.spec is not None:  # rlctl never masks them
        del reasons[_CUT_OFF]
    shares = {key: _typical(run, key, steps) for key in reasons}
    of_all = next((key for key, one in shares.items() if one is not None and one > ALL_OF_THEM), None)
    if of_all is not None:
        evidence.append(evidence_over(steps, of_all, "1 on these steps"))
        why, fixes = reasons[of_all]
    elif is_rounded(run.table):
        message = f"the gradient is printed as 0 on {share:.0%} of the steps"
        small = f"the log has {DECIMALS} decimals at most: 0 may be a small number"
        return Detection("info", message, tuple(evidence), fixes=(), could_not_check=(small,))
    elif (differing := _groups_differ(run, shares.get(th.ZERO_SPREAD.key), steps)) is not None:
        evidence.append(differing)
        message += ", although rewards differ within groups"
        why = (
            "the loss does not reach the trained parameters: they are frozen or not in the optimizer, the "
            "log-probs are detached, or gradient checkpointing cuts off an adapter's inputs"
        )
        fixes = (_REACH,)
    else:
        unknown = f"{th.ZERO_SPREAD.key} would distinguish equal rewards from parameters without a gradient"
        if not run.facts.has_critic:
            return Detection("critical", message, tuple(evidence), could_not_check=(unknown,))
        return Detection("critical", message, tuple(evidence), _NO_GRADIENT_OF_CRITIC)
    sure: Sure = ("high", "another figure shows the reason")
    return Detection(
        severity="critical",
        what=message,
        evidence=tuple(evidence),
        cause=why,
        fixes=tuple(fixes),
        sure=sure,
        is_first=fixes == (_REACH,),
    )


def _typical(run: RunLog, key: str, steps: NDArray[np.int64]) -> float | None:
    """The metric's median over these steps."""
    series = run.table.series(key)
    during = series.values[np.isin(series.steps, steps)]
    return float(np.median(during)) if len(during) else None


def _groups_differ(run: RunLog, equal: float | None, steps: NDArray[np.int64]) -> Evidence | None:
    """Evidence that rewards differ within groups on these steps, or that advantages are not 0."""
    shown = [(th.ZERO_SPREAD.key, equal)]
    if equal is None:
        shown = [(key, _typical(run, key, steps)) for key in (th.GROUP_STD, _ADVANTAGE_ENDS[0])]
    for key, value in shown:
        if value is not None and (value > 0.0 or key == th.ZERO_SPREAD.key):
            return evidence_over(steps, key, f"{value:.3g} on these steps")
    return None


@Rule(
    "zero-advantages",
    needs=_ADVANTAGE_ENDS,
    uses=th.REWARDS,
    thresholds=f"— / — / ≥ {th.ZERO_SHARE * 100:g} % of the steps, or all of fewer than {th.MIN_STEPS}",
    fixes=(
        fix.larger_groups,
        fix.several_responses,
    ),
)
def zero_advantages(run: RunLog) -> Detection | None:
    """Advantages are not all zero."""
    steps, (most, least) = run.table.aligned(*_ADVANTAGE_ENDS)
    is_zero = (most == 0.0) & (least == 0.0)
    if not is_frequent(is_zero):
        return None
    during = steps[is_zero]
    score, best, worst = (_typical(run, key, during) for key in th.REWARDS)
    span = run.reward_span
    top = span[1] if span else best
    if score is not None and score == top and top > 0.0:  # every response as good as the best of the run
        return None
    message = f"all advantages are exactly zero on {is_zero.mean():.0%} of the steps"
    cause = None
    if best is not None and worst is not None and best > worst:
        message += ", although rewards differ"
    elif score is not None:
        cause = f"every response has the same reward ({score:.3g}): nothing to compare"
    if run.facts.has_critic and cause is None:
        cause = "the rewards do not reach the returns, or the critic's values are the returns"
    seen = evidence_over(during, _ADVANTAGE_ENDS[0], "0, as is the smallest")
    return Detection("critical", message, (seen,), cause)


def _penalty_coefficient(run: RunLog) -> float | None:
    """Coefficient of the KL penalty to the reference: configured, inferred, or else as logged."""
    logged = run.table.series(_KL_COEF).values
    return float(logged.max()) if run.facts.kl_coef is None and len(logged) else run.facts.kl_coef


def _stronger_penalty(run: RunLog, found: Crossing) -> Fix:
    """Fix that raises the coefficient by about the factor (2, 5 or 10) by which the KL is too large."""
    coefficient = _penalty_coefficient(run)
    key = _COEF_OF[found.key]
    if not coefficient:
        return fix.larger(key, "raise the coefficient of the KL penalty")
    times = max(factor for factor in (2, 5, 10) if factor == 2 or found.worst >= factor * REF_KL_OK)
    how = run.fact_origins.get("kl_coef", "")
    why = f"{times} times the coefficient {coefficient:.2g}" + (f" ({how})" if "inferred" in how else "")
    return fix.change(f"{key}={times * coefficient:.2g}", why=why)


def _not_the_start(run: RunLog, series: Series, level: float) -> str:
    """How a KL of this level shows that the reference is not the policy's start; empty where it does not."""
    first = float(series.values[0])
    is_first = run.has_first_step and series.steps[0] <= th.FIRST_STEP
    if _is_apart_at_once(run, series) or (first > REF_KL_OK and first >= EARLY_SHARE * level and is_first):
        return f"{first:.3g} of them in step {series.steps[0]}"
    count = min(EARLY_ROWS, len(series) // 2)
    early, late = (float(np.median(end)) for end in (series.values[:count], series.values[-count:]))
    is_early = count > 1 and series.steps[0] <= th.START_STEPS and COUNTED not in run.notes
    if is_early and early > REF_KL_OK and early >= EARLY_SHARE * level and trend(series) < 0.0:
        return f"and the distance falls, from {early:.3g} to {late:.3g}"
    return ""


def _paid_for_distance(run: RunLog, found: Crossing) -> Evidence | None:
    """What shows that the penalty of a KL does not hold the policy: its sign, or what it costs.

    A policy that gains nothing does not pay more for the distance than any reward is worth, unless updates
    are so large that it is not asked.
    """
    logged = run.table.series(_KL_COEF)
    if found.key == _KL_LOSS and len(logged) and logged.values.max() < 0.0:
        return evidence_over(logged.steps, _KL_COEF, f"the coefficient is negative ({logged.values[0]:g})")
    coefficient = _penalty_coefficient(run)
    span = run.reward_span
    largest = largest_update(run, found.since)
    if not coefficient or span is None or largest is None or largest > LARGE_UPDATE[1][1]:
        return None
    cost = coefficient * found.worst
    if cost <= span[1] - span[0] or run.has_gained or run.has_learned or rises(run.table, th.SCORE):
        return None
    series = run.table.series(found.key)
    figure = f"at a cost of {cost:.2g}, where the best reward is worth {span[1] - span[0]:.2g}"
    return evidence_over(series.steps[series.steps >= found.since], found.key, figure)


def _is_apart_at_once(run: RunLog, series: Series) -> bool:
    """Whether a KL to the reference in the first step is far above what the updates on its batch explain."""
    if not len(series) or not run.has_first_step or series.steps[0] > th.FIRST_STEP:
        return False
    # The KL on the first batch is measured before the only update on it.
    moved = 0.0 if run.facts.updates_per_batch == 1 else largest_update(run, int(series.steps[0]))
    first = float(series.values[0])
    return moved is not None and first > APART_AT_ONCE and moved < first / 4.0


@Rule(
    "reference-drift",
    thresholds=th.REF_KL[0],
    one_of=tuple(levels.key for levels in th.REF_KL),
    uses=(_KL_COEF, *th.REWARDS),
    not_applicable=lambda run: (
        "the KL to the reference is not penalized" if _penalty_coefficient(run) == 0.0 else ""
    ),
)
def reference_drift(run: RunLog) -> Detection | None:
    """The policy stays near its reference."""
    crossed = crossings(run, th.REF_KL)
    if not crossed:
        return _other_reference(run)
    worst = worst_of(crossed)
    drifted = of_crossing(worst, "the policy is {worst:.3g} nats from its reference {where}")
    evidence = tuple(one.evidence for one in crossed)
    paid = _paid_for_distance(run, worst)
    if paid is not None:
        return replace(
            drifted,
            what=f"{drifted.what}, {paid.figure}",
            evidence=(*evidence, paid),
            cause=_WRONG_SIGN,
            fixes=(_CHECK_THE_SIGN,),
            since=int(run.table.series(worst.key).steps[0]),
        )
    how = _not_the_start(run, run.table.series(worst.key), worst.worst)
    if how:
        score = run.table.series(th.SCORE)
        if len(score) >= th.MOVE_STEPS and not (
            run.has_gained or run.has_learned or rises(run.table, th.SCORE)
        ):
            how += ", and the reward does not gain"
            evidence += (change_evidence(th.SCORE, *ends(score.values), score.steps),)
        return _of_another_reference(replace(drifted, what=f"{drifted.what}, {how}", evidence=evidence))
    return replace(
        drifted,
        evidence=evidence,
        fixes=(_stronger_penalty(run, worst), *fix.slower(run)),
    )


def _other_reference(run: RunLog) -> Detection | None:
    """A KL below the levels that is there before updates can have made it."""
    for levels in th.REF_KL:
        series = run.table.series(levels.key)
        if _is_apart_at_once(run, series):
            step = int(series.steps[0])
            message = (
                f"the policy is {series.values[0]:.3g} nats from its reference in step {step}, its first"
            )
            seen = evidence_over(series.steps[:1], levels.key, f"{series.values[0]:.3g}")
            return _of_another_reference(Detection("warning", message, (seen,)))
    return None


def _of_another_reference(found: Detection) -> Detection:
    sure: Sure = ("high", "updates move a policy away from its start, not towards it or before them")
    return replace(
        found, cause=_OTHER_START, sure=sure, fixes=(_SAME_START,), is_first=True, explains=("flat-reward",)
    )


@Rule(
    "strong-penalty",
    one_of=tuple(levels.key for levels in th.REF_KL),
    uses=(_KL_COEF, *th.REWARDS),
    min_steps=th.MOVE_STEPS,
    thresholds=f"— / ≥ {STRONG_PENALTY:g}, KL < {HELD_KL:g}, unless learned³ / —",
)
def strong_penalty(run: RunLog) -> Detection | Skipped | None:
    """The KL penalty lets the policy learn."""
    coefficient = _penalty_coefficient(run)
    if coefficient is None:
        return Skipped("the coefficient of the KL penalty is unknown", ("spec.yaml",))
    key = run.table.most_logged(tuple(levels.key for levels in th.REF_KL))
    series = run.table.series(key)
    is_held = float(np.abs(rolling_median(series.values)).max()) < HELD_KL
    if coefficient < STRONG_PENALTY or not is_held or run.has_learned:
        return None
    usual = fix.change(f"{_COEF_OF[key]}=0.001", why="the default")
    message = f"the KL penalty has the coefficient {coefficient:g}, and the policy stays at its reference"
    seen = evidence_over(series.steps, key, f"{np.median(series.values):.2g} (median)")
    return Detection("warning", message, (seen,), fixes=(usual,))


@Rule("healthy-loss", needs=(_LOSS, _NORM), uses=(_PPO_KL, _ADVANTAGE), only_alone=True)
def healthy_loss(run: RunLog) -> Detection | Skipped | None:
    """Explains a loss near zero."""
    spec = run.spec
    if spec is not None and spec.algorithm.rollout_correction.loss_type != "ppo_clip":
        return Skipped("only a clipped loss is near zero on-policy")
    if run.facts.has_critic or (spec is not None and spec.algorithm.adv_estimator not in {"rloo", "grpo"}):
        return Skipped("advantages are not centred within groups")
    steps, (loss, norm) = run.table.aligned(_LOSS, _NORM)
    if len(steps) == 0:
        return Skipped("loss and gradient norm are never logged together")
    typical = float(np.median(np.abs(loss)))
    is_healthy = typical < PG_LOSS_ZERO and float(np.median(norm)) > GRAD_NORM_NONZERO
    others = [run.table.series(key).values for key in (_PPO_KL, _ADVANTAGE)]
    if not is_healthy or any(len(v) and float(np.median(np.abs(v))) > PG_LOSS_ZERO for v in others):
        return None
    message = f"the policy loss is near zero ({typical:.2g}), and that is healthy"
    seen = evidence_over(steps, _LOSS, f"|loss| {typical:.2g} (median)")
    gradient = evidence_over(steps, _NORM, f"{np.median(norm):.3g} (median)")
    sure: Sure | None = ("high", "loss and advantages are of the kind that cancels") if spec else None
    return Detection("info", message, (seen, gradient), sure=sure)


def count_of_steps(count: int) -> str:
    """`1 step`, `1,000 steps`."""
    return "1 step" if count == 1 else f"{count:,} steps"
