"""Guardrails after every batch: the rules of `rlctl diagnose`, applied to the run so far.

They observe the log, decide (`rlctl.train.guardrail_decisions`), and act: warn, tighten the correction's
bounds while the raw effective sample size stays low, end a run that has collapsed. All decisions depend only
on logged metrics, so a resumed run reads its log and decides as the uninterrupted run would. The main rank
decides for all ranks. Single updates are checked in `rlctl.train.update`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose.facts import facts_of
from rlctl.diagnose.forecast import forecasts
from rlctl.diagnose.readers.framework_names import MetricFilter
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import RunLog, Table
from rlctl.diagnose.thresholds import RAW_ESS, WINDOW
from rlctl.train.guardrail_decisions import (
    BatchDecision,
    BatchObservation,
    UpdateDecision,
    decide_batch,
    ess_floor,
    tightens,
)
from rlctl.train.notices import Notices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlctl.diagnose.finding import Finding
    from rlctl.diagnose.forecast import Forecast
    from rlctl.train.run import Run
    from rlctl.train.settings import UpdateSettings

#: Batches between two examinations with all rules: a constant, or if larger a fraction of the steps so far,
#: because examining a longer run takes longer.
EVERY, EVERY_SHARE = 5, 1 / 500

INTERVENTIONS, ALARMS = "guardrails/interventions", "guardrails/alarms"
SKIPPED, LR_SCALE = "guardrails/skipped", "guardrails/lr_scale"
UPDATES, TIGHTENED = "guardrails/updates", "guardrails/tightened"
FORECAST_SCALE = "guardrails/forecast_scale"
_NOT_FINITE_OR_EMPTY = "rollout_corr/skipped_updates"


class Guardrails:
    """Monitors a run batch by batch; every rank creates one and calls `observe`.

    Args:
        run: its `history` holds the logged metrics of earlier steps (only the main rank's is used); its
            `stopped_because` is set when the run must end.
        settings: update settings of the spec, not tightened.

    Attributes:
        spec: the guardrails' settings.
        is_tight: whether the next batch is trained with tightened bounds.
        lr_scale: learning-rate factor with which the next update starts.
    """

    def __init__(self, run: Run, settings: UpdateSettings) -> None:
        self.spec = run.spec.trainer.guardrails
        self._run = run
        self._loose, self._tight = settings, settings.tightened()
        self._can_tighten = self._tight != settings
        self._notices = Notices(run.tracker.note, "guardrails")
        self._log = _Log()
        for metrics in run.history:
            if metrics["step"] > 0:
                self._log.add(int(metrics["step"]), metrics)
        self._forecast_scale = self._carried(FORECAST_SCALE)
        tight = tightens(
            self.spec,
            tail_is_heavy=self._tail_is_heavy(),
            is_forecast=self._forecast_scale < 1.0,
            can_tighten=self._can_tighten,
        )
        ranks = run.ranks
        self.is_tight = ranks.max(float(ranks.is_main and tight)) > 0.0
        self.lr_scale = ranks.max(self._carried(LR_SCALE) if ranks.is_main else 0.0)

    def _carried(self, key: str) -> float:
        """The factor that the last batch logged; 1 if there is none, or if the mode is not `act`."""
        last = self._log.last(key)[-1:]
        return float(last[0]) if self.spec.mode == "act" and np.isfinite(last).any() else 1.0

    @property
    def settings(self) -> UpdateSettings:
        """Settings of the next batch's updates."""
        return self._tight if self.is_tight else self._loose

    def observe(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        num_planned: int,
        decisions: Sequence[UpdateDecision],
        lr_scale: float,
    ) -> dict[str, float]:
        """Checks one batch and acts on the run.

        Args:
            step: the batch's number.
            metrics: metrics of the step, reduced over ranks.
            num_planned: planned optimizer updates of the batch, withheld ones included.
            decisions: decisions on the updates that were checked.
            lr_scale: learning-rate factor after these decisions.

        Returns:
            The step's `guardrails/*` metrics; empty if guardrails are off.
        """
        if self.spec.mode == "off":
            return {}
        own = {
            ALARMS: float(sum(decision.is_low or decision.has_drifted for decision in decisions)),
            INTERVENTIONS: float(sum(decision.changes_update for decision in decisions)) + self.is_tight,
            SKIPPED: float(sum(decision.skip for decision in decisions)),
            UPDATES: float(num_planned),
            TIGHTENED: float(self.is_tight),
            LR_SCALE: lr_scale,
            FORECAST_SCALE: self._forecast_scale,
        }
        self._log.add(step, {**metrics, **own})
        decision = BatchDecision()
        if self._run.ranks.is_main:
            findings, ahead = self._examined(step)
            observed = BatchObservation(
                step,
                tuple(decisions),
                self._tail_is_heavy(),
                self._is_idle(),
                findings,
                ahead,
                self._forecast_scale,
            )
            decision = decide_batch(observed, self.spec, can_tighten=self._can_tighten)
            own[ALARMS] += observed.tail_is_heavy
        self._act(decision, lr_scale)
        own |= {LR_SCALE: self.lr_scale, FORECAST_SCALE: self._forecast_scale}
        own[INTERVENTIONS] += bool(self._run.stopped_because)
        return own

    def _act(self, decision: BatchDecision, lr_scale: float) -> None:
        """Carries out the main rank's decision on every rank; `lr_scale` is the factor after the updates."""
        for kind, text in decision.notices:
            self._notices.once(kind, text)
        ranks = self._run.ranks
        code = ranks.max(decision.tighten + 2.0 * bool(decision.stop_reason))
        self.is_tight = code in {1.0, 3.0}
        self._run.stopped_because = ranks.first(decision.stop_reason) if code >= 2.0 else ""
        self._forecast_scale = decision.forecast_scale
        limit = decision.forecast_scale if self.spec.on_forecast == "scale_lr" else 1.0
        self.lr_scale = min(lr_scale, ranks.max(limit if ranks.is_main else 0.0))

    def _tail_is_heavy(self) -> bool:
        recent = self._log.last(RAW_ESS.key)
        return len(recent) == WINDOW and float(np.median(recent)) < ess_floor(self.spec)

    def _is_idle(self) -> bool:
        planned, skipped = self._log.last(UPDATES), self._log.last(SKIPPED)
        made = planned - skipped - self._log.last(_NOT_FINITE_OR_EMPTY)
        return len(planned) == WINDOW and bool(((planned > 0) & (made <= 0)).all())

    def _examined(self, step: int) -> tuple[tuple[Finding, ...], tuple[Forecast, ...] | None]:
        """Every few batches: findings of all rules, worst first, and forecasts before the end of the run."""
        if step % max(EVERY, int(step * EVERY_SHARE)) or len(self._log) < WINDOW:
            return (), None
        spec = self._run.spec
        try:
            run = RunLog(self._run.run_dir, self._log.table(), spec, facts=facts_of(spec))
            found, ahead = examine(run).findings, forecasts(run)
        except Exception as error:  # a fault in a rule must not end a healthy run
            self._notices.once("fault", f"a diagnosis rule failed, no rule was evaluated: {error!r}")
            return (), None
        return (
            tuple(finding for finding in found if finding.severity != "info"),
            tuple(one for one in ahead if one.step <= self._run.total_steps),
        )


class _Log:
    """The log of the run so far: the metrics that the diagnosis rules and the guardrails read."""

    def __init__(self) -> None:
        own = {RAW_ESS.key, UPDATES, SKIPPED, LR_SCALE, FORECAST_SCALE, _NOT_FINITE_OR_EMPTY}
        self._wanted = MetricFilter(metrics_read() | own)
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._nonfinite: dict[str, list[int]] = {}
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step; a value that is missing or not finite is stored as NaN."""
        new = metrics.keys() - self._names
        self._names |= new
        for key in new:
            if key in self._wanted:
                self._columns[key] = array("d", [np.nan]) * len(self._steps)
        self._steps.append(step)
        for key, column in self._columns.items():
            value = metrics.get(key, np.nan)
            column.append(value if np.isfinite(value) else np.nan)
            if key in metrics and not np.isfinite(value):
                self._nonfinite.setdefault(key, []).append(step)

    def last(self, key: str) -> NDArray[np.float64]:
        """The last `WINDOW` values of the metric, or all if there are fewer; NaN where it was not logged."""
        column = self._columns.get(key)
        if column is None:
            return np.full(min(len(self), WINDOW), np.nan)
        return np.array(column[-WINDOW:])

    def table(self) -> Table:
        """Returns a copy, because an `array` whose buffer numpy uses cannot grow."""
        return Table(
            np.array(self._steps, dtype=np.int64),
            {key: np.array(column) for key, column in self._columns.items()},
            {key: np.array(steps) for key, steps in self._nonfinite.items()},
        )
