"""Decisions of the guardrails: pure functions of the sums of an update and of the state of the run.

`rlctl.train.guardrails` (per batch) and `rlctl.train.update` (per update) call them and carry out the
decisions. This module reads no log, does not communicate with other ranks and changes no state.

An update that is scaled or withheld also halves the learning rate of the following updates, because the next
batch would otherwise start with a step of the same size. `WINDOW` updates without an alarm undo one halving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.statistics import correction_metrics
from rlctl.diagnose.thresholds import KL, RAW_ESS, WINDOW

if TYPE_CHECKING:
    from rlctl.diagnose.finding import Finding
    from rlctl.diagnose.forecast import Forecast
    from rlctl.spec.run_spec import GuardrailsSpec

#: |KL| in nats per token, and raw effective sample size, at which diagnosis reports its highest severity.
DRIFT_LIMIT = KL.tiers[-1][1]
ESS_FLOOR = RAW_ESS.tiers[-1][1]
#: Past alarms never scale the learning rate below this, so that a mismatch with another cause does not
#: halt training.
LEAST_SCALE = 1 / 16
#: Rules whose critical findings mean, while they persist, that the run no longer learns.
FATAL = frozenset({"zero-reward", "gibberish"})

_ACTIONS = {
    "scale_lr": "scaled its learning rate by ESS / floor, and halved the rate after it",
    "skip_step": "withheld the update, and halved the learning rate after it",
    "tighten": "halved the bounds in log ρ until it recovers",
    "checkpoint_and_stop": "saved and stopped",
}
_SLOWED = "halved the learning rate, again at every examination with a forecast"


@dataclass(frozen=True, slots=True)
class UpdateDecision:
    """Decision on one update, from its mini-batch before the optimizer step.

    Attributes:
        ess: raw effective sample size, in [0, 1].
        drift: |KL| between trained and sampling policy, nats per token. In decoupled mode π_old counts as the
            trained policy: the change from π_old to π_θ is intended, and PPO's clip bounds it.
        is_low: `ess` is below its floor.
        has_drifted: `drift` is above its limit.
        lr_scale: learning-rate factor of this update.
        skip: withhold the update (no optimizer step).
        next_scale: learning-rate factor with which the next update starts.
    """

    ess: float = 1.0
    drift: float = 0.0
    is_low: bool = False
    has_drifted: bool = False
    lr_scale: float = 1.0
    skip: bool = False
    next_scale: float = 1.0

    @property
    def changes_update(self) -> bool:
        """Whether the guardrails scale or withhold the update."""
        return self.skip or self.lr_scale < 1.0


def decide_update(
    correction: CorrectionSums[float], rules: CorrectionRules, scale: float, spec: GuardrailsSpec
) -> UpdateDecision | None:
    """Decides whether one update is scaled or withheld; None if its mini-batch has no finite token.

    Args:
        correction: sums of the whole mini-batch over all ranks, so that every rank decides the same.
        rules: the rules that produced the sums.
        scale: `next_scale` of the previous update; 1 at the start.
        spec: the guardrails' settings.
    """
    if not correction.finite_tokens:
        return None
    measured = correction_metrics(correction, rules)
    ess, drift = measured[RAW_ESS.key], abs(measured[KL.key])
    floor = ess_floor(spec)
    is_low, has_drifted = ess < floor, drift > DRIFT_LIMIT
    if spec.mode != "act":
        return UpdateDecision(ess, drift, is_low, has_drifted, next_scale=scale)
    actions = {spec.on_low_ess} if is_low else set()
    actions |= {spec.on_drift} if has_drifted else set()
    if actions - {"warn"}:
        next_scale = max(scale / 2.0, LEAST_SCALE)
    else:
        next_scale = min(scale * 2.0 ** (1.0 / WINDOW), 1.0)
    lr_scale = scale * (ess / floor if "scale_lr" in actions else 1.0)
    return UpdateDecision(ess, drift, is_low, has_drifted, lr_scale, "skip_step" in actions, next_scale)


def ess_floor(spec: GuardrailsSpec) -> float:
    """Raw effective sample size below which an update is far off-policy."""
    return ESS_FLOOR if spec.ess_floor is None else spec.ess_floor


@dataclass(frozen=True, slots=True)
class BatchObservation:
    """State of the run after one batch.

    Attributes:
        step: the batch's number.
        updates: the decisions on its updates.
        tail_is_heavy: the median raw effective sample size of `WINDOW` batches is below the floor.
        is_idle: no update was applied in `WINDOW` batches, although each batch planned updates.
        findings: of the diagnosis rules, worst first, without severity `info`; empty between examinations.
        ahead: critical levels that are forecast before the end of the run; None between examinations.
        forecast_scale: the value from the last decision.
    """

    step: int
    updates: tuple[UpdateDecision, ...] = ()
    tail_is_heavy: bool = False
    is_idle: bool = False
    findings: tuple[Finding, ...] = ()
    ahead: tuple[Forecast, ...] | None = None
    forecast_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """Decision after one batch.

    Attributes:
        tighten: train the next batch with tightened bounds.
        stop_reason: why the run ends now; "" if it continues.
        forecast_scale: 1, or less while a critical level is forecast; with `on_forecast: scale_lr` the upper
            limit of the learning-rate factor.
        notices: (kind, text) to show; each kind is shown once per run.
    """

    tighten: bool = False
    stop_reason: str = ""
    forecast_scale: float = 1.0
    notices: tuple[tuple[str, str], ...] = ()


def decide_batch(observed: BatchObservation, spec: GuardrailsSpec, *, can_tighten: bool) -> BatchDecision:
    """Decides how the run continues after one batch.

    Args:
        observed: the state of the run.
        spec: the guardrails' settings.
        can_tighten: whether the correction has bounds that can be tightened.
    """
    reason = f"no update was made in {WINDOW} batches" if observed.is_idle else ""
    for finding in filter(lambda finding: _is_fatal(finding, observed.step), observed.findings):
        reason = finding.what
    acts = spec.mode == "act"
    stop_reason = reason if acts and spec.on_collapse == "checkpoint_and_stop" else ""
    if acts and spec.on_forecast == "checkpoint_and_stop" and observed.ahead:
        stop_reason = stop_reason or str(observed.ahead[0])
    scale = next_forecast_scale(observed, spec)
    return BatchDecision(
        tighten=tightens(
            spec,
            tail_is_heavy=observed.tail_is_heavy,
            is_forecast=scale < 1.0,
            can_tighten=can_tighten,
        ),
        stop_reason=stop_reason,
        forecast_scale=scale,
        notices=tuple(_notices(observed, spec, reason, can_tighten=can_tighten)),
    )


def next_forecast_scale(observed: BatchObservation, spec: GuardrailsSpec) -> float:
    """The forecast scale, halved by an examination that forecasts a critical level, else doubled."""
    if spec.mode != "act" or spec.on_forecast == "warn":
        return 1.0
    if observed.ahead is None:
        return observed.forecast_scale
    scale = observed.forecast_scale * (0.5 if observed.ahead else 2.0)
    return min(max(scale, LEAST_SCALE), 1.0)


def tightens(spec: GuardrailsSpec, *, tail_is_heavy: bool, is_forecast: bool, can_tighten: bool) -> bool:
    """Whether the next batch is trained with tightened bounds."""
    wanted = tail_is_heavy and spec.on_heavy_tail == "tighten"
    wanted = wanted or (is_forecast and spec.on_forecast == "tighten")
    return wanted and can_tighten and spec.mode == "act"


def _is_fatal(finding: Finding, step: int) -> bool:
    """Whether the finding means that the run no longer learns, and still holds at this step."""
    lasts = any(evidence.last_step == step for evidence in finding.evidence)
    return lasts and finding.rule in FATAL and finding.severity == "critical"


def _notices(
    observed: BatchObservation, spec: GuardrailsSpec, reason: str, *, can_tighten: bool
) -> Iterator[tuple[str, str]]:
    def notice(kind: str, what: str, action: str, does: str = "") -> tuple[str, str]:
        """A notice: the observation, and the action that is taken or that mode=act would take."""
        done = ""
        if action != "warn":
            does = does or _ACTIONS[action]
            done = f": {does}" if spec.mode == "act" else f" (mode=act would have {does})"
        return kind, f"step {observed.step}: {what}{done}"

    floor = ess_floor(spec)
    if low := [update.ess for update in observed.updates if update.is_low]:
        what = f"raw effective sample size {min(low):.2g} of an update, under {floor:g}"
        yield notice("low ESS", what, spec.on_low_ess)
    if far := [update.drift for update in observed.updates if update.has_drifted]:
        what = (
            f"{max(far):.2g} nats per token between the trained and the sampling policy, over {DRIFT_LIMIT:g}"
        )
        yield notice("drift", what, spec.on_drift)
    if observed.tail_is_heavy:
        what = f"median raw effective sample size of {WINDOW} batches under {floor:g}"
        yield notice("tail", what, spec.on_heavy_tail if can_tighten else "warn")
    for one in observed.ahead or ():
        does = _SLOWED if spec.on_forecast == "scale_lr" else ""
        yield notice(f"forecast {one.level.key}", str(one), spec.on_forecast, does)
    for finding in observed.findings:
        if not _is_fatal(finding, observed.step):
            tried = f"; try {finding.fixes[0]}" if finding.fixes else ""
            yield f"{finding.rule} {finding.severity}", f"{finding.what} [{finding.rule}]{tried}"
    if reason:
        yield notice("collapse", reason, spec.on_collapse)
