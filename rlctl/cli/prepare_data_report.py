"""How `prepare-data check` and `show` look: text for people, Markdown for pull requests, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from rlctl.cli.prepare_data_output import comparison_lines
from rlctl.prepare.findings import rows
from rlctl.prepare.show import visible

if TYPE_CHECKING:
    from rlctl.prepare.check import CheckReport, FileReport
    from rlctl.prepare.findings import DataFinding
    from rlctl.prepare.lengths import Histogram
    from rlctl.prepare.show import RenderedRow

_COLOURS = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
_BINS, _BAR = 12, 40
#: Data sources named in a file's line.
_SOURCES_SHOWN = 4


def print_report(report: CheckReport, output: Literal["text", "json", "markdown"]) -> None:
    """The report on standard output."""
    if output == "json":
        typer.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=True))
    elif output == "markdown":
        typer.echo("\n".join(_markdown(report)))
    else:
        _print_text(report)


def print_rows(rows: Sequence[RenderedRow], lengths: Histogram, *, ids: bool) -> None:
    """Rows as the model reads them, then the lengths."""
    console = Console(highlight=False)
    for shown in rows:
        console.print(Rule(Text(visible(shown.where))))
        prompt = Text()
        for text, is_special in shown.pieces:
            prompt.append(visible(text), style="bold magenta" if is_special else "")
        console.print(prompt, soft_wrap=True)
        if shown.problem:
            console.print(Text(f"cannot be used: {visible(shown.problem)}", style="bold red"), soft_wrap=True)
        if shown.row is not None:
            truth = visible(shown.row.ground_truth)
            source = f"{visible(shown.row.data_source)}, graded by {visible(shown.row.style)}"
            console.print(Text.assemble(("ground truth  ", "dim"), (truth, "green")), soft_wrap=True)
            console.print(Text.assemble(("source        ", "dim"), source), soft_wrap=True)
        if shown.ids is not None:
            console.print(Text.assemble(("tokens        ", "dim"), f"{len(shown.ids):,}"))
        if ids and shown.ids is not None:
            console.print(Text(" ".join(map(str, shown.ids)), style="cyan"), soft_wrap=True)
    console.print(Rule(Text(f"prompt lengths in {lengths.unit}")))
    for line in _histogram(lengths):
        console.print(Text(line))


def _print_text(report: CheckReport) -> None:
    console = Console(highlight=False)
    for file in report.files:
        console.print(Text(_about(file), style="bold"), soft_wrap=True)
        for name, kind in file.columns.items():
            console.print(Text(f"  {visible(name)}  {visible(kind)}", style="dim"), soft_wrap=True)
    if report.lengths.total:
        console.print(Text(f"prompt lengths in {report.lengths.unit}", style="bold"))
        for line in _histogram(report.lengths):
            console.print(Text(f"  {line}"))
    for line in comparison_lines([one.to_json() for one in report.leakage]):
        console.print(Text(visible(line)), soft_wrap=True)
    for finding in report.findings:
        label = (f"{finding.severity}: ", _COLOURS[finding.severity])
        code = (f"  [{finding.code}]", "dim")
        console.print(Text.assemble(label, visible(finding.what), code), soft_wrap=True)
        for example in finding.examples:
            console.print(Text(f"    {visible(example)}", style="dim"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"    fix  {visible(finding.fix)}", style="cyan"), soft_wrap=True)
    console.print(Text(_verdict(report.findings), style="bold"))


def _about(file: FileReport) -> str:
    named = [f"{name} {count:,}" for name, count in file.sources.items()]
    more = [f"and {len(named) - _SOURCES_SHOWN} more"] if len(named) > _SOURCES_SHOWN else []
    sources = ", ".join(named[:_SOURCES_SHOWN] + more) or "no usable row"
    return visible(f"{file.path}: {rows(file.num_rows)}, read as {file.recipe or 'nothing'} ({sources})")


def _verdict(findings: Sequence[DataFinding]) -> str:
    counts = [
        (sum(finding.severity == severity for finding in findings), severity)
        for severity in ("error", "warning", "info")
    ]
    named = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    return ", ".join(named) if named else "nothing found"


def _histogram(lengths: Histogram) -> Iterator[str]:
    """A bar per range, then the quantiles."""
    bins = lengths.bins(_BINS)
    if not bins:
        yield "no usable row"
        return
    most = max(count for _, _, count in bins)
    width = len(f"{bins[-1][1]:,}")
    for low, high, count in bins:
        bar = "█" * -(-_BAR * count // most)
        yield f"{low:>{width},}–{high:<{width},} {bar:<{_BAR}} {count:,}"
    yield "  ".join(f"{name} {length:,}" for name, length in lengths.summary().items())


def _markdown(report: CheckReport) -> Iterator[str]:
    yield "| file | rows | read as | data sources |"
    yield "| --- | ---: | --- | --- |"
    for file in report.files:
        sources = ", ".join(f"{name} ({count:,})" for name, count in file.sources.items())
        cells = (str(file.path), f"{file.num_rows:,}", file.recipe or "", sources)
        yield f"| {' | '.join(map(_cell, cells))} |"
    if report.lengths.total:
        summary = ", ".join(f"{name} {length:,}" for name, length in report.lengths.summary().items())
        yield f"\nPrompt lengths in {report.lengths.unit}: {summary}."
    for line in comparison_lines([one.to_json() for one in report.leakage]):
        yield f"\n{_cell(line)}"
    yield f"\n**{_verdict(report.findings)}**\n"
    if report.findings:
        yield "| | what | count | first | fix |"
        yield "| --- | --- | ---: | --- | --- |"
    for finding in report.findings:
        first = "<br>".join(map(_cell, finding.examples))
        what = _cell(f"{finding.what} ({finding.code})")
        yield f"| {finding.severity} | {what} | {finding.count:,} | {first} | {_cell(finding.fix)} |"


def _cell(text: str) -> str:
    """Text that stays text in a Markdown table."""
    escaped = visible(text, keep="").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{char}" if char in "\\|*_`[]" else char for char in escaped)
