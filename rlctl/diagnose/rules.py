"""All rules, applied to one run. No torch: the table of scalars is all they read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import (
    rules_async,
    rules_gap,
    rules_joint,
    rules_length,
    rules_rejection,
    rules_reward,
    rules_start,
    rules_update,
    rules_weights,
)
from rlctl.diagnose.finding import SEVERITIES, Diagnosis, Finding, Rule, Skipped
from rlctl.diagnose.rules_reward import VALIDATION, validation_keys
from rlctl.diagnose.table import RunLog

RULES: tuple[Rule, ...] = (
    *rules_gap.RULES,
    *rules_start.RULES,
    *rules_weights.RULES,
    *rules_rejection.RULES,
    *rules_joint.RULES,
    *rules_update.RULES,
    *rules_reward.RULES,
    *rules_length.RULES,
    *rules_async.RULES,
)


#: The metrics a reader must keep; `<…>` stands for any text.
METRICS_READ = frozenset(key for rule in RULES for key in rule.reads)


def examine(run: RunLog) -> Diagnosis:
    """Apply every rule: what was found, what was checked, what could not be and why."""
    findings: list[Finding] = []
    checked: list[Rule] = []
    skipped: list[Skipped] = []
    for rule in RULES:
        verdict = judge(rule, run)
        if isinstance(verdict, Skipped):
            skipped.append(replace(verdict, rule=rule.name))
            continue
        checked.append(rule)
        if verdict is not None:
            findings.append(replace(verdict, rule=rule.name))
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(run, tuple(findings), tuple(checked), tuple(skipped))


def judge(rule: Rule, run: RunLog) -> Finding | Skipped | None:
    """What one rule says of a run; None if it finds nothing."""
    return _beside(rule, run) or _unjudgeable(rule, run) or rule.judge(run)


def _beside(rule: Rule, run: RunLog) -> Skipped | None:
    why = rule.beside(run)
    return Skipped(why) if why else None


def _unjudgeable(rule: Rule, run: RunLog) -> Skipped | None:
    """Why there is nothing to judge, if so."""
    counts = {key: _count(run, key) for key in (*rule.needs, *rule.one_of)}
    missing = tuple(key for key in rule.needs if counts[key] is None)
    if rule.one_of and all(counts[key] is None for key in rule.one_of):
        missing += rule.one_of
    unknown = tuple(name for name in rule.facts if getattr(run.facts, name) is None)
    if missing:
        return Skipped("not logged", missing)
    if unknown:
        return Skipped(f"not told by the log: {', '.join(unknown)}", ("spec.yaml",))
    groups = [*((key,) for key in rule.needs), *((rule.one_of,) if rule.one_of else ())]
    for keys in groups:
        longest = max(keys, key=lambda key: counts[key] or 0)
        if (count := counts[longest] or 0) < rule.min_steps:
            return Skipped(f"only {count} steps logged {longest}, it takes {rule.min_steps}", (longest,))
    return None


def _count(run: RunLog, key: str) -> int | None:
    """How many steps logged a finite value; None where none ever did."""
    if key == VALIDATION:
        keys = validation_keys(run.table)
        return max((int(np.isfinite(run.table.columns[one]).sum()) for one in keys), default=None)
    return int(np.isfinite(run.table.columns[key]).sum()) if key in run.table.columns else None
