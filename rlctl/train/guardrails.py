"""Guardrails after every batch: the rules of `rlctl diagnose` on the run as far as it has come.

They warn of what diagnosis finds, tighten the correction's bounds while the raw effective sample size stays
low, and end a run that has collapsed. Everything is decided from what is logged: a resumed run reads its log
back and decides as the uninterrupted one would. The main rank decides and tells the others, so that all do
the same. What happens before a single update is `rlctl.train.update_guard`'s.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose.readers.framework_names import MetricFilter
from rlctl.diagnose.rules import METRICS_READ, examine
from rlctl.diagnose.table import RunLog, Table, facts_of
from rlctl.diagnose.thresholds import RAW_ESS, WINDOW
from rlctl.train.update_guard import DRIFT_LIMIT, UpdateDecision, UpdateGuard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlctl.diagnose.finding import Finding
    from rlctl.train.run import Run
    from rlctl.train.settings import UpdateSettings

#: Batches from one look with all rules to the next; and as a share of the run so far, since a look at a
#: longer run takes longer.
EVERY, EVERY_SHARE = 5, 1 / 500
#: Rules whose critical finding, if it lasts, means that nothing is learned any more.
FATAL = frozenset({"zero-reward", "gibberish"})

INTERVENTIONS, ALARMS = "guardrails/interventions", "guardrails/alarms"
SKIPPED, LR_SCALE = "guardrails/skipped", "guardrails/lr_scale"
UPDATES, TIGHTENED = "guardrails/updates", "guardrails/tightened"
_NOT_FINITE_OR_EMPTY = "rollout_corr/skipped_updates"
_DEEDS = {
    "scale_lr": "scaled its learning rate by ESS / floor, and halved the rate after it",
    "skip_step": "withheld the update, and halved the learning rate after it",
    "tighten": "halved the bounds in log ρ until it recovers",
    "checkpoint_and_stop": "saved and stopped",
}


class Guardrails:
    """Watches a run batch by batch; every rank builds one and calls `look`.

    Args:
        run: its history is that of the steps before, as logged (the main rank's counts); sets its
            `stopped_because` when it is to end.
        settings: as the spec has them.

    Attributes:
        updates: judges the updates.
        is_tight: the next batch is to be trained with tightened bounds.
    """

    def __init__(self, run: Run, settings: UpdateSettings) -> None:
        self._run, self._spec = run, run.spec.trainer.guardrails
        self.updates = UpdateGuard(self._spec)
        self._loose, self._tight = settings, settings.tightened()
        self._acts = self._spec.mode == "act"
        self._can_tighten = self._spec.on_heavy_tail == "tighten" and self._tight != settings
        self._stops = self._acts and self._spec.on_collapse == "checkpoint_and_stop"
        self._voice = _Voice(run.tracker.note, acts=self._acts)
        self._log = _Log()
        for metrics in run.history:
            if metrics["step"] > 0:
                self._log.add(int(metrics["step"]), metrics)
        self.is_tight = False
        self._decide("")
        self.updates.scale = run.ranks.max(self._carried_scale() if run.ranks.is_main else 0.0)

    @property
    def settings(self) -> UpdateSettings:
        """Those of the next batch's updates."""
        return self._tight if self.is_tight else self._loose

    def _carried_scale(self) -> float:
        """The last one logged, if guardrails have acted before and do so again."""
        last = self._log.last(LR_SCALE)[-1:]
        return float(last[0]) if self._acts and np.isfinite(last).any() else 1.0

    def observe(
        self, step: int, metrics: Mapping[str, float], decisions: Sequence[UpdateDecision]
    ) -> dict[str, float]:
        """Check one batch and decide about the next.

        Args:
            metrics: of the step, reduced over ranks.
            decisions: on the updates the batch was to make.

        Returns:
            the step's `guardrails/*`; nothing where they are off.
        """
        if self._spec.mode == "off":
            return {}
        own = _counted(decisions) | {TIGHTENED: float(self.is_tight), LR_SCALE: self.updates.scale}
        own[INTERVENTIONS] += self.is_tight
        self._log.add(step, {**metrics, **own})
        self._tell_updates(step, decisions)
        heavy = self._tail_is_heavy()
        if heavy:
            what = f"median raw effective sample size of {WINDOW} batches under {self.updates.floor:g}"
            self._voice.tell("tail", step, what, "tighten" if self._can_tighten else "warn")
        self._decide(self._reason_to_stop(step) if self._run.ranks.is_main else "")
        own[INTERVENTIONS] += bool(self._run.stopped_because)
        own[ALARMS] += heavy
        return own

    def _decide(self, reason: str) -> None:
        """About the next batch; the main rank's decisions become everyone's."""
        ranks = self._run.ranks
        tightens = ranks.is_main and self._acts and self._can_tighten and self._tail_is_heavy()
        code = ranks.max(tightens + 2.0 * bool(reason))
        self.is_tight = code in {1.0, 3.0}
        self._run.stopped_because = ranks.first(reason) if code >= 2.0 else ""

    def _tail_is_heavy(self) -> bool:
        """Raw ESS under the floor over the last batches, by their median."""
        recent = self._log.last(RAW_ESS.key)
        return len(recent) == WINDOW and float(np.median(recent)) < self.updates.floor

    def _reason_to_stop(self, step: int) -> str:
        """Why nothing is learned any more, if so and if that ends the run; tells what else is found."""
        reason = f"no update was made in {WINDOW} batches" if self._is_idle() else ""
        for finding in self._findings(step):
            if finding.rule in FATAL and finding.severity == "critical" and _lasts(finding, step):
                reason = finding.what
            else:
                self._voice.say(f"{finding.rule} {finding.severity}", f"{finding.what}{_advice(finding)}")
        if reason:
            self._voice.tell("collapse", step, reason, self._spec.on_collapse)
        return reason if self._stops else ""

    def _is_idle(self) -> bool:
        """No update of the last batches was made, though every batch was to make some."""
        wanted, skipped = self._log.last(UPDATES), self._log.last(SKIPPED)
        made = wanted - skipped - self._log.last(_NOT_FINITE_OR_EMPTY)
        return len(wanted) == WINDOW and bool(((wanted > 0) & (made <= 0)).all())

    def _findings(self, step: int) -> tuple[Finding, ...]:
        """What all rules find, worst first, every few batches."""
        if step % max(EVERY, int(step * EVERY_SHARE)) or len(self._log) < WINDOW:
            return ()
        try:
            run = RunLog(self._run.run_dir, self._log.table(), self._run.spec, facts=facts_of(self._run.spec))
            found = examine(run).findings
        except Exception as error:  # a fault in a rule must not end a run that is well
            self._voice.say("fault", f"a rule of diagnosis failed, all are passed over: {error!r}")
            return ()
        return tuple(finding for finding in found if finding.severity != "info")

    def _tell_updates(self, step: int, decisions: Sequence[UpdateDecision]) -> None:
        if low := [decision.ess for decision in decisions if decision.is_low]:
            what = f"raw effective sample size {min(low):.2g} of an update, under {self.updates.floor:g}"
            self._voice.tell("low ESS", step, what, self._spec.on_low_ess)
        if far := [decision.drift for decision in decisions if decision.has_drifted]:
            what = f"{max(far):.2g} nats per token between the policy and its samples', over {DRIFT_LIMIT:g}"
            self._voice.tell("drift", step, what, self._spec.on_drift)


def _counted(decisions: Sequence[UpdateDecision]) -> dict[str, float]:
    changed = [decision for decision in decisions if decision.skip or decision.lr_scale < 1.0]
    return {
        ALARMS: float(sum(decision.is_low or decision.has_drifted for decision in decisions)),
        INTERVENTIONS: float(len(changed)),
        SKIPPED: float(sum(decision.skip for decision in decisions)),
        UPDATES: float(len(decisions)),
    }


def _lasts(finding: Finding, step: int) -> bool:
    return any(evidence.last_step == step for evidence in finding.evidence)


def _advice(finding: Finding) -> str:
    tried = f"; try {finding.fixes[0]}" if finding.fixes else ""
    return f" [{finding.rule}]{tried}"


class _Voice:
    """Says each kind of thing once."""

    def __init__(self, note: Callable[[str], None], *, acts: bool) -> None:
        self._note, self._acts = note, acts
        self._said: set[str] = set()

    def say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._note(f"guardrails: {text}")

    def tell(self, kind: str, step: int, what: str, action: str) -> None:
        """What was seen, and what is done about it, or would be."""
        done = ""
        if action != "warn":
            done = f": {_DEEDS[action]}" if self._acts else f" (mode=act would have {_DEEDS[action]})"
        self.say(kind, f"step {step}: {what}{done}")


class _Log:
    """The run so far, as diagnosis reads it: what its rules look at, and what the guardrails count."""

    def __init__(self) -> None:
        own = {RAW_ESS.key, UPDATES, SKIPPED, LR_SCALE, _NOT_FINITE_OR_EMPTY}
        self._wanted = MetricFilter(METRICS_READ | own)
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._nonfinite: dict[str, list[int]] = {}
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """One more step; a figure that was not logged, or is none, is NaN."""
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
        """The metric's last `WINDOW` values, or as many as there are; NaN where it was not logged."""
        column = self._columns.get(key)
        if column is None:
            return np.full(min(len(self), WINDOW), np.nan)
        return np.array(column[-WINDOW:])

    def table(self) -> Table:
        """A copy: arrays that numpy looks into cannot grow."""
        return Table(
            np.array(self._steps, dtype=np.int64),
            {key: np.array(column) for key, column in self._columns.items()},
            {key: np.array(steps) for key, steps in self._nonfinite.items()},
        )
