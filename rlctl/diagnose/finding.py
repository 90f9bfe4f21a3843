"""What a diagnosis is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlctl.diagnose.table import RunLog

Severity = Literal["critical", "warning", "info"]
#: From the worst.
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure and where it was seen.

    Attributes:
        metric: its key, or the spec's key where the spec is the evidence.
        figure: what was seen, in words with the number.
        first_step, last_step: where; None where the spec is the evidence.
    """

    metric: str
    figure: str
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to try; several of a finding are alternatives.

    Attributes:
        spec: `key=value` arguments of `rlctl train`, which belong together; empty where no setting helps and
            `why` says what to do by hand.
        why: one clause; empty where the change speaks for itself.
        others: framework → the same change in its own keys, where it has one.
    """

    spec: tuple[str, ...] = ()
    why: str = ""
    others: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As it goes onto the command line, or what to do by hand."""
        return " ".join(self.spec) or self.why


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule has found.

    Attributes:
        severity: `critical` threatens the run, `warning` wants a look, `info` is good to know.
        what: one sentence.
        evidence: figures and step ranges.
        cause: the likely one.
        source: where the threshold comes from.
        remedies: alternatives, best first.
        confidence: how sure it is that the cause is the named one.
        why_so_sure: the reason for the confidence, one clause.
        could_not_check: what would have decided more, and is not in the log.
        rule: name of the rule; set by `examine`.
    """

    severity: Severity
    what: str
    evidence: tuple[Evidence, ...]
    cause: str
    source: str
    remedies: tuple[Remedy, ...] = ()
    confidence: Confidence = "high"
    why_so_sure: str = ""
    could_not_check: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a rule could not be applied, or does not apply.

    Attributes:
        why: one clause.
        missing: metrics (or `spec.yaml`) that would enable it; empty: it does not apply to this run.
        rule: name of the rule; set by `examine`.
    """

    why: str
    missing: tuple[str, ...] = ()
    rule: str = ""


Judge = Callable[["RunLog"], Finding | Skipped | None]
#: Facts that a rule may need.
Fact = Literal[
    "bypass_mode", "updates_per_batch", "ppo_epochs", "rollout_is", "rollout_rs", "batch_size", "lr"
]


def _applies(run: RunLog) -> str:
    """Of a rule for every run."""
    return ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to look for.

    Attributes:
        name: short, stable, for reports and scripts.
        looks_for: one line, for the list of what was checked.
        judge: None means nothing found.
        needs: metrics without which there is nothing to judge.
        one_of: metrics of which one must be logged.
        uses: further metrics it reads where they are logged.
        facts: what must be known of the run.
        beside: why the rule does not apply to a run; empty where it does.
        min_steps: values each needed metric must have.
    """

    name: str
    looks_for: str
    judge: Judge
    needs: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    beside: Callable[[RunLog], str] = _applies
    min_steps: int = 5

    @property
    def reads(self) -> tuple[str, ...]:
        """Every metric it looks at."""
        return (*self.needs, *self.one_of, *self.uses)


def rule(
    name: str,
    looks_for: str,
    *,
    needs: tuple[str, ...] = (),
    one_of: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
    facts: tuple[Fact, ...] = (),
    beside: Callable[[RunLog], str] = _applies,
    min_steps: int = 5,
) -> Callable[[Judge], Rule]:
    """Make a `Rule` of the function below."""
    return lambda judge: Rule(name, looks_for, judge, needs, one_of, uses, facts, beside, min_steps)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What all rules together say of one run; findings worst first."""

    run: RunLog
    findings: tuple[Finding, ...]
    checked: tuple[Rule, ...]
    skipped: tuple[Skipped, ...]

    def reaches(self, severity: Severity) -> bool:
        """Whether a finding is at least this severe."""
        limit = SEVERITIES.index(severity)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)
