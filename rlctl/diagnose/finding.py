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
    """A figure and its steps."""

    metric: str  # its key, or the spec's key where the spec is the evidence
    figure: str  # the value in words
    #: first_step, last_step: None where the spec is the evidence
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """One change to try; several of a finding are alternatives."""

    #: `key=value` arguments of `rlctl train` that belong together; empty where no setting helps and `why` is
    #: what to do by hand
    spec: tuple[str, ...] = ()
    why: str = ""  # one clause; may be empty where there is a setting
    others: Mapping[str, str] = field(default_factory=dict)  # framework → the same change in its own keys

    def __str__(self) -> str:
        return " ".join(self.spec) or self.why


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found."""

    severity: Severity  # `critical` threatens the run, `warning` needs a decision, `info` is a remark
    what: str  # one sentence
    evidence: tuple[Evidence, ...]  # figures and step ranges
    cause: str  # the likely one
    source: str  # of the threshold
    fixes: tuple[Fix, ...] = ()  # alternatives, best first
    confidence: Confidence = "high"  # that the named cause is the cause
    confidence_reason: str = ""  # one clause
    could_not_check: tuple[str, ...] = ()  # what the log lacks that would decide more
    rule: str = ""  # its name


@dataclass(frozen=True, slots=True)
class Skipped:
    """Why a rule was not applied."""

    why: str  # one clause
    #: metrics (or `spec.yaml`) that would enable it; empty: it does not apply to this run
    missing: tuple[str, ...] = ()
    rule: str = ""  # its name; set by `examine`
