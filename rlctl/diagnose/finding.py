"""The records of a diagnosis: what was found, in which figures, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["critical", "warning", "info"]
#: Worst first.
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Confidence = Literal["high", "medium", "low"]
#: Confidence in a cause, and the reason.
Sure = tuple[Confidence, str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A figure and its steps.

    Attributes:
        metric: its key, or the spec's key where the spec is the evidence.
        figure: the value in words.
        first_step, last_step: None where the spec is the evidence.
    """

    metric: str
    figure: str
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """One change to try; several of a finding are alternatives.

    Attributes:
        spec: `key=value` arguments of `rlctl train` that belong together; empty where no setting helps and
            `why` is what to do by hand.
        why: one clause; may be empty where there is a setting.
        others: framework → the same change in its own keys.
    """

    spec: tuple[str, ...] = ()
    why: str = ""
    others: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(self.spec) or self.why


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found.

    Attributes:
        severity: `critical` threatens the run, `warning` needs a decision, `info` is a remark.
        what: one sentence.
        evidence: figures and step ranges.
        cause: the likely one.
        source: of the threshold.
        fixes: alternatives, best first.
        confidence: that the named cause is the cause.
        confidence_reason: one clause.
        could_not_check: what the log lacks that would decide more.
        rule: its name.
    """

    severity: Severity
    what: str
    evidence: tuple[Evidence, ...]
    cause: str
    source: str
    fixes: tuple[Fix, ...] = ()
    confidence: Confidence = "high"
    confidence_reason: str = ""
    could_not_check: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a rule was not applied.

    Attributes:
        why: one clause.
        missing: metrics (or `spec.yaml`) that would enable it; empty: it does not apply to this run.
        rule: its name; set by `examine`.
    """

    why: str
    missing: tuple[str, ...] = ()
    rule: str = ""
