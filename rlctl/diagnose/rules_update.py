"""Rules about gradients, the drift from the reference, the critic, and the value of the loss."""

from __future__ import annotations

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Remedy, Severity, Skipped, rule
from rlctl.diagnose.rules_reward import BEST, SCORE, WORST, has_gained, has_learned
from rlctl.diagnose.signals import crossing, spikes
from rlctl.diagnose.table import RunLog, Series

_NORM, _LOSS, _DRIFT = th.GRAD_NORM.key, "actor/pg_loss", "actor/ppo_kl"
_ADVANTAGE, _KL_COEF = "critic/advantages/mean", "actor/kl_coef"


@rule("not-finite", "loss and gradient are numbers", uses=(_LOSS, _NORM))
def not_finite(run: RunLog) -> Finding | Skipped | None:
    """A loss or gradient was not a number."""
    logged = {key: run.table.nonfinite[key] for key in (_NORM, _LOSS) if key in run.table.nonfinite}
    if not logged:
        present = {_NORM, _LOSS} & run.table.columns.keys()
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
        f"{key} is not a finite number on {steps_text(len(steps))}",
        (Evidence(key, f"NaN or infinite on {share:.1%} of the steps", int(steps[0]), int(steps[-1])),),
        "overflow in low precision, too large a learning rate, or log-probs that are not finite",
        th.OWN,
        (*remedy.calmer(run), remedy.before(int(steps[0]))),
        "medium",
        "the log says that, not where in the computation",
    )


@rule("gradient-norm", "gradient norm neither jumps nor stays large", needs=(_NORM,))
def gradient_norm(run: RunLog) -> Finding | Skipped | None:
    """The gradient norm jumps, or is large throughout."""
    series = run.table.series(_NORM)
    crossed = crossing(series, th.GRAD_NORM)
    if crossed is not None and not crossed.excuse:
        return _large_norm(run, crossed.severity, f"{crossed.worst:.3g} {crossed.where}", crossed.evidence)
    jumps = spikes(series)
    if len(jumps) == 0:
        if crossed is None:
            return None
        return _large_norm(run, "info", f"{crossed.worst:.3g} {crossed.where}", crossed.evidence)
    many = len(jumps) >= max(th.SPIKE_COUNT, th.SPIKE_SHARE * len(series))
    largest = int(np.argmax(jumps.values))
    value, median = float(jumps.values[largest]), float(np.median(series.values))
    times = value / max(median, 1e-12)
    figure = f"{value:.3g} at step {jumps.steps[largest]}, median {median:.3g}"
    return Finding(
        "warning" if many else "info",
        f"the gradient norm jumps on {steps_text(len(jumps))}, to as much as {times:.0f} times its median",
        (Evidence(_NORM, figure, int(jumps.steps[0]), int(jumps.steps[-1])),),
        "single batches with extreme weights or advantages; a collapse announces itself the same way",
        th.OWN,
        remedy.calmer(run) if many else (),
        "medium",
        "the norm alone does not tell which samples caused it",
    )


def _large_norm(run: RunLog, severity: Severity, what: str, evidence: Evidence) -> Finding:
    return Finding(
        severity,
        f"the gradient norm is {what}",
        (evidence,),
        "the update is unstable, or the loss is a sum where a mean was meant",
        th.GRAD_NORM.source,
        remedy.calmer(run) if severity != "info" else (),
        "low" if severity == "info" else "medium",
        "the run began like this, so it may be usual for model and loss"
        if severity == "info"
        else "it is also far from the run's own start, where there is one to compare with",
    )


@rule("no-gradient", "there is a gradient", needs=(_NORM,), uses=(th.ZERO_SPREAD.key, th.MASKED.key))
def no_gradient(run: RunLog) -> Finding | Skipped | None:
    """The gradient is exactly zero on many steps."""
    series = run.table.series(_NORM)
    idle = series.values == 0.0
    share = float(idle.mean())
    if share < th.ZERO_GRADIENT_SHARE:
        return None
    steps = series.steps[idle]
    evidence = [Evidence(_NORM, f"0 on {steps_text(len(steps))}", int(steps[0]), int(steps[-1]))]
    for key in (th.ZERO_SPREAD.key, th.MASKED.key):
        at, (values,) = run.table.aligned(key)
        during = values[np.isin(at, steps)]
        if len(during) and np.median(during) > th.ALL_OF_THEM:
            evidence.append(Evidence(key, "1 on these steps", int(steps[0]), int(steps[-1])))
    return Finding(
        "critical",
        f"the gradient is exactly zero on {share:.0%} of the steps",
        tuple(evidence),
        "no group of responses has both better and worse ones, or everything is rejected or frozen",
        th.FIELD,
        _more_contrast(run),
        "high" if len(evidence) > 1 else "medium",
        "another figure names the reason"
        if len(evidence) > 1
        else "dead groups, rejection and a frozen adapter end alike",
    )


def _more_contrast(run: RunLog) -> tuple[Remedy, ...]:
    size = run.facts.group_size
    larger = (remedy.change(f"rollout.n={2 * size}", why="larger groups"),) if size else ()
    return (*larger, remedy.by_hand("check that the trained parameters are those that the loss reaches"))


