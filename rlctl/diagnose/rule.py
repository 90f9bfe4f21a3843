"""Diagnosis rules, and their application to a run.

A rule names the metrics it reads, its detection function, and the texts that all its findings share.

`@Rule(...)` above a function registers the rule. The first line of the function's docstring describes the
healthy state. The texts of built-in rules are in `rules.toml`. User-defined rules have the same form, in a
file (`--rules file.py:function`) or an installed package (entry point group `rlctl.diagnosis_rules`). The
tables of docs/reference/diagnose-rules.md are generated from the rules.
"""

from __future__ import annotations

import inspect
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.facts import with_inferred
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Fix, Severity, Skipped, Sure
from rlctl.diagnose.fixes import read_step
from rlctl.diagnose.signals import Crossing, crossing
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import MIN_STEPS, Levels
from rlctl.errors import UsageError
from rlctl.metric_names import ELSEWHERE, METRICS
from rlctl.registry import DIAGNOSIS_RULES, is_builtin
from rlctl.user_code import call_problem


@dataclass(frozen=True, slots=True)
class Detection:
    """Result of a rule's function; the rest of the finding is taken from the rule."""

    #: severity, what, evidence, could_not_check: as in `Finding`
    severity: Severity
    what: str
    evidence: tuple[Evidence, ...]
    #: cause, fixes, sure: override the rule's where they depend on what was detected
    cause: str | None = None
    fixes: Iterable[Fix] | None = None
    sure: Sure | None = None
    could_not_check: tuple[str, ...] = ()
    since: int | None = None  # the first step of the fault, where it is not that of the evidence
    explains: tuple[str, ...] | None = None  # overrides the rule's
    is_first: bool = False  # the figures exclude that another finding explains this one

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES or not isinstance(self.what, str):
            message = f"Detection({self.severity!r}, {self.what!r}, …) has no such severity, or no text"
            raise UsageError(
                message, where="--rules", fix=f"give one of {', '.join(SEVERITIES)}, and a sentence"
            )

    def with_doubt(self, sure: Sure, *could_not_check: str) -> Detection:
        """A copy for a log that lacks data: another confidence, and what was not checked."""
        return replace(self, sure=sure, could_not_check=could_not_check)


Detect = Callable[[RunLog], Detection | Skipped | None]
#: Changes to try: a function of the run that returns all of them, or a tuple of constant fixes and functions.
FixesOf = Callable[[RunLog], Iterable[Fix]]
Fixes = FixesOf | tuple[Fix | FixesOf, ...]


def _texts() -> dict[str, dict[str, Any]]:
    """Built-in rule → fields of `Rule`, from the file, which explains them."""
    found = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    for fields in found.values():
        each = (getattr(th, name, (name,)) for name in fields.get("explains", ()))
        fields["explains"] = tuple(rule for rules in each for rule in rules)
        fields["source"] = getattr(th, fields["source"], fields["source"])
        fields["sure"] = tuple(fields["sure"])
    return found


