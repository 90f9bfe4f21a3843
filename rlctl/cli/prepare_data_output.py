"""Output of `prepare-data`: progress bar, and reports as text, Markdown and JSON."""

from __future__ import annotations

import json
import shlex
from collections import Counter
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
    did = "unchanged" if summary.unchanged else "wrote"
    result = [f"{did} {request.out} (recipe {summary.recipe})"]
    result += [f"  {line}" for line in _result_lines(request.out, summary)]
    for line in [*result, *_next(request, summary)]:
        console.print(Text(visible(line, keep="")), soft_wrap=True)


def _result_lines(out: Path, summary: PrepareSummary) -> Iterator[str]:
    """Columns, numbers of rows, lengths, comparisons and findings."""
    report = summary.report
    yield described_columns(report["columns"])
    yield f"{'rows in':<23} {summary.counts['input']:>12,}"
    places = {split: _place(out, files) for split, files in summary.outputs.items() if files}
    places["quarantined"] = out / "quarantine.jsonl"
    for name, count in summary.counts.items():
        if count and name != "input":
            where = f"  {places[name]}" if name in places else ""
            yield f"{name.replace('_', ' '):<23} {count:>12,}{where}"
    lengths = report.get("lengths")
    if lengths:
        yield (
            f"prompt tokens: median {lengths['p50']:,}, 99 % up to {lengths['p99']:,}, "
            f"longest {lengths['max']:,}"
        )
    yield from comparison_lines(report.get("leakage_checks", []))
    yield from lines([DataFinding(**entry) for entry in report["findings"]])


def comparison_lines(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per comparison, e.g. `leakage: 0 of 285 rows of train occur in aime.jsonl`."""
    return [
        f"leakage: {leak['rows']:,} of {leak['of']:,} rows of {leak['rows_of']} occur in {leak['against']}"
        for leak in comparisons
    ]


def _place(out: Path, files: list[str]) -> Path:
    """The file of a split, or the pattern of its files."""
    first = files[0]
    if len(files) == 1:
        return out / first
    return out / f"{first[: -len('00000-of-00000.parquet')]}*.parquet"


def _next(request: PrepareRequest, summary: PrepareSummary) -> list[str]:
    """The command that trains on these rows."""
    arguments: list[str] = []
    for split, key in {"train": "data.train_files", "test": "data.val_files"}.items():
        if summary.outputs[split]:
            arguments.append(f"{key}={_place(request.out, summary.outputs[split])}")
    arguments.append(f"model.path={request.model or 'MODEL'}")
    for name, value in request.chat_template_kwargs.items():
        arguments.append(f"data.chat_template_kwargs.{name}={json.dumps(value)}")
    return ["next:", f"  rlctl train {shlex.join(arguments)}"]


def rows_document(shown: Sequence[RenderedRow], lengths: LengthQuantiles, *, ids: bool) -> dict[str, Any]:
    """The content of `print_rows` as JSON types."""
    documents = [_row_document(row, ids=ids) for row in shown]
    return {"rows": documents, "lengths": lengths.to_json() if lengths.total else None}


def _row_document(shown: RenderedRow, *, ids: bool) -> dict[str, Any]:
    """A row, with its tokens if a model reads it."""
    document: dict[str, Any] = {"where": shown.where, "problem": shown.problem or None}
    row = shown.row
    if row is not None:
        document |= {
            "data_source": row.data_source,
            "ground_truth": row.ground_truth,
            "style": row.style,
            "messages": [message.fields for message in row.prompt],
            "extra_info": row.extra,
        }
    if shown.ids is not None:
        document["text"] = "".join(piece for piece, _ in shown.pieces)
        document["tokens"] = len(shown.ids)
        if ids:
            document["ids"] = shown.ids
    return document


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
    """A file: rows, recipe, data sources."""
    named = [f"{name} {count:,}" for name, count in file.data_sources.items()]
    shown = named[:_SOURCES_SHOWN]
    if len(named) > _SOURCES_SHOWN:
        shown.append(f"and {len(named) - _SOURCES_SHOWN} more")
    sources = ", ".join(shown) or "no usable row"
    return visible(f"{file.path}: {rows(file.rows)}, read as {file.recipe or 'nothing'} ({sources})")


def _conclusion(findings: Sequence[DataFinding]) -> str:
    """E.g. `1 error, 2 warnings`."""
    counts = Counter(finding.severity for finding in findings)
    named: list[str] = []
    for severity in ("error", "warning", "info"):
        count = counts[severity]
        if count:
            named.append(f"{count} {severity}{'s' if count > 1 else ''}")
    return ", ".join(named) or "nothing found"


def _quantiles(lengths: LengthQuantiles) -> str:
    """The smallest length, quantiles, and the largest."""
    return "  ".join(f"{name} {length:,}" for name, length in lengths.summary().items())
