"""The form of a rule: what it reads, what it detects, and the texts that all its findings share.

`@Rule(...)` above a function registers the rule. The function's docstring begins with the healthy state. A
user's rule has the same form, in a file (`--rules file.py:function`) or an installed package (entry point
group `rlctl.diagnosis_rules`). The tables of docs/reference/diagnose-rules.md are made from the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Fix, Severity, Skipped, Sure
from rlctl.diagnose.signals import Crossing, crossing
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import MIN_STEPS, Levels
from rlctl.registry import DIAGNOSIS_RULES

#: Facts of a run that a rule may need.
Fact = Literal[
    "bypass_mode", "updates_per_batch", "ppo_epochs", "rollout_is", "rollout_rs", "batch_size", "lr"
]


@dataclass(frozen=True, slots=True)
class Detection:
    """What a rule's function returns; the rest of the finding is the rule's."""

    #: severity, what, evidence, could_not_check: as in `Finding`
    severity: Severity
    what: str
    evidence: tuple[Evidence, ...]
    #: cause, fixes, sure: in place of the rule's where they depend on what was detected
    cause: str | None = None
    fixes: tuple[Fix, ...] | None = None
    sure: Sure | None = None
    could_not_check: tuple[str, ...] = ()


Detect = Callable[[RunLog], Detection | Skipped | None]
#: Changes to try: all of them from one function of the run, or each by itself, fixed or from a function.
FixesOf = Callable[[RunLog], tuple[Fix, ...]]
Fixes = FixesOf | tuple[Fix | FixesOf, ...]


def _detects_nothing(run: RunLog) -> None:
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of fault; as a decorator it takes the function below for `detect`."""

    name: str  # short and stable, for reports and scripts
    signal: str = ""  # what it reads, in Markdown
    thresholds: str | Levels = "—"  # the levels, or a text `info / warning / critical` in Markdown
    source: str = "its author"  # of the thresholds
    cause: str = "unknown"  # the likely one
    #: confidence in the cause, and the reason
    sure: Sure = ("medium", "the rule's author states no confidence")
    fixes: Fixes = ()  # what to try, best first
    needs: tuple[str, ...] = ()  # metrics without which it is skipped
    one_of: tuple[str, ...] = ()  # metrics of which one must be logged
    uses: tuple[str, ...] = ()  # further metrics it reads where they are logged
    facts: tuple[Fact, ...] = ()  # what must be known of the run
    #: why it does not apply to a run; empty where it does
    not_applicable: Callable[[RunLog], str] = lambda run: ""
    #: values that each needed metric must have. With fewer than `MIN_STEPS` a rule may find something
    #: (critical levels, exact values), but not conclude that nothing is wrong
    min_steps: int = 1
    detect: Detect = _detects_nothing  # returns None if nothing is found

    def __call__(self, detect: Detect) -> Rule:
        """The rule that detects by this function; it is registered."""
        rule = replace(self, detect=detect)
        register = DIAGNOSIS_RULES.register(
            rule.name, label=rule.label, source=rule.source, needs=rule.metrics
        )
        return register(rule)

    @property
    def label(self) -> str:
        """The healthy state, one line."""
        return (self.detect.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric it reads."""
        return (*self.needs, *self.one_of, *self.uses)

    def apply(self, run: RunLog) -> Finding | Skipped | None:
        """The rule's finding; why it was skipped; or None."""
        why = self.not_applicable(run)
        found = Skipped(why) if why else self._skipped(run, self.min_steps) or self.detect(run)
        if found is None:
            found = self._skipped(run, MIN_STEPS)
        if found is None or isinstance(found, Skipped):
            return found and Skipped(found.why, found.missing, self.name)
        confidence, reason = found.sure or self.sure
        count = max((_count(run, one.metric) or 0 for one in found.evidence), default=0)
        if 0 < count < MIN_STEPS:
            confidence = "medium" if confidence == "high" else confidence
            reason += f"; {'one step' if count == 1 else f'{count} steps'} only"
        cause, fixes = found.cause or self.cause, self._fixes(run) if found.fixes is None else found.fixes
        parts = found.severity, found.what, found.evidence, cause, self.source, fixes, confidence, reason
        return Finding(*parts, found.could_not_check, self.name)

    def _fixes(self, run: RunLog) -> tuple[Fix, ...]:
        if callable(self.fixes):
            return self.fixes(run)
        return tuple(fix for one in self.fixes for fix in ((one,) if isinstance(one, Fix) else one(run)))

    def _skipped(self, run: RunLog, min_steps: int) -> Skipped | None:
        """Why the log does not suffice, if so."""
        counts = {key: _count(run, key) for key in (*self.needs, *self.one_of)}
        missing = tuple(key for key in self.needs if counts[key] is None)
        if self.one_of and all(counts[key] is None for key in self.one_of):
            missing += self.one_of
        if missing:
            return Skipped("not logged", missing)
        unknown = [fact for fact in self.facts if getattr(run.facts, fact) is None]
        if unknown:
            return Skipped(f"unknown from the log: {', '.join(unknown)}", ("spec.yaml",))
        for keys in (*((key,) for key in self.needs), self.one_of):
            key = max(keys, key=lambda one: counts[one] or 0, default=None)
            if key is not None and (count := counts[key] or 0) < min_steps:
                why = f"{key} was logged at {count} of the {min_steps} steps that the rule needs"
                return Skipped(why, (key,))
        return None


def detect_crossing(run: RunLog, levels: Levels, what: str, series: Series | None = None) -> Detection | None:
    """A level crossed by its metric, or by a `series` computed from it; for `what` see `of_crossing`."""
    crossed = crossing(run.table.series(levels.key) if series is None else series, levels)
    return of_crossing(crossed, what) if crossed else None


def of_crossing(crossed: Crossing, what: str) -> Detection:
    """A crossing as a detection; `what` may contain `{worst}` and `{where}`."""
    text = what.format(worst=crossed.worst, where=crossed.where)
    return Detection(crossed.severity, text, (crossed.evidence,))


def worst_of(found: list[Crossing]) -> Crossing:
    """The most severe; of equals the first."""
    return min(found, key=lambda one: SEVERITIES.index(one.severity))


def crossings(run: RunLog, levels: tuple[Levels, ...]) -> list[Crossing]:
    """Every level that was crossed."""
    each = (crossing(run.table.series(one.key), one) for one in levels)
    return [crossed for crossed in each if crossed is not None]


def _count(run: RunLog, key: str) -> int | None:
    """At how many steps a finite value was logged; None where there is no such column.

    Of a key with a variable part (`val/<data_source>/reward_mean`) the most of all that match.
    """
    counts = (int(np.isfinite(run.table.columns[one]).sum()) for one in run.table.matching(key))
    return max(counts, default=None)
