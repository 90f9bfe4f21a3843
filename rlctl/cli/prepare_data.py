"""`rlctl prepare-data`: any input into the Parquet that training reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.prepare.pipeline import PrepareRequest, PrepareSummary

app = typer.Typer(no_args_is_help=True, help="Prepare prompts and answers for training and evaluation.")


class RecipeChoice(StrEnum):
    """How records become rows."""

    AUTO = "auto"
    GSM8K = "gsm8k"
    GENERIC = "generic"


class BadRowPolicy(StrEnum):
    """What happens to rows that cannot be used."""

    REFUSE = "refuse"
    QUARANTINE = "quarantine"


@app.callback()
def prepare_data() -> None:
    """Prepare prompts and answers for training and evaluation."""


@app.command()
def parquet(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="SRC", help="JSONL, JSON, CSV, TSV (also .gz), Parquet, or directories."),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    recipe: Annotated[
        RecipeChoice, typer.Option(help="gsm8k: solutions ending in '#### number'; auto: by the columns.")
    ] = RecipeChoice.AUTO,
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompt; dots reach inside.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answer; dots reach inside.")] = None,
    data_source: Annotated[
        str | None,
        typer.Option(help="Name of the source, which chooses the grader. Default: the file's name."),
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Put before each conversation.")] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Put after each question; '' for none. Default: by the recipe.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of rows for the test split.", show_default="0.05")
    ] = None,
    val_size: Annotated[int | None, typer.Option(min=0, help="Number of test rows instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 1,
    bad_rows: Annotated[
        BadRowPolicy, typer.Option(help="Refuse the input, or set bad rows aside in quarantine.jsonl.")
    ] = BadRowPolicy.REFUSE,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
) -> None:
    """Write train.parquet, test.parquet and manifest.json, in verl's row layout.

    The same input, options and versions give the same bytes; running it again changes nothing.

    rlctl prepare-data parquet gsm8k/train.jsonl --out data/gsm8k

    rlctl prepare-data parquet sums.csv --out data/sums --prompt-key problem --answer-key solution
    """
    from rlctl.prepare.pipeline import PrepareRequest, bytes_to_read, prepare

    if val_fraction is not None and val_size is not None:
        raise UsageError("--val-fraction and --val-size exclude each other", fix="give one of them")
    request = PrepareRequest(
        sources=tuple(sources),
        out=out,
        recipe=recipe.value,
        prompt_key=prompt_key,
        answer_key=answer_key,
        data_source=data_source,
        system_prompt=system_prompt,
        instruction=instruction,
        val_fraction=0.05 if val_fraction is None else val_fraction,
        val_size=val_size,
        seed=seed,
        overwrite=overwrite,
        bad_rows=bad_rows.value,
    )
    with _progress(bytes_to_read(request)) as advance:
        summary = prepare(request, advance)
    _report(request, summary)


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, on terminals only."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=total_bytes)
        yield lambda count: bar.advance(task, count)


def _report(request: PrepareRequest, summary: PrepareSummary) -> None:
    counts, out = summary.counts, request.out
    lines = [
        f"{'unchanged' if summary.unchanged else 'wrote'} {out} (recipe {summary.recipe})",
        f"  rows in      {counts['input']:>10,}",
        f"  train        {counts['train']:>10,}  {out / 'train.parquet'}",
    ]
    if counts["test"]:
        lines.append(f"  test         {counts['test']:>10,}  {out / 'test.parquet'}")
    if counts["quarantined"]:
        lines.append(f"  quarantined  {counts['quarantined']:>10,}  {out / 'quarantine.jsonl'}")
    val_files = f" data.val_files={out / 'test.parquet'}" if counts["test"] else ""
    lines += [
        "next:",
        f"  rlctl train data.train_files={out / 'train.parquet'}{val_files} model.path=MODEL",
    ]
    typer.echo("\n".join(lines))
