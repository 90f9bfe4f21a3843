"""A diagnosis as texts, the same for terminal, Markdown and page; and as JSON.

Texts from a log may be hostile: everything here is one line, with characters that act or hide made visible.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Fix, Severity, Skipped
from rlctl.diagnose.forecast import forecasts
from rlctl.diagnose.rules import Diagnosis
from rlctl.diagnose.table import STDIN, RunLog
from rlctl.spec.load import RUN_SPEC_FILE

#: Control characters, those that turn or hide text, and halves of characters.
_INVISIBLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)
#: Where a framework's own log has what a `spec.yaml` contains.
_CONFIGURED = {
    "verl": "the configuration that verl prints first",
    "trl": "the training arguments, which are in TensorBoard's and W&B's logs",
    **dict.fromkeys(("openrlhf", "slime", "nemo-rl"), "the configuration, which is in W&B's log"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One labelled line of a finding.

    Attributes:
        label: `seen`, `logged`, `cause`, `try`, `or`, `confidence`, `unchecked` or `source`.
        text: may be empty where there is code.
        code: settings, ready to paste; or empty.
        evidence: the figure that the line is about.
    """

    label: str
    text: str
    code: str = ""
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class FindingReport:
    """A finding as texts."""

    severity: Severity
    rule: str
    what: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """A diagnosis as texts.

    Attributes:
        name: the log.
        about: steps and framework.
        summary: all findings in one line.
        severity: the worst, if at least a warning.
        notes: what had to be tolerated when reading.
        findings: worst first.
        forecasts: of critical levels, the soonest first.
        commands: that apply fixes.
        rules: (`found`, `ok`, `SKIPPED` or `n/a`; rule; what it looks for, or why it was skipped).
    """

    name: str
    about: str
    summary: str
    severity: Severity | None
    notes: tuple[str, ...]
    findings: tuple[FindingReport, ...]
    forecasts: tuple[str, ...]
    commands: tuple[str, ...]
    rules: tuple[tuple[str, str, str], ...]


def run_report(diagnosis: Diagnosis) -> RunReport:
    """The diagnosis as texts."""
    run, steps = diagnosis.run, diagnosis.run.table.steps
    summary, severity = _summary(diagnosis)
    hit = {finding.rule for finding in diagnosis.findings}
    rules = [("found" if rule.name in hit else "ok", rule.name, rule.label) for rule in diagnosis.checked]
    for skipped in sorted(diagnosis.skipped, key=lambda one: not one.missing):
        rules.append(("SKIPPED" if skipped.missing else "n/a", skipped.rule, _why_skipped(skipped, run)))
    has_settings = any(fix.spec for finding in diagnosis.findings for fix in finding.fixes)
    return RunReport(
        run_name(run),
        f"steps {steps[0]:,}–{steps[-1]:,}, logged by {run.framework}",
        summary,
        severity,
        tuple(map(visible, run.notes)),
        tuple(
            FindingReport(one.severity, one.rule, visible(one.what), tuple(_lines(one, run)))
            for one in diagnosis.findings
        ),
        tuple(map(str, forecasts(run))),
        _commands(run) if has_settings else (),
        tuple(rules),
    )


def visible(text: str) -> str:
    """The text on one line, with characters that act on a terminal or hide shown by their number."""
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def run_name(run: RunLog) -> str:
    """The log's path as it is shown."""
    return "standard input" if run.path == STDIN else visible(str(run.path))


def settings(fix: Fix, run: RunLog) -> str:
    """The fix in the keys of what wrote the log, else in rlctl's, to paste; empty where no setting helps."""
    if run.framework in fix.others:
        return visible(fix.others[run.framework])
    return visible(" ".join(shlex.quote(setting) for setting in fix.spec))


def _summary(diagnosis: Diagnosis) -> tuple[str, Severity | None]:
    counts = {s: sum(finding.severity == s for finding in diagnosis.findings) for s in SEVERITIES}
    worst = next((s for s in SEVERITIES[:2] if counts[s]), None)
    if worst:
        return ", ".join(f"{count} {s}" for s, count in counts.items() if count), worst
    count = len(diagnosis.checked)
    if count:
        return f"{count} rule{'s' * (count != 1)} checked: no warnings.", None
    return "No rule could be checked.", "warning"


def _lines(finding: Finding, run: RunLog) -> Iterator[Line]:
    for evidence in finding.evidence:
        where = "" if evidence.first_step is None else f", steps {evidence.first_step}–{evidence.last_step}"
        yield Line("seen", visible(f"{evidence.metric}: {evidence.figure}{where}"), evidence=evidence)
    for key in dict.fromkeys(evidence.metric for evidence in finding.evidence):
        origin = run.origins.get(key)
        if origin is not None and (origin.name != key or origin.meaning):
            meaning = f": {origin.meaning}" if origin.meaning else ""
            yield Line("logged", visible(f"{key} as {origin.name}{meaning}"))
    yield Line("cause", visible(finding.cause))
    for place, fix in enumerate(finding.fixes):
        is_ours = bool(fix.spec) and run.framework not in {"rlctl", "unknown", *fix.others}
        why = "; ".join(filter(None, ("in rlctl's keys" if is_ours else "", visible(fix.why))))
        yield Line("or" if place else "try", why, settings(fix, run))
    yield Line(
        "confidence", visible(": ".join(filter(None, (finding.confidence, finding.confidence_reason))))
    )
    for missing in finding.could_not_check:
        yield Line("unchecked", visible(missing))
    yield Line("source", visible(finding.source))


def _why_skipped(skipped: Skipped, run: RunLog) -> str:
    """Why, and what would enable the rule."""
    if not skipped.missing:
        return visible(skipped.why)
    enabling = ", ".join(skipped.missing)
    if RUN_SPEC_FILE in skipped.missing and run.framework in _CONFIGURED:
        enabling += f", or {_CONFIGURED[run.framework]}"
    return visible(f"{skipped.why}: {enabling}")


def _commands(run: RunLog) -> tuple[str, ...]:
    """Commands that apply fixes; none where the run has no spec of rlctl's."""
    if run.spec is None:
        return ()
    spec, log = (shlex.quote(visible(str(path))) for path in (run.path.parent / RUN_SPEC_FILE, run.path))
    return (f"rlctl train --spec {spec} KEY=VALUE …", f"rlctl diagnose {log} --fix fixed.yaml")


def diagnosis_document(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return {"runs": [_run_document(diagnosis) for diagnosis in diagnoses]}


def _run_document(diagnosis: Diagnosis) -> dict[str, Any]:
    run, steps = diagnosis.run, diagnosis.run.table.steps
    return {
        "log": str(run.path),
        "framework": run.framework,
        "steps": {"first": int(steps[0]), "last": int(steps[-1]), "count": len(steps)},
        "has_spec": run.spec is not None,
        "facts": asdict(run.facts),
        "notes": list(run.notes),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "forecasts": [asdict(one) for one in forecasts(run)],
        "checked": [{"rule": rule.name, "label": rule.label} for rule in diagnosis.checked],
        "skipped": [asdict(skipped) for skipped in diagnosis.skipped],
    }
