"""A diagnosis for people and for programs; both say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlctl.diagnose.finding import SEVERITIES, Diagnosis, Evidence, Finding

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def as_document(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    return {"runs": [_run_document(diagnosis) for diagnosis in diagnoses]}


def _run_document(diagnosis: Diagnosis) -> dict[str, Any]:
    run = diagnosis.run
    steps = run.table.steps
    return {
        "log": str(run.path),
        "framework": "rlctl",
        "steps": {"first": int(steps[0]), "last": int(steps[-1]), "count": len(steps)},
        "has_spec": run.spec is not None,
        "notes": list(run.notes),
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "checked": [{"rule": rule.name, "looks_for": rule.looks_for} for rule in diagnosis.checked],
        "skipped": [asdict(skipped) for skipped in diagnosis.skipped],
    }


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Findings worst first, then what was checked and what was not."""
    from rich.text import Text

    run = diagnosis.run
    steps = run.table.steps
    console.print(Text.assemble((str(run.path), "bold"), f": steps {steps[0]}–{steps[-1]}"), soft_wrap=True)
    for note in run.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print()
    for finding in diagnosis.findings:
        _print_finding(console, finding)
    counts = {s: sum(finding.severity == s for finding in diagnosis.findings) for s in SEVERITIES}
    if diagnosis.reaches("warning"):
        console.print(Text(", ".join(f"{count} {s}" for s, count in counts.items() if count), style="bold"))
    elif diagnosis.checked:
        verdict = f"Healthy as far as {len(diagnosis.checked)} rules can tell: no warnings."
        console.print(Text(verdict, style="bold green"))
    else:
        console.print(Text("Nothing could be checked.", style="bold yellow"))
    _print_rules(console, diagnosis)


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble(
        (finding.severity.upper(), _STYLES[finding.severity]),
        "  ",
        finding.what,
        (f"  [{finding.rule}]", "dim"),
    )
    console.print(head, soft_wrap=True)
    parts = Table.grid(padding=(0, 2))
    for evidence in finding.evidence:
        parts.add_row("seen", Text(_seen(evidence)))
    parts.add_row("cause", Text(finding.cause))
    for place, remedy in enumerate(finding.remedies):
        parts.add_row("try" if place == 0 else "or", Text(str(remedy), style="cyan"))
    parts.add_row("source", Text(finding.source, style="dim"))
    console.print(Padding(parts, (0, 0, 1, 2)))


def _seen(evidence: Evidence) -> str:
    where = f", steps {evidence.first_step}–{evidence.last_step}" if evidence.first_step is not None else ""
    return f"{evidence.metric}: {evidence.figure}{where}"


def _print_rules(console: Console, diagnosis: Diagnosis) -> None:
    from rich.table import Table
    from rich.text import Text

    missing = [skipped for skipped in diagnosis.skipped if skipped.missing]
    beside = [skipped for skipped in diagnosis.skipped if not skipped.missing]
    table = Table.grid(padding=(0, 2))
    hit = {finding.rule for finding in diagnosis.findings}
    for rule in diagnosis.checked:
        table.add_row(
            "found" if rule.name in hit else "ok", Text(rule.name), Text(rule.looks_for, style="dim")
        )
    for skipped in missing:
        why = f"{skipped.why}: {', '.join(skipped.missing)}"
        table.add_row("SKIPPED", Text(skipped.rule), Text(why, style="yellow"))
    for skipped in beside:
        table.add_row("n/a", Text(skipped.rule), Text(skipped.why, style="dim"))
    console.print()
    console.print(table)