_TEXTS = _texts()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one kind of fault; as a decorator, it uses the decorated function as `detect`."""

    name: str  # short and stable, for reports and scripts
    signal: str = ""  # the metrics it reads, in Markdown
    thresholds: str | Levels = "—"  # the levels, or a text `info / warning / critical` in Markdown
    source: str = "its author"  # where the thresholds come from
    cause: str = "unknown"  # the likely cause
    #: confidence in the cause, and the reason
    sure: Sure = ("medium", "the rule's author states no confidence")
    fixes: Fixes = ()  # changes to try, best first
    explains: tuple[str, ...] = ()  # rules whose later findings this fault causes
    only_alone: bool = False  # the finding is a remark that is withheld if another is at least a warning
    needs: tuple[str, ...] = ()  # metrics without which the rule is skipped
    one_of: tuple[str, ...] = ()  # metrics of which at least one must be logged
    uses: tuple[str, ...] = ()  # further metrics that it reads where they are logged
    facts: tuple[str, ...] = ()  # fields of `Facts` that must be known
    #: returns why the rule does not apply to a run; an empty text where it applies
    not_applicable: Callable[[RunLog], str] = lambda run: ""
    #: number of values that each needed metric must have. With fewer than `MIN_STEPS` a rule can detect
    #: faults (critical levels, exact values), but not conclude that nothing is wrong
    min_steps: int = 1
    detect: Detect = lambda run: None  # returns None if nothing is found

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError('write the decorator with a name: @Rule("name", …)')
        for field in ("needs", "one_of", "uses", "facts"):
            if isinstance(getattr(self, field), str):
                raise ValueError(f"{field}={getattr(self, field)!r}: give a tuple of texts")
        problem = call_problem(self.detect, "run")
        if problem:
            raise ValueError(f"the rule {self.name} is called with the run: {problem}")

    def __call__(self, detect: Detect) -> Rule:
        """Registers and returns a copy of the rule that detects with this function.

        Raises:
            ValueError: the function does not take one argument, or the name is taken.
        """
        texts = _TEXTS.get(self.name, {}) if is_builtin(detect) else {}
        rule = replace(self, detect=detect, **texts)
        label = rule.label
        source = rule.source
        return DIAGNOSIS_RULES.register(rule.name, label=label, source=source, needs=rule.metrics)(rule)

    @property
    def label(self) -> str:
        """The healthy state: the first docstring line of `detect`."""
        return (self.detect.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that the rule reads."""
        return (*self.needs, *self.one_of, *self.uses)

    def apply(self, run: RunLog) -> Finding | Skipped | None:
        """Applies the rule: returns its finding, why it was skipped, or None if nothing was found."""
        result = self._detected(run)
        if result is None or isinstance(result, Skipped):
            return result and replace(result, rule=self.name)
        since = result.since
        if since is None:
            starts = [each.first_step for each in result.evidence if each.first_step is not None]
            since = min(starts, default=None)
        is_over = _is_over(result, run)
        severity: Severity = "info" if is_over else result.severity
        fixes = () if is_over else self._fixes_of(result, run, since)
        if severity == "critical" and not fixes:
            fixes = (read_step(since),)
        confidence, reason = self._confidence(result, run)
        return Finding(
            severity=severity,
            what=f"was: {result.what}" if is_over else result.what,
            evidence=result.evidence,
            cause=result.cause or self.cause,
            source=self.source,
            fixes=fixes,
            confidence=confidence,
            confidence_reason=reason,
            could_not_check=result.could_not_check,
            rule=self.name,
            since=since,
            explains=self.explains if result.explains is None else result.explains,
            is_first=result.is_first,
        )

    def _detected(self, run: RunLog) -> Detection | Skipped | None:
        """What the rule's function returns, if the log has what it needs.

        Raises:
            UsageError: it returns something else.
        """
        why = self.not_applicable(run)
        if why:
            return Skipped(why)
        result = self._skipped(run, self.min_steps) or self.detect(run)
        if not isinstance(result, Detection | Skipped | None):
            message = f"the rule {self.name} returned {type(result).__name__}"
            raise UsageError(message, where="--rules", fix="return a Detection or None")
        return self._skipped(run, MIN_STEPS) if result is None else result

    def _fixes_of(self, result: Detection, run: RunLog, since: int | None) -> tuple[Fix, ...]:
        """The fixes of a detection, or else the rule's; `since`: the first step of the fault."""
        fixes = self._fixes(run) if result.fixes is None else tuple(result.fixes)
        if since is not None and since <= th.FIRST_STEP:  # before the first update, or in its batch
            fixes = tuple(fix for fix in fixes if not fix.of_updates)
        return fixes

    def _fixes(self, run: RunLog) -> tuple[Fix, ...]:
        """The fixes that the rule declares."""
        fixes: list[Fix] = []
        for declared in (self.fixes,) if callable(self.fixes) else self.fixes:
            fixes += [declared] if isinstance(declared, Fix) else declared(run)
        return tuple(fixes)

    def _confidence(self, result: Detection, run: RunLog) -> Sure:
        """In the cause: that of the detection or the rule, less where few steps show it."""
        confidence, reason = result.sure or self.sure
        count = max((_count(run, each.metric) or 0 for each in result.evidence), default=0)
        if 0 < count < MIN_STEPS:
            confidence = "medium" if confidence == "high" else confidence
            reason += f"; {'one step' if count == 1 else f'{count} steps'} only"
        return confidence, reason

    def _skipped(self, run: RunLog, min_steps: int) -> Skipped | None:
        """Returns what the log lacks for this rule; None if it lacks nothing."""
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
                return Skipped(why, needs_steps=min_steps)
        return None


def _is_over(found: Detection, run: RunLog) -> bool:
    """Whether no figure shows the fault any more, and the run learned all the same."""
    is_over = bool(found.evidence) and not any(one.lasts for one in found.evidence)
    return is_over and found.severity != "info" and (run.has_learned or run.has_gained)


def detect_crossing(run: RunLog, levels: Levels, what: str, series: Series | None = None) -> Detection | None:
    """Detects a level crossed by its metric, or by a `series` computed from it; `what`: see `of_crossing`."""
    crossed = crossing(run.table.series(levels.key) if series is None else series, levels)
    return of_crossing(crossed, what) if crossed else None


def of_crossing(crossed: Crossing, what: str) -> Detection:
    """Converts a crossing to a detection; `what` may contain `{worst}` and `{where}`."""
    text = what.format(worst=crossed.worst, where=crossed.where)
    return Detection(crossed.severity, text, (crossed.evidence,), since=crossed.since)


def worst_of(crossed: list[Crossing]) -> Crossing:
    """The most severe crossing; the first of equally severe ones."""
    return min(crossed, key=lambda one: SEVERITIES.index(one.severity))


def crossings(run: RunLog, levels: tuple[Levels, ...]) -> list[Crossing]:
    """The crossings of all levels that were crossed."""
    each = (crossing(run.table.series(level.key), level) for level in levels)
    return [crossed for crossed in each if crossed is not None]


