"""Applies all rules to one run. No torch: the rules read only the table of scalars."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlctl.diagnose import (  # noqa: F401  each registers its rules
    rules_engines,
    rules_rejection,
    rules_reward,
    rules_samples,
    rules_update,
    rules_weights,
)
from rlctl.diagnose.finding import SEVERITIES, Finding, Severity, Skipped
from rlctl.diagnose.inferred import with_inferred
from rlctl.diagnose.rule import Rule
from rlctl.diagnose.table import RunLog
from rlctl.diagnose.thresholds import MIN_STEPS
from rlctl.errors import UsageError
from rlctl.registry import DIAGNOSIS_RULES, is_builtin

#: Minimum number of checked rules for the status `no warnings`.
MIN_RULES = 5


def all_rules(names: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The built-in rules, those of installed packages, and the user's (`path/to/file.py:function`).

    A function without the `Rule` decorator becomes a rule with the function's name.

    Raises:
        UsageError: a file or function cannot be imported, or two rules have the same name.
    """
    found: dict[str, Rule] = {}
    parts = {part.name: part.function for part in DIAGNOSIS_RULES.parts()}
    for name, part in (parts | {name: DIAGNOSIS_RULES[name] for name in names}).items():
        rule = part if isinstance(part, Rule) else Rule(part.__name__, detect=part)
        if found.setdefault(rule.name, rule) is not rule:
            raise UsageError(f"there is a rule `{rule.name}` already", where=name, fix="give it another name")
    return tuple(found.values())


def metrics_read(names: tuple[str, ...] = ()) -> frozenset[str]:
    """The metrics a reader must keep for `all_rules`; `<…>` stands for any text."""
    return frozenset(key for rule in all_rules(names) for key in rule.metrics)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of all rules on one run; findings worst first."""

    run: RunLog
    findings: tuple[Finding, ...]
    checked: tuple[Rule, ...]
    skipped: tuple[Skipped, ...]

    @property
    def status(self) -> Literal["critical", "warning", "no warnings", "insufficient data"]:
        """The worst severity if it is at least a warning; otherwise whether enough data was checked."""
        if self.findings and (worst := self.findings[0].severity) != "info":
            return worst
        is_enough = len(self.checked) >= MIN_RULES and len(self.run.table.steps) >= MIN_STEPS
        return "no warnings" if is_enough else "insufficient data"

    def reaches(self, severity: Severity) -> bool:
        """Whether a finding is at least this severe."""
        limit = SEVERITIES.index(severity)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)


def examine(run: RunLog, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Applies rules to a run; None: the built-in ones and those of installed packages."""
    run = with_inferred(run)
    results = [(rule, _applied(rule, run)) for rule in (all_rules() if rules is None else rules)]
    found = [one for _, one in results if isinstance(one, Finding)]
    return Diagnosis(
        run,
        tuple(sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.rule != "exception"))),
        tuple(rule for rule, one in results if not isinstance(one, Skipped)),
        tuple(one for _, one in results if isinstance(one, Skipped)),
    )


def _applied(rule: Rule, run: RunLog) -> Finding | Skipped | None:
    """The result of applying one rule.

    Raises:
        UsageError: a rule from outside rlctl failed.
    """
    try:
        return rule.apply(run)
    except Exception as error:
        if is_builtin(rule.detect):
            raise
        file = inspect.getsourcefile(rule.detect) or ""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f"{file}:{lines[-1]}" if lines else file
        what = f"the rule `{rule.name}` failed: {type(error).__name__}: {error}"
        raise UsageError(what, where=where, fix="correct the rule, or leave it out") from error