@rule(
    "reference-drift",
    "the policy stays near its reference",
    one_of=tuple(levels.key for levels in th.REF_KL),
    uses=(_KL_COEF,),
    beside=lambda run: "the KL to the reference is not penalised" if run.facts.kl_coef == 0.0 else "",
)
def reference_drift(run: RunLog) -> Finding | Skipped | None:
    """The KL to the reference is large although it is penalised."""
    logged = run.table.series(_KL_COEF).values
    coefficient = run.facts.kl_coef or (float(logged.max()) if len(logged) else None)
    if coefficient == 0.0:
        return Skipped("the KL to the reference is not penalised")
    found = [
        crossed
        for levels in th.REF_KL
        if (crossed := crossing(run.table.series(levels.key), levels)) is not None
    ]
    if not found:
        return None
    worst = min(found, key=lambda one: SEVERITIES.index(one.severity))
    in_loss = worst.key == th.REF_KL[0].key
    key = "actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    stronger = (remedy.change(f"{key}={2 * coefficient:g}"),) if coefficient else ()
    return Finding(
        worst.severity,
        f"the policy is {worst.worst:.3g} nats from its reference {worst.where}",
        tuple(one.evidence for one in found),
        "the penalty is too weak to hold the policy, or something else drives it away",
        th.REF_KL[0].source,
        (*stronger, remedy.slower(run)),
        "medium",
        "how far a policy may go depends on the task and on the KL's estimator",
    )


@rule(
    "critic",
    "the critic explains returns",
    needs=(th.EXPLAINED.key,),
    uses=(SCORE, BEST, WORST),
    beside=lambda run: "no critic is trained" if run.facts.has_critic is False else "",
)
def critic(run: RunLog) -> Finding | Skipped | None:
    """The values explain next to nothing of the returns, after the critic had time to learn."""
    series = run.table.series(th.EXPLAINED.key)
    late = Series(series.steps[th.CRITIC_STEPS :], series.values[th.CRITIC_STEPS :])
    crossed = crossing(late, th.EXPLAINED)
    if crossed is None or not crossed.lasts or has_learned(run.table):
        return None
    learns = has_gained(run.table, since=int(run.table.steps[0]))
    epochs = 2 * (run.spec.critic_epochs if run.spec else run.facts.ppo_epochs or 1)
    return Finding(
        "info" if learns else crossed.severity,
        f"the critic explains only {crossed.worst:.2g} of the returns' variance {crossed.where}",
        (crossed.evidence,),
        "the critic learns too slowly, or from too few steps, for the policy to profit",
        th.EXPLAINED.source,
        (
            remedy.change(f"critic.ppo_epochs={epochs}", why="more steps per batch"),
            remedy.change("trainer.critic_warmup=20", why="batches for the critic alone at the start"),
            *((remedy.change(f"critic.lr={2 * run.spec.critic.lr:g}"),) if run.spec else ()),
        ),
        "low" if learns else "high",
        "the policy learns all the same" if learns else f"the first {th.CRITIC_STEPS} steps are left out",
    )


@rule(
    "healthy-loss",
    "explains a loss near zero",
    needs=(_LOSS, _NORM),
    uses=(_DRIFT, _ADVANTAGE),
)
def healthy_loss(run: RunLog) -> Finding | Skipped | None:
    """A policy loss of about zero that needs no mending: say so."""
    spec = run.spec
    if spec is not None and spec.algorithm.rollout_correction.loss_type != "ppo_clip":
        return Skipped("only a clipped loss is near zero on-policy")
    if run.facts.has_critic or (spec is not None and spec.algorithm.adv_estimator not in {"rloo", "grpo"}):
        return Skipped("advantages are not centred within groups")
    steps, (loss, norm) = run.table.aligned(_LOSS, _NORM)
    if len(steps) == 0:
        return Skipped("loss and gradient norm are never logged together")
    typical = float(np.median(np.abs(loss)))
    is_healthy = typical < th.PG_LOSS_ZERO and float(np.median(norm)) > th.GRAD_NORM_NONZERO
    others = [run.table.series(key).values for key in (_DRIFT, _ADVANTAGE)]
    if not is_healthy or any(len(v) and float(np.median(np.abs(v))) > th.PG_LOSS_ZERO for v in others):
        return None
    span = (int(steps[0]), int(steps[-1]))
    return Finding(
        "info",
        f"the policy loss is near zero ({typical:.2g}), and that is healthy",
        (
            Evidence(_LOSS, f"|loss| {typical:.2g} (median)", *span),
            Evidence(_NORM, f"{np.median(norm):.3g} (median)", *span),
        ),
        "near on-policy the ratio is 1 and advantages centred within groups add up to 0: the value cancels, "
        "the gradient does not",
        th.LOGIC,
        (),
        "high" if spec else "medium",
        "loss and advantages are of the kind that cancels"
        if spec
        else "which loss it is, the log does not say",
    )


def steps_text(count: int) -> str:
    """`1 step`, `1,000 steps`."""
    return "1 step" if count == 1 else f"{count:,} steps"


RULES = (
    not_finite,
    gradient_norm,
    no_gradient,
    reference_drift,
    critic,
    healthy_loss,
)
