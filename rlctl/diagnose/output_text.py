"""Prints diagnoses and spec patches to the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from rlctl.diagnose.diagnosis_report import (
    FindingReport,
    by_severity,
    overview,
    overview_row,
    run_report,
    visible,
)
from rlctl.diagnose.finding import Evidence
from rlctl.diagnose.rule import Diagnosis
from rlctl.diagnose.spec_patch import SpecPatch
from rlctl.diagnose.table import RunLog, Series
from rlctl.terminal import Console
from rlctl.text_table import print_table

_STYLES = {
    "critical": "bold red",
    "warning": "bold yellow",
    "info": "bold cyan",
    "no warnings": "bold green",
    "insufficient data": "bold yellow",
}
_LABEL_STYLES = {"logged": "dim", "confidence": "dim", "unchecked": "dim", "source": "dim"}
_CHART_WIDTH, _BLOCKS = 60, "▁▂▃▄▅▆▇█"
_LABEL_WIDTH, _LEAST_WIDTH = 12, 20
#: Terminal columns next to a chart: indent, labels, and the range of its values.
_NEXT_TO_CHART = 38


def print_overview(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """Prints how many runs are sick and what to do first, then one line per run, the sickest first."""
    console.print(Text(overview(diagnoses), style="bold"), soft_wrap=True)
    console.print()
    rows: list[list[str | Text]] = []
    for diagnosis in by_severity(diagnoses):
        *about, status, first = overview_row(diagnosis)
        rows.append([*about, Text(status, style=_STYLES[status]), first])
    headings = ("run", "logged by", "steps", "status", "first finding")
    print_table(console, headings, rows, right=range(2, 3), whole=range(3, 4))


def print_diagnosis(console: Console, diagnosis: Diagnosis, *, all_: bool = False) -> None:
    """Prints the thing to do, then first events with what they explain.

    Args:
        all_: print also a line per rule that was checked, or not applied.
    """
    report = run_report(diagnosis)
    console.print(Text(report.todo, style="bold"), soft_wrap=True)
    console.print()
    console.print(Text.assemble((report.name, "bold"), f": {report.about}"), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    console.print()
    for finding in report.findings:
        _print_finding(console, finding, diagnosis.run)
    console.print(Text(report.summary, style=_STYLES[report.status]))
    for command in report.commands:
        console.print(Text(f"  {command}", style="cyan"), soft_wrap=True)
    console.print()
    for name, why in report.unjudged:
        console.print(Text(f"not judged: {name}: {why}", style="yellow"), soft_wrap=True)
    if report.skipped:
        console.print(Text(report.skipped, style="yellow"), soft_wrap=True)
    if all_:
        _print_rules(console, report.rules)


def _print_rules(console: Console, rules: Sequence[tuple[str, str, str]]) -> None:
    """Prints a line per rule: what came of it, and its healthy state, or why it was not applied."""
    width = max((len(name) for _, name, _ in rules), default=0)
    for word, name, text in rules:
        console.print(Text.assemble(f"{word:<9}{name:<{width}}  ", (text, "dim")), soft_wrap=True)


def _print_finding(console: Console, finding: FindingReport, run: RunLog) -> None:
    style = _STYLES[finding.severity]
    severity = (finding.severity.upper(), style)
    head = Text.assemble(severity, f"  {finding.what}", (f"  [{finding.rule}]", "dim"))
    console.print(head, soft_wrap=True)
    for line in finding.lines:
        if line.code:
            text = Text.assemble((line.code, "cyan"), (f"  # {line.text}" if line.text else "", "dim"))
        else:
            text = Text(line.text, style=_LABEL_STYLES.get(line.label, ""))
        _print_line(console, line.label, text, in_one_line=bool(line.code))
        if line.evidence:
            for chart in _chart(line.evidence, style, run, console.width - _NEXT_TO_CHART):
                _print_line(console, "", chart, in_one_line=True)
    for consequence in finding.consequences:
        text = Text.assemble(
            (consequence.severity, _STYLES[consequence.severity]),
            f" {consequence.what}",
            (f"  [{consequence.rule}]", "dim"),
        )
        _print_line(console, "then", text, in_one_line=False)
    console.print()


def _print_line(console: Console, label: str, text: Text, *, in_one_line: bool) -> None:
    """Prints a label and its text, which wraps only on a terminal and without `in_one_line`."""
    lines = [text]
    if console.is_terminal and not in_one_line:
        lines = list(text.wrap(console, max(_LEAST_WIDTH, console.width - _LABEL_WIDTH - 2)))
    for line in lines:
        line.rstrip()
        console.print(Text.assemble(f"  {label:<{_LABEL_WIDTH}}", line), soft_wrap=True)
        label = ""


def _chart(evidence: Evidence, style: str, run: RunLog, width: int) -> Iterator[Text]:
    """The metric over the run as a line of blocks, and a second line that marks the evidence's steps."""
    series = run.table.series(evidence.metric)
    blocks, steps = sparkline(series, max(8, min(_CHART_WIDTH, width)))
    if len(blocks) < 2 or evidence.first_step is None or evidence.last_step is None:
        return
    first = max(0, int(steps.searchsorted(evidence.first_step, "right")) - 1)
    last = max(first, int(steps.searchsorted(evidence.last_step, "right")) - 1)
    values = f"  {series.values.min():.3g} … {series.values.max():.3g}"
    line = Text.assemble(blocks, (values, "dim"), no_wrap=True)
    line.stylize(style, first, last + 1)
    yield line
    mark = "╵" if first == last else f"└{'─' * (last - first - 1)}┘"
    yield Text(" " * first + mark, style=style, no_wrap=True)


def sparkline(series: Series, width: int) -> tuple[str, NDArray[np.int64]]:
    """The series as a line of at most `width` blocks, and the first step of each; empty for an empty series.

    Each block shows the value of its bucket that is furthest from the series' median.
    """
    if len(series) == 0:
        return "", series.steps
    starts = series.bucket_starts(width)
    distance = series.values - np.median(series.values)
    low = np.minimum.reduceat(distance, starts)
    high = np.maximum.reduceat(distance, starts)
    shown = np.where(-low > high, low, high)
    spread = float(np.ptp(shown))
    levels = np.zeros(len(shown)) if spread == 0.0 else (shown - shown.min()) / spread
    text = "".join(_BLOCKS[round(level * (len(_BLOCKS) - 1))] for level in levels.tolist())
    return text, series.steps[starts]


def print_patch(console: Console, patch: SpecPatch, path: Path | None) -> None:
    """Prints the applied fixes, and why others were not; `path` is None where nothing was written."""
    for applied in patch.applied:
        line = Text.assemble(("applied  ", "green"), " ".join(applied.fix.spec))
        console.print(line.append(f"  for {applied.finding.rule}", style="dim"), soft_wrap=True)
    for left in patch.not_applied:
        line = Text.assemble(("left     ", "yellow"), left.finding.rule)
        console.print(line.append(visible(f": {left.why}"), style="dim"), soft_wrap=True)
    if path is None:
        console.print("No finding has a setting to change: nothing was written.")
        return
    name = shlex.quote(visible(str(path)))
    text = f"{name} written; run it with: rlctl train --spec {name}"
    if patch.spec is None:
        why = "contains only the changed keys, because the log has no spec of rlctl"
        text = f"{name} written; it {why}.\nCombine it with your spec: rlctl train --spec YOURS --spec {name}"
    console.print(Text(text), soft_wrap=True)
