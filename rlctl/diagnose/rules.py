"""All rules, applied to one run. No torch: they read the table of scalars only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.diagnose import (
    rules_engines,
    rules_rejection,
    rules_reward,
    rules_samples,
    rules_update,
    rules_weights,
)
from rlctl.diagnose.finding import SEVERITIES, Finding, Severity, Skipped
from rlctl.diagnose.rule import Rule
from rlctl.diagnose.table import RunLog

#: Heading → rules.
GROUPS: Mapping[str, tuple[Rule, ...]] = {
    "The gap between the two policies": rules_engines.RULES,
    "Importance weights": rules_weights.RULES,
    "Rejection, clipping, correction": rules_rejection.RULES,
    "The update": rules_update.RULES,
    "Rewards and lengths": rules_reward.RULES,
    "Samples that are late or failed": rules_samples.RULES,
}
RULES: list[Rule] = [rule for rules in GROUPS.values() for rule in rules]
#: The metrics a reader must keep; `<…>` stands for any text.
METRICS_READ = frozenset(key for rule in RULES for key in rule.metrics)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of all rules on one run; findings worst first."""

    run: RunLog
    findings: tuple[Finding, ...]
    checked: tuple[Rule, ...]
    skipped: tuple[Skipped, ...]

    def reaches(self, severity: Severity) -> bool:
        """Whether a finding is at least this severe."""
        limit = SEVERITIES.index(severity)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)


def examine(run: RunLog) -> Diagnosis:
    """Apply every rule: findings, what was checked, what was skipped and why."""
    results = [(rule, rule.apply(run)) for rule in RULES]
    found = [one for _, one in results if isinstance(one, Finding)]
    return Diagnosis(
        run,
        tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))),
        tuple(rule for rule, one in results if not isinstance(one, Skipped)),
        tuple(one for _, one in results if isinstance(one, Skipped)),
    )
