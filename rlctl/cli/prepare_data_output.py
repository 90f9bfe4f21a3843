"""Output of `prepare-data`: progress bar, and reports as text, Markdown and JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import TaskProgressColumn, TimeRemainingColumn
from rich.text import Text

from rlctl.cli.output import counting
from rlctl.errors import visible
from rlctl.prepare.data_files import described_columns
from rlctl.prepare.findings import DataFinding, lines, rows
from rlctl.prepare.request import PrepareRequest, PrepareSummary, Progress
from rlctl.terminal import Console

if TYPE_CHECKING:
    from rlctl.prepare.check import CheckReport, FileReport
    from rlctl.prepare.lengths import LengthQuantiles, RenderedRow

_COLOURS = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
#: Maximum number of data sources in the line of a file.
_SOURCES_SHOWN = 4


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A progress bar on standard error, on terminals only."""
    with counting("starting", TaskProgressColumn(), TimeRemainingColumn()) as show:
        yield Progress(show)


def print_summary(console: Console, request: PrepareRequest, summary: PrepareSummary) -> None:
    """Prints the results, the findings, and the next command to run."""
    out = request.out
    result = [
        f"{'unchanged' if summary.unchanged else 'wrote'} {out} (recipe {summary.recipe})",
        f"  {described_columns(summary.report['columns'])}",
        f"  {'rows in':<23} {summary.counts['input']:>12,}",
    ]
    for name, count in summary.counts.items():
        if count and name != "input":
            where = f"  {_place(out, summary.outputs.get(name, []))}" if name in summary.outputs else ""
            where = f"  {out / 'quarantine.jsonl'}" if name == "quarantined" else where
            result.append(f"  {name.replace('_', ' '):<23} {count:>12,}{where}")
    lengths = summary.report.get("lengths")
    if lengths:
        median, high, longest = (f"{lengths[name]:,}" for name in ("p50", "p99", "max"))
        result.append(f"  prompt tokens: median {median}, 99 % up to {high}, longest {longest}")
    result += [f"  {line}" for line in comparison_lines(summary.report.get("leakage_checks", []))]
    found = [DataFinding(**entry) for entry in summary.report["findings"]]
    result += [f"  {line}" for line in lines(found)]
    for line in [*result, *_next(request, summary)]:
        console.print(Text(visible(line, keep="")), soft_wrap=True)


def comparison_lines(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per comparison, e.g. `leakage: 0 of 285 rows of train occur in aime.jsonl`."""
    return [
        f"leakage: {leak['rows']:,} of {leak['of']:,} rows of {leak['rows_of']} occur in {leak['against']}"
        for leak in comparisons
    ]


def _place(out: Path, files: list[str]) -> Path:
    return (
        out / files[0] if len(files) == 1 else out / f"{files[0][: -len('00000-of-00000.parquet')]}*.parquet"
    )


def _next(request: PrepareRequest, summary: PrepareSummary) -> list[str]:
    keys = {"train": "data.train_files", "test": "data.val_files"}
    files = [
        f"{key}={_place(request.out, summary.outputs[split])}"
        for split, key in keys.items()
        if summary.outputs[split]
    ]
    given = request.chat_template_kwargs.items()
    kwargs = [f"data.chat_template_kwargs.{name}={json.dumps(value)}" for name, value in given]
    arguments = " ".join(map(shlex.quote, [*files, f"model.path={request.model or 'MODEL'}", *kwargs]))
    return ["next:", f"  rlctl train {arguments}"]


def rows_document(shown: Sequence[RenderedRow], lengths: LengthQuantiles, *, ids: bool) -> dict[str, Any]:
    """The content of `print_rows` as JSON types."""
    found = []
    for shown_row in shown:
        about: dict[str, Any] = {"where": shown_row.where, "problem": shown_row.problem or None}
        if shown_row.row is not None:
            messages = [message.fields for message in shown_row.row.prompt]
            about |= {"data_source": shown_row.row.data_source, "ground_truth": shown_row.row.ground_truth}
            about |= {"style": shown_row.row.style, "messages": messages, "extra_info": shown_row.row.extra}
        if shown_row.ids is not None:
            text = "".join(piece for piece, _ in shown_row.pieces)
            about |= {"text": text, "tokens": len(shown_row.ids)} | ({"ids": shown_row.ids} if ids else {})
        found.append(about)
    return {"rows": found, "lengths": lengths.to_json() if lengths.total else None}


def print_rows(console: Console, rows: Sequence[RenderedRow], lengths: LengthQuantiles, *, ids: bool) -> None:
    """Prints rows as the model reads them, then quantiles of the lengths."""
    for shown in rows:
        console.print(Text(f"── {visible(shown.where)}", style="bold"), soft_wrap=True)
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
            if shown.row.extra:
                columns = visible(json.dumps(shown.row.extra, ensure_ascii=False, default=str))
                console.print(Text.assemble(("extra_info    ", "dim"), columns), soft_wrap=True)
        if shown.ids is not None:
            console.print(Text.assemble(("tokens        ", "dim"), f"{len(shown.ids):,}"))
        if ids and shown.ids is not None:
            console.print(Text(" ".join(map(str, shown.ids)), style="cyan"), soft_wrap=True)
    console.print(Text(f"── prompt lengths in {lengths.unit}", style="bold"))
    console.print(Text(_quantiles(lengths) if lengths.total else "no usable row"))


def print_check(console: Console, report: CheckReport) -> None:
    """Prints the report of `check`: files, lengths, comparisons, findings."""
    for file in report.files:
        console.print(Text(_about(file), style="bold"), soft_wrap=True)
        for name, kind in file.columns.items():
            console.print(Text(f"  {visible(name)}  {visible(kind)}", style="dim"), soft_wrap=True)
    if report.lengths.total:
        console.print(Text(f"prompt lengths in {report.lengths.unit}", style="bold"))
        console.print(Text(f"  {_quantiles(report.lengths)}"))
    for line in comparison_lines(report.leakage):
        console.print(Text(visible(line)), soft_wrap=True)
    for finding in report.findings:
        label = (f"{finding.severity}: ", _COLOURS[finding.severity])
        code = (f"  [{finding.code}]", "dim")
        console.print(Text.assemble(label, visible(finding.what), code), soft_wrap=True)
        for example in finding.examples:
            console.print(Text(f"    {visible(example)}", style="dim"), soft_wrap=True)
        if finding.fix:
            console.print(Text(f"    fix  {visible(finding.fix)}", style="cyan"), soft_wrap=True)
    console.print(Text(_conclusion(report.findings), style="bold"))


def _about(file: FileReport) -> str:
    named = [f"{name} {count:,}" for name, count in file.data_sources.items()]
    more = [f"and {len(named) - _SOURCES_SHOWN} more"] if len(named) > _SOURCES_SHOWN else []
    sources = ", ".join(named[:_SOURCES_SHOWN] + more) or "no usable row"
    return visible(f"{file.path}: {rows(file.rows)}, read as {file.recipe or 'nothing'} ({sources})")


def _conclusion(findings: Sequence[DataFinding]) -> str:
    counts = [
        (sum(finding.severity == severity for finding in findings), severity)
        for severity in ("error", "warning", "info")
    ]
    named = [f"{count} {severity}{'s' if count > 1 else ''}" for count, severity in counts if count]
    return ", ".join(named) if named else "nothing found"


def _quantiles(lengths: LengthQuantiles) -> str:
    """The smallest length, quantiles, and the largest."""
    return "  ".join(f"{name} {length:,}" for name, length in lengths.summary().items())
