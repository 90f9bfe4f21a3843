"""All rules, applied to one run. No torch: the table of scalars is all they read."""

from __future__ import annotations

from dataclasses import replace

from rlctl.diagnose import rules_correction, rules_training
from rlctl.diagnose.finding import SEVERITIES, Diagnosis, Finding, Rule, Skipped
from rlctl.diagnose.table import RunLog
from rlctl.diagnose.thresholds import MIN_STEPS

RULES: tuple[Rule, ...] = (*rules_correction.RULES, *rules_training.RULES)

#: The metrics a reader must keep.
METRICS_READ = frozenset(key for rule in RULES for key in (*rule.needs, *rule.uses))


def examine(run: RunLog) -> Diagnosis:
    """Apply every rule: what was found, what was checked, what could not be and why."""
    findings: list[Finding] = []
    checked: list[Rule] = []
    skipped: list[Skipped] = []
    for rule in RULES:
        verdict = _unjudgeable(rule, run) or rule.judge(run)
        if isinstance(verdict, Skipped):
            skipped.append(replace(verdict, rule=rule.name))
            continue
        checked.append(rule)
        if verdict is not None:
            findings.append(replace(verdict, rule=rule.name))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(run, tuple(findings), tuple(checked), tuple(skipped))


def _unjudgeable(rule: Rule, run: RunLog) -> Skipped | None:
    """Why there is nothing to judge, if so."""
    missing = tuple(key for key in rule.needs if key not in run.table.names)
    if rule.needs_spec and run.spec is None:
        missing += ("spec.yaml",)
    if missing:
        return Skipped("not logged" if missing != ("spec.yaml",) else "not beside the log", missing)
    for key in rule.needs:
        count = len(run.table.series(key))
        if count < MIN_STEPS:
            return Skipped(f"only {count} steps logged {key}, it takes {MIN_STEPS}", (key,))
    return None
