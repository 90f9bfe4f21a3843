"""A diagnosis on the terminal, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlctl.diagnose.charts import sparkline
from rlctl.diagnose.finding import SEVERITIES, Diagnosis, Evidence, Finding, Severity
from rlctl.diagnose.wording import (
    how_to_apply,
    is_in_other_words,
    not_checked,
    run_name,
    seen,
    settings,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from rlctl.diagnose.table import RunLog

_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_CHART_WIDTH = 60
_LABEL_WIDTH, _LEAST_ROOM = 8, 20
#: Columns beside a chart: indent, labels, and the range of its values.
_BESIDE_CHART = 34


def as_document(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return {"runs": [_run_document(diagnosis) for diagnosis in diagnoses]}


def _run_document(diagnosis: Diagnosis) -> dict[str, Any]:
    run = diagnosis.run
    steps = run.table.steps
    return {
        "log": str(run.path),
        "framework": run.framework,
        "steps": {"first": int(steps[0]), "last": int(steps[-1]), "count": len(steps)},
        "has_spec": run.spec is not None,
        "facts": asdict(run.facts),
        "notes": list(run.notes),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "checked": [{"rule": rule.name, "looks_for": rule.looks_for} for rule in diagnosis.checked],
        "skipped": [asdict(skipped) for skipped in diagnosis.skipped],
    }


def verdict(diagnosis: Diagnosis) -> tuple[str, Severity | None]:
    """All findings in a line, and the worst severity among warnings and worse."""
    counts = {s: sum(finding.severity == s for finding in diagnosis.findings) for s in SEVERITIES}
    worst = next((s for s in SEVERITIES[:2] if counts[s]), None)
    if worst:
        return ", ".join(f"{count} {s}" for s, count in counts.items() if count), worst
    if diagnosis.checked:
        count = len(diagnosis.checked)
        return f"Healthy as far as {count} rule{'s' * (count != 1)} can tell: no warnings.", None
    return "Nothing could be checked.", "warning"


def print_diagnoses(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """One run after the other."""
    for place, diagnosis in enumerate(diagnoses):
        if place:
            console.print()
        print_diagnosis(console, diagnosis)


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Findings worst first, then what was checked and what was not."""
    from rich.text import Text

    run = diagnosis.run
    steps = run.table.steps
    amount = f": steps {steps[0]}–{steps[-1]}, logged by {run.framework}"
    console.print(Text.assemble((run_name(run), "bold"), amount), soft_wrap=True)
    for note in run.notes:
        console.print(Text(visible(f"note: {note}"), style="yellow"), soft_wrap=True)
    console.print()
    for finding in diagnosis.findings:
        _print_finding(console, finding, run)
    line, severity = verdict(diagnosis)
    console.print(Text(line, style=_STYLES[severity] if severity else "bold green"))
    if any(remedy.spec for finding in diagnosis.findings for remedy in finding.remedies):
        for command in how_to_apply(run):
            console.print(Text(f"  {command}", style="cyan"), soft_wrap=True)
    console.print()
    _print_rules(console, diagnosis)


def _print_finding(console: Console, finding: Finding, run: RunLog) -> None:
    from rich.text import Text

    head = Text.assemble(
        (finding.severity.upper(), _STYLES[finding.severity]),
        "  ",
        visible(finding.what),
        (f"  [{finding.rule}]", "dim"),
    )
    console.print(head, soft_wrap=True)
    for evidence in finding.evidence:
        _print_part(console, "seen", Text(seen(evidence)))
        for line in _chart(evidence, finding.severity, run, console.width - _BESIDE_CHART):
            _print_part(console, "", line, in_one_line=True)
    for meaning in _meanings(finding, run):
        _print_part(console, "logged", Text(meaning, style="dim"))
    _print_part(console, "cause", Text(visible(finding.cause)))
    _print_remedies(console, finding, run)
    sure = f"{finding.confidence}: {finding.why_so_sure}" if finding.why_so_sure else finding.confidence
    _print_part(console, "sure", Text(visible(sure), style="dim"))
    for missing in finding.could_not_check:
        _print_part(console, "open", Text(visible(missing), style="dim"))
    _print_part(console, "source", Text(visible(finding.source), style="dim"))
    console.print()


