"""`rlctl evaluate`: how good is a checkpoint, and how sure is that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.evaluate.intervals import Estimate
    from rlctl.evaluate.report import Evaluation


def evaluate(
    model_or_run: Annotated[
        str, typer.Argument(metavar="MODEL_OR_RUN", help="A run directory, a model directory or a hub id.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Parquet as `prepare-data` writes it; may be repeated. Default: the run's validation files.",
            show_default=False,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses per question.")] = 8,
    k: Annotated[
        str | None, typer.Option("--k", metavar="K,…", help="Of pass@k.", show_default="1,4,8, up to n")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token, with --n 1.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1: all tokens.")] = 1.0,
    max_response_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens.", show_default="the run's, or 512")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write, new or empty.", show_default="evaluations/TIME in the run"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences at once: memory and speed, never the result.")
    ] = 256,
) -> None:
    """Sample answers, grade them as in training, and say how good they are.

    avg@n is the mean reward, pass@k the unbiased chance that one of k answers is right; both with
    95 % intervals that count questions, not answers.

      rlctl evaluate runs/rlctl/rloo-seq-is-20260101-120000

      rlctl evaluate Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k/test.parquet --n 4 --limit 200
    """
    ks = None if k is None else _numbers(k)
    if top_p == 0.0:
        raise UsageError(
            "--top-p 0 leaves no token", where="--top-p", fix="for the likeliest: --temperature 0"
        )
    from rlctl.evaluate.run import EvaluateRequest
    from rlctl.evaluate.run import evaluate as run_evaluation

    request = EvaluateRequest(
        model_or_run=model_or_run,
        data_files=list(data or []),
        n=n,
        ks=ks,
        temperature=temperature,
        top_p=top_p,
        max_response_length=max_response_length,
        limit=limit,
        seed=seed,
        out=out,
        batch_size=batch_size,
    )
    with _progress() as progress:
        evaluation = run_evaluation(request, progress)
    _print(evaluation)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of numbers: {text}", where="--k", fix="for example --k 1,4,8") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, on terminals only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model", total=None)
        yield lambda done, total: bar.update(task, description="questions", completed=done, total=total)


def _print(evaluation: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    target = evaluation.target
    of_run = f", step {target.step} of {target.run_dir}" if target.run_dir else ""
    console.print(Text(f"{target.model_path}{of_run}"), soft_wrap=True)
    for score in evaluation.scores:
        amount = f": {score.num_questions:,} questions × {evaluation.n} responses"
        console.print(Text.assemble("\n", (score.data_source, "bold"), amount), soft_wrap=True)
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("")
        table.add_column("", justify="right")
        table.add_column("95 % interval", justify="right")
        table.add_row(f"avg@{evaluation.n}", *_shown(score.avg))
        for k, passed in score.pass_at.items():
            table.add_row(f"pass@{k}", *_shown(passed))
        table.add_row("truncated", f"{score.truncated_fraction:.1%}")
        table.add_row("mean length", f"{score.mean_length:.1f}", "tokens")
        table.add_row("grader errors", f"{score.num_grader_errors:,}")
        console.print(table)
    console.print()
    for note in _notes(evaluation):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(f"{evaluation.out}/  results.json, samples.parquet", markup=False, soft_wrap=True)


def _shown(estimate: Estimate | None) -> tuple[str, str]:
    """A figure and its interval: `0.412`, `0.380 – 0.445`."""
    if estimate is None:
        return "—", "too few graded samples"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}", "—"
    return f"{estimate.value:.3f}", f"{estimate.low:.3f} – {estimate.high:.3f}"


def _notes(evaluation: Evaluation) -> Iterator[str]:
    yield from evaluation.target.notes
    if evaluation.num_overlong:
        yield f"{evaluation.num_overlong} questions were left out: their prompts are too long"
    if evaluation.grader_errors:
        first = evaluation.grader_errors[0].strip().splitlines()[-1]
        yield f"samples the grader failed on are left out, not scored 0; the first failure: {first}"
