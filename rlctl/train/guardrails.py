"""Guardrails: checks of every update, and after every batch the rules of `rlctl diagnose` on the run so far.

`decide_update` and `decide_batch` are pure functions. `rlctl.train.update` carries out the decisions on
single updates; `Guardrails` warns, tightens the correction's bounds while the raw effective sample size
stays low, and ends a run that has collapsed. All decisions depend only on logged metrics, so a resumed run
reads its log and decides as the uninterrupted run would. The main rank decides for all ranks.

An update that is scaled or withheld also halves the learning rate of the following updates, because the next
batch would otherwise start with a step of the same size. `WINDOW` updates without an alarm undo one halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlctl.algos.correction import correction_metrics
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.segments import HostSums
from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.readers.reader_files import MetricFilter
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import RunLog, Table
from rlctl.diagnose.thresholds import KL, RAW_ESS, WINDOW
from rlctl.train.step_metrics import Notices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlctl.diagnose.finding import Finding
    from rlctl.run_spec.run_spec import GuardrailsSpec
    from rlctl.train.run import Run
    from rlctl.train.settings import UpdateSettings

#: Batches between two examinations with all rules: a constant, or if larger a fraction of the steps so far,
#: because examining a longer run takes longer.
EVERY = 5
EVERY_SHARE = 1 / 500

#: |KL| in nats per token, and raw effective sample size, at which diagnosis reports its highest severity.
DRIFT_LIMIT = KL.tiers[-1][1]
ESS_FLOOR = RAW_ESS.tiers[-1][1]
#: Past alarms never scale the learning rate below this, so that a mismatch with another cause does not
#: halt training.
LEAST_SCALE = 1 / 16
#: Rules whose critical findings mean, while they persist, that the run does not learn, or from wrong numbers.
FATAL = frozenset({"zero-reward", "sampler-log-probs"})

_ACTIONS = {
    "scale_lr": "scaled its learning rate by ESS / floor, and halved the rate after it",
    "skip_step": "withheld the update, and halved the learning rate after it",
    "tighten": "halved the bounds in log ρ until it recovers",
    "checkpoint_and_stop": "saved and stopped",
}

INTERVENTIONS, ALARMS = "guardrails/interventions", "guardrails/alarms"
SKIPPED, LR_SCALE = "guardrails/skipped", "guardrails/lr_scale"
UPDATES, TIGHTENED = "guardrails/updates", "guardrails/tightened"
_NOT_FINITE_OR_EMPTY = "rollout_corr/skipped_updates"


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


def decide_update(
    correction: HostSums, rules: CorrectionRules, scale: float, spec: GuardrailsSpec
) -> UpdateDecision | None:
    """Decides whether one update is scaled or withheld; None if its mini-batch has no finite token.

    Args:
        correction: sums of the whole mini-batch over all ranks, so that every rank decides the same.
        rules: the rules that produced the sums.
        scale: `next_scale` of the previous update; 1 at the start.
    """
    if not correction["finite_tokens"]:
        return None
    measured = correction_metrics(correction, rules)
    ess = measured[RAW_ESS.key]
    drift = abs(measured[KL.key])
    floor = ess_floor(spec)
    is_low = ess < floor
    has_drifted = drift > DRIFT_LIMIT
    if spec.mode != "act":
        return UpdateDecision(ess, drift, is_low, has_drifted, next_scale=scale)
    actions = {spec.on_low_ess} if is_low else set()
    actions |= {spec.on_drift} if has_drifted else set()
    if actions - {"warn"}:
        next_scale = max(scale / 2.0, LEAST_SCALE)
    else:
        next_scale = min(scale * 2.0 ** (1.0 / WINDOW), 1.0)
    lr_scale = scale * (ess / floor if "scale_lr" in actions else 1.0)
    return UpdateDecision(
        ess=ess,
        drift=drift,
        is_low=is_low,
        has_drifted=has_drifted,
        lr_scale=lr_scale,
        skip="skip_step" in actions,
        next_scale=next_scale,
    )


def ess_floor(spec: GuardrailsSpec) -> float:
    """Raw effective sample size below which an update is far off-policy."""
    return ESS_FLOOR if spec.ess_floor is None else spec.ess_floor


@dataclass(frozen=True, slots=True)
class BatchObservation:
    """State of the run after one batch.

    Attributes:
        updates: the decisions on its updates.
        tail_is_heavy: the median raw effective sample size of `WINDOW` batches is below the floor.
        is_idle: no update was applied in `WINDOW` batches, although each batch planned updates.
        findings: of the diagnosis rules, first events first, without severity `info`; empty between
            examinations.
    """

    step: int
    updates: tuple[UpdateDecision, ...] = ()
    tail_is_heavy: bool = False
    is_idle: bool = False
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """Decision after one batch.

    Attributes:
        tighten: train the next batch with tightened bounds.
        stop_reason: why the run ends now; "" if it continues.
        notices: (kind, text) to show; each kind is shown once per run.
    """

    tighten: bool = False
    stop_reason: str = ""
    notices: tuple[tuple[str, str], ...] = ()


def decide_batch(observed: BatchObservation, spec: GuardrailsSpec, *, can_tighten: bool) -> BatchDecision:
    """Decides how the run continues after one batch.

    Args:
        can_tighten: whether the correction has bounds that can be tightened.
    """
    reason = f"no update was made in {WINDOW} batches" if observed.is_idle else ""
    for finding in observed.findings:
        reason = finding.what if _is_fatal(finding, observed.step) else reason
    notices = tuple(_notices(observed, spec, reason, can_tighten=can_tighten))
    if spec.mode != "act":
        return BatchDecision(notices=notices)
    stop_reason = reason if spec.on_collapse == "checkpoint_and_stop" else ""
    tighten = observed.tail_is_heavy and spec.on_heavy_tail == "tighten"
    return BatchDecision(tighten and can_tighten, stop_reason, notices)


def _is_fatal(finding: Finding, step: int) -> bool:
    """Whether the finding means that the run no longer learns, and still holds at this step."""
    lasts = any(evidence.last_step == step for evidence in finding.evidence)
    return lasts and finding.rule in FATAL and finding.severity == "critical"


def _notices(
    observed: BatchObservation, spec: GuardrailsSpec, reason: str, *, can_tighten: bool
) -> Iterator[tuple[str, str]]:
    def notice(kind: str, what: str, action: str) -> tuple[str, str]:
        """A notice: the observation, and the action that is taken or that mode=act would take."""
        done = ""
        if action != "warn":
            does = _ACTIONS[action]
            done = f": {does}" if spec.mode == "act" else f" (mode=act would have {does})"
        return kind, f"step {observed.step}: {what}{done}"

    floor = ess_floor(spec)
    low = [update.ess for update in observed.updates if update.is_low]
    if low:
        message = f"raw effective sample size {min(low):.2g} of an update, under {floor:g}"
        yield notice("low ESS", message, spec.on_low_ess)
    far = [update.drift for update in observed.updates if update.has_drifted]
    if far:
        message = (
            f"{max(far):.2g} nats per token between the trained and the sampling policy, over {DRIFT_LIMIT:g}"
        )
        yield notice("drift", message, spec.on_drift)
    if observed.tail_is_heavy:
        message = f"median raw effective sample size of {WINDOW} batches under {floor:g}"
        yield notice("tail", message, spec.on_heavy_tail if can_tighten else "warn")
    for finding in observed.findings:
        if not finding.because_of and not _is_fatal(finding, observed.step):
            tried = f"; try {finding.fixes[0]}" if finding.fixes else ""
            yield f"{finding.rule} {finding.severity}", f"{finding.what} [{finding.rule}]{tried}"
    if reason:
        yield notice("collapse", reason, spec.on_collapse)


class Guardrails:
    """Monitors a run batch by batch; every rank creates one and calls `observe`.

    Args:
        run: its `history` holds the logged metrics of earlier steps (only the main rank's is used); its
            `stopped_because` is set when the run must end.
        settings: update settings of the spec, not tightened.

    Attributes:
        is_tight: whether the next batch is trained with tightened bounds.
        lr_scale: learning-rate factor with which the next update starts.
    """

    def __init__(self, run: Run, settings: UpdateSettings) -> None:
        self.spec = run.spec.trainer.guardrails
        self._run = run
        self._loose = settings
        self._tight = settings.tightened()
        self._can_tighten = self._tight != settings
        self._notices = Notices(run.tracker.note, "guardrails")
        self._wanted = MetricFilter(metrics_read())
        before = self._logged()
        observed = BatchObservation(len(before), tail_is_heavy=self._tail_is_heavy(before))
        ranks = run.ranks
        tight = ranks.is_main and decide_batch(observed, self.spec, can_tighten=self._can_tighten).tighten
        self.is_tight = ranks.max(float(tight)) > 0.0
        self.lr_scale = ranks.max(self._carried(before, LR_SCALE) if ranks.is_main else 0.0)

    def _logged(self) -> list[Mapping[str, float]]:
        """The metrics of all steps so far; those of a validation before the first step are no step."""
        return [metrics for metrics in self._run.history if metrics["step"] > 0]

    def _carried(self, logged: Sequence[Mapping[str, float]], key: str) -> float:
        """The factor that the last batch logged; 1 if there is none, or if the mode is not `act`."""
        last = _last(logged, key)[-1:]
        return float(last[0]) if self.spec.mode == "act" and np.isfinite(last).any() else 1.0

    @property
    def settings(self) -> UpdateSettings:
        """Settings of the next batch's updates."""
        return self._tight if self.is_tight else self._loose

    def observe(
        self, step: int, metrics: Mapping[str, float], decisions: Sequence[UpdateDecision], num_planned: int
    ) -> dict[str, float]:
        """Checks one batch and acts on the run.

        Args:
            metrics: metrics of the step, reduced over ranks.
            decisions: decisions on the updates that were checked.
            num_planned: planned optimizer updates of the batch, withheld ones included.

        Returns:
            The step's `guardrails/*` metrics; empty if guardrails are off.
        """
        if self.spec.mode == "off":
            return {}
        self.lr_scale = decisions[-1].next_scale if decisions else self.lr_scale
        own = {
            ALARMS: float(sum(decision.is_low or decision.has_drifted for decision in decisions)),
            INTERVENTIONS: float(sum(d.skip or d.lr_scale < 1.0 for d in decisions)) + self.is_tight,
            SKIPPED: float(sum(decision.skip for decision in decisions)),
            UPDATES: float(num_planned),
            TIGHTENED: float(self.is_tight),
            LR_SCALE: self.lr_scale,
        }
        decision = BatchDecision()
        if self._run.ranks.is_main:
            logged = [*self._logged(), {**metrics, **own, "step": float(step)}]
            observed = BatchObservation(
                step=step,
                updates=tuple(decisions),
                tail_is_heavy=self._tail_is_heavy(logged),
                is_idle=_is_idle(logged),
                findings=self._examined(step, logged),
            )
            decision = decide_batch(observed, self.spec, can_tighten=self._can_tighten)
            own[ALARMS] += observed.tail_is_heavy
        self._act(decision)
        own[INTERVENTIONS] += bool(self._run.stopped_because)
        return own

    def _act(self, decision: BatchDecision) -> None:
        """Carries out the main rank's decision on every rank."""
        for kind, text in decision.notices:
            self._notices.once(kind, text)
        ranks = self._run.ranks
        code = ranks.max(decision.tighten + 2.0 * bool(decision.stop_reason))
        self.is_tight = code in {1.0, 3.0}
        self._run.stopped_because = ranks.first(decision.stop_reason) if code >= 2.0 else ""

    def _tail_is_heavy(self, logged: Sequence[Mapping[str, float]]) -> bool:
        recent = _last(logged, RAW_ESS.key)
        is_measured = len(recent) == WINDOW and bool((recent > 0).all())  # 0: no finite token in the batch
        return is_measured and float(np.median(recent)) < ess_floor(self.spec)

    def _examined(self, step: int, logged: Sequence[Mapping[str, float]]) -> tuple[Finding, ...]:
        """Every few batches: findings of all rules, worst first."""
        if step % max(EVERY, int(step * EVERY_SHARE)) or len(logged) < WINDOW:
            return ()
        spec = self._run.spec
        try:
            table = Table.of_rows(logged, self._wanted.__contains__)
            found = examine(RunLog(self._run.run_dir, table, spec, facts=facts_of(spec))).findings
        except Exception as error:  # a fault in a rule must not end a healthy run
            self._notices.once("fault", f"a diagnosis rule failed, no rule was evaluated: {error!r}")
            return ()
        return tuple(finding for finding in found if finding.severity != "info")


def _is_idle(logged: Sequence[Mapping[str, float]]) -> bool:
    planned = _last(logged, UPDATES)
    skipped = _last(logged, SKIPPED)
    made = planned - skipped - _last(logged, _NOT_FINITE_OR_EMPTY)
    return len(planned) == WINDOW and bool(((planned > 0) & (made <= 0)).all())


def _last(logged: Sequence[Mapping[str, float]], key: str) -> NDArray[np.float64]:
    """The last `WINDOW` values, or all if there are fewer; NaN where none or no finite one was logged."""
    values = np.array([metrics.get(key, np.nan) for metrics in logged[-WINDOW:]])
    return np.where(np.isfinite(values), values, np.nan)
