"""Records of a diagnosis: findings with their evidence, fixes, and skipped rules."""

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
    """A figure that supports a finding, and its steps."""

    metric: str  # key of the metric; of a setting where the spec is the evidence; or `line of the log`
    figure: str  # the value as text
    #: first_step, last_step: None where the evidence is not a metric
    first_step: int | None = None
    last_step: int | None = None
    lasts: bool = True  # False: the newest values no longer show the fault


@dataclass(frozen=True, slots=True)
class Fix:
    """One change to try; the fixes of a finding are alternatives."""

    #: `key=value` arguments of `rlctl train`, to be applied together; empty where no setting helps and `why`
    #: describes a manual action
    spec: tuple[str, ...] = ()
    why: str = ""  # one clause; may be empty where `spec` is not
    others: Mapping[str, str] = field(default_factory=dict)  # framework → the same change in its own keys
    #: changes what updates do to the policy: it helps only if the fault began after the first update
    of_updates: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """Dotted key → value as text."""
        return {key: value for key, _, value in (setting.partition("=") for setting in self.spec)}

    def __str__(self) -> str:
        return " ".join(self.spec) or self.why


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault or a remark that a rule reports."""

    severity: Severity  # `critical` threatens the run, `warning` needs a decision, `info` is a remark
    what: str  # one sentence
    evidence: tuple[Evidence, ...]  # figures and step ranges
    cause: str  # the likely cause
    source: str  # where the threshold comes from
    fixes: tuple[Fix, ...] = ()  # alternatives, best first
    confidence: Confidence = "high"  # in the cause
    confidence_reason: str = ""  # one clause
    could_not_check: tuple[str, ...] = ()  # missing data that would make the finding more certain
    rule: str = ""  # name of the rule
    since: int | None = None  # the first step of the fault; None where settings are the fault
    explains: tuple[str, ...] = ()  # rules whose later findings this one causes
    is_first: bool = False  # the figures exclude that another finding explains this one
    because_of: str = ""  # rule of the first event that explains this finding; empty for a first event

    @property
    def is_resolved(self) -> bool:
        """Whether the log shows the fault no longer, in any of its figures."""
        return bool(self.evidence) and not any(one.lasts for one in self.evidence)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A rule that was not applied, and the reason."""

    why: str  # one clause
    #: metrics (or `spec.yaml`) that would enable the rule; empty: it does not apply to this run
    missing: tuple[str, ...] = ()
    needs_steps: int = 0  # number of steps that would enable the rule, where the log has fewer
    rule: str = ""  # name of the rule; set by `Rule.apply`