def _count(run: RunLog, key: str) -> int | None:
    """Number of steps with a finite value; None where there is no such column.

    For a key with a variable part (`val/<data_source>/reward_mean`), the maximum over the matching columns.
    """
    counts = (int(np.isfinite(run.table.columns[one]).sum()) for one in run.table.matching(key))
    return max(counts, default=None)


#: Every metric that a reader can keep.
_ANY = (*METRICS, *ELSEWHERE)
#: Minimum number of checked rules for the status `no warnings`.
MIN_RULES = 5


def all_rules(names: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The built-in rules, those of installed packages, and the user's (`path/to/file.py:function`).

    A function without the `Rule` decorator becomes a rule with the function's name that may read any metric.

    Raises:
        UsageError: a file or function cannot be imported, or two rules have the same name.
    """
    rules: dict[str, Rule] = {}
    parts = {part.name: part.function for part in DIAGNOSIS_RULES.parts()}
    for name, declared in (parts | {name: DIAGNOSIS_RULES[name] for name in names}).items():
        rule = declared if isinstance(declared, Rule) else Rule(declared.__name__, uses=_ANY, detect=declared)
        if rules.setdefault(rule.name, rule) is not rule:
            raise UsageError(f"there is a rule `{rule.name}` already", where=name, fix="give it another name")
    return tuple(rules.values())


def metrics_read(names: tuple[str, ...] = (), *, with_others: bool = False) -> frozenset[str]:
    """The metrics a reader must keep for `all_rules`, and for plots all others; `<…>` stands for any text."""
    read = frozenset(key for rule in all_rules(names) for key in rule.metrics)
    return read.union(_ANY) if with_others else read


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of all rules on one run."""

    run: RunLog
    #: each first event, followed by the findings that it explains in order of their onset; the event with the
    #: most severe finding first, of several the one that ended the run, or else the earliest; then remarks
    findings: tuple[Finding, ...]
    checked: tuple[Rule, ...]
    skipped: tuple[Skipped, ...]

    @property
    def status(self) -> Literal[Severity, "no warnings", "insufficient data"]:
        """The worst severity if it is at least a warning; otherwise whether enough data was checked."""
        severities = [finding.severity for finding in self.findings]
        worst = next((one for one in SEVERITIES[:2] if one in severities), None)
        if worst:
            return worst
        if self.run.is_supervised:
            return "insufficient data"
        is_enough = len(self.checked) >= MIN_RULES and len(self.run.table.steps) >= MIN_STEPS
        return "no warnings" if is_enough else "insufficient data"

    def reaches(self, severity: Severity) -> bool:
        """Whether a finding is at least this severe."""
        limit = SEVERITIES.index(severity)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)


def examine(run: RunLog, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Applies rules to a run; None: the built-in ones and those of installed packages."""
    run = with_inferred(run)
    rules = all_rules() if rules is None else rules
    results = [(rule, _applied(rule, run)) for rule in rules]
    findings = [one for _, one in results if isinstance(one, Finding)]
    if any(one.severity != "info" for one in findings):
        alone = {rule.name for rule in rules if rule.only_alone}
        findings = [one for one in findings if one.rule not in alone]
    return Diagnosis(
        run,
        in_chains(findings),
        tuple(rule for rule, one in results if not isinstance(one, Skipped)),
        tuple(one for _, one in results if isinstance(one, Skipped)),
    )


def in_chains(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Orders findings as `Diagnosis.findings`, and names in each the first event that explains it.

    A finding is explained by one of the same or an earlier step that says so. The first event is as severe as
    the worst that it explains. Remarks explain nothing and are not explained.
    """
    remarks = [one for one in found if one.severity == "info"]
    waiting = sorted((one for one in found if one not in remarks), key=_onset)
    chains: dict[str, list[Finding]] = {}  # rule of the first event → it, and what it explains

    def is_explained(finding: Finding, by: Iterable[Finding]) -> bool:
        return not finding.is_first and any(
            finding.rule in other.explains for other in by if other is not finding
        )

    while waiting:
        now = [one for one in waiting if _onset(one) == _onset(waiting[0])]
        finding = next((one for one in now if not is_explained(one, now)), now[0])
        waiting.remove(finding)
        first = next((rule for rule, chain in chains.items() if is_explained(finding, chain)), "")
        chains.setdefault(first or finding.rule, []).append(replace(finding, because_of=first))

    def order(chain: list[Finding]) -> tuple[int, bool]:
        has_ended = any(one.rule == "exception" for one in chain)
        return min(SEVERITIES.index(one.severity) for one in chain), not has_ended

    ordered = sorted(chains.values(), key=order)
    for chain in ordered:
        chain[0] = replace(chain[0], severity=SEVERITIES[order(chain)[0]])
    return (*(one for chain in ordered for one in chain), *remarks)


def _onset(one: Finding) -> float:
    """The step at which the fault began; settings are there before the first."""
    return -np.inf if one.since is None else one.since


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
        message = f"the rule `{rule.name}` failed: {type(error).__name__}: {error}"
        raise UsageError(message, where=where, fix="correct the rule, or leave it out") from error
