"""What `prepare-data parquet` shows: a bar while it works, and what it did."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from rlctl.prepare.findings import DataFinding, lines
from rlctl.prepare.request import PrepareRequest, PrepareSummary, Progress


class _Bar(Progress):
    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=None, rate="")
        self._rows = 0
        self._reads = False
        self._begun = monotonic()

    def phase(self, name: str, total: int) -> None:
        self._rows, self._reads, self._begun = 0, name == "reading", monotonic()
        self._bar.reset(self._task, description=name, total=total or None, rate="")
        self._bar.refresh()

    def advance(self, amount: int, rows: int = 0) -> None:
        self._rows += rows if self._reads else amount
        rate = self._rows / max(1e-3, monotonic() - self._begun)
        self._bar.update(self._task, advance=amount, rate=f"{rate:,.0f} rows/s")


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar on standard error, on terminals only: bytes read and rows per second, then the phases."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield _Bar(bar)


def summary_lines(request: PrepareRequest, summary: PrepareSummary) -> list[str]:
    """What was done, what was found, and what to run next."""
    out = request.out
    result = [
        f"{'unchanged' if summary.unchanged else 'wrote'} {out} (recipe {summary.recipe})",
        f"  {'rows in':<23} {summary.counts['input']:>12,}",
    ]
    for name, count in summary.counts.items():
        if count and name != "input":
            where = f"  {_place(out, summary.outputs.get(name, []))}" if name in summary.outputs else ""
            where = f"  {out / 'quarantine.jsonl'}" if name == "quarantined" else where
            result.append(f"  {name.replace('_', ' '):<23} {count:>12,}{where}")
    lengths = summary.report.get("lengths")
    if lengths and lengths.get("quantiles"):
        median, high = lengths["quantiles"]["0.5"], lengths["quantiles"]["0.99"]
        result.append(f"  prompt tokens: median {median:,}, 99 % up to {high:,}, longest {lengths['max']:,}")
    result += [f"  {line}" for line in comparison_lines(summary.report.get("leakage_checks", []))]
    found = [
        DataFinding(**entry | {"examples": tuple(entry["examples"])}) for entry in summary.report["findings"]
    ]
    result += [f"  {line}" for line in lines(found)]
    return [*result, *_next(request, summary)]


def comparison_lines(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """`leakage: 0 of 285 rows of train occur in aime.jsonl`, a line each."""
    return [
        f"leakage: {one['rows']:,} of {one['of']:,} rows of {one['rows_of']} occur in {one['against']}"
        for one in comparisons
    ]


def _place(out: Path, files: list[str]) -> Path:
    return (
        out / files[0] if len(files) == 1 else out / f"{files[0][: -len('00000-of-00000.parquet')]}*.parquet"
    )


def _next(request: PrepareRequest, summary: PrepareSummary) -> list[str]:
    if request.to != "verl":
        return []
    keys = {"train": "data.train_files", "test": "data.val_files"}
    files = [
        f"{key}={_place(request.out, summary.outputs[split])}"
        for split, key in keys.items()
        if summary.outputs[split]
    ]
    arguments = " ".join(map(shlex.quote, [*files, f"model.path={request.model or 'MODEL'}"]))
    return ["next:", f"  rlctl train {arguments}"]