def _print_part(console: Console, label: str, text: Text, *, in_one_line: bool = False) -> None:
    """A label and its text; it wraps on a terminal, unless it is to be pasted or goes into a pipe."""
    from rich.text import Text

    room = max(_LEAST_ROOM, console.width - _LABEL_WIDTH - 2)
    lines = [text] if in_one_line or not console.is_terminal else text.wrap(console, room)
    for line in lines:
        line.rstrip()
        console.print(Text.assemble(f"  {label:<{_LABEL_WIDTH}}", line), soft_wrap=True)
        label = ""


def _chart(evidence: Evidence, severity: Severity, run: RunLog, room: int) -> Iterator[Text]:
    """The metric over the run as a line of blocks, and below it a mark under the evidence's steps."""
    from rich.text import Text

    series = run.table.series(evidence.metric)
    blocks, steps = sparkline(series, max(8, min(_CHART_WIDTH, room)))
    if len(blocks) < 2 or evidence.first_step is None or evidence.last_step is None:
        return
    first = max(0, int(steps.searchsorted(evidence.first_step, "right")) - 1)
    last = max(first, int(steps.searchsorted(evidence.last_step, "right")) - 1)
    values = f"  {series.values.min():.3g} … {series.values.max():.3g}"
    line = Text.assemble(blocks, (values, "dim"), no_wrap=True)
    line.stylize(_STYLES[severity], first, last + 1)
    yield line
    mark = "╵" if first == last else f"└{'─' * (last - first - 1)}┘"
    yield Text(" " * first + mark, style=_STYLES[severity], no_wrap=True)


def _meanings(finding: Finding, run: RunLog) -> Iterator[str]:
    """What the log called the figures, where that is not rlctl's name and definition."""
    for key in dict.fromkeys(evidence.metric for evidence in finding.evidence):
        origin = run.origins.get(key)
        if origin is not None and (origin.name != key or origin.meaning):
            meaning = f": {origin.meaning}" if origin.meaning else ""
            yield visible(f"{key} as {origin.name}{meaning}")


def _print_remedies(console: Console, finding: Finding, run: RunLog) -> None:
    from rich.text import Text

    for place, remedy in enumerate(finding.remedies):
        to_paste = settings(remedy, run)
        why = visible(remedy.why)
        if to_paste and is_in_other_words(remedy, run):
            why = f"in rlctl's keys{f'; {why}' if why else ''}"
        beside = (f"  # {why}" if to_paste else why, "dim" if to_paste else "") if why else ""
        text = Text.assemble((to_paste, "cyan"), beside)
        _print_part(console, "or" if place else "try", text, in_one_line=bool(to_paste))


def _print_rules(console: Console, diagnosis: Diagnosis) -> None:
    """One line per rule: found, ok, SKIPPED with what is missing, n/a with the reason."""
    from rich.text import Text

    hit = {finding.rule for finding in diagnosis.findings}
    lines = [("found" if r.name in hit else "ok", r.name, r.looks_for, "dim") for r in diagnosis.checked]
    for skipped in sorted(diagnosis.skipped, key=lambda one: not one.missing):
        word, style = ("SKIPPED", "yellow") if skipped.missing else ("n/a", "dim")
        lines.append((word, skipped.rule, not_checked(skipped, diagnosis.run), style))
    width = max((len(name) for _, name, _, _ in lines), default=0)
    for word, name, text, style in lines:
        console.print(Text.assemble(f"{word:<9}{name:<{width}}  ", (text, style)), soft_wrap=True)
