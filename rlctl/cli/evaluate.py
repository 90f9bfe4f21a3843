"""`rlctl evaluate`: how good is a checkpoint, and how sure is that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlctl.cli.compare import compare_command, numbers
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.evaluate.report import Evaluation


class Engine(StrEnum):
    """Who samples."""

    HF = "hf"
    VLLM = "vllm"


class EvaluateCommand(TyperCommand):
    """`evaluate MODEL …`, and `evaluate compare A B` beside it."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Hand over to `compare` when that is the first word."""
        if args[:1] == ["compare"]:
            return compare_command().make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


#: Options that say how to sample, which regrading does not.
_OF_SAMPLING = (
    *("data", "n", "temperature", "top_p", "max_response_length", "limit", "seed", "engine", "fresh"),
    "batch_size",
)


def evaluate(
    context: typer.Context,
    model_or_run: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run directory, a model directory or a hub id; with --regrade an evaluation's directory.",
        ),
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
        int | None,
        typer.Option(min=1, help="Tokens.", show_default="the run's, or 512"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 1,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION", help="Who grades.", show_default="the run's, or by data source"
        ),
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="Who samples.", show_default="the run's, or hf")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Sample again what is stored.")] = False,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Grade an evaluation's samples again: no model, no sampling.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write, new or empty.", show_default="evaluations/TIME in the run"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences at once: memory and speed, never the result.")
    ] = 256,
) -> None:
    """Sample answers, grade them as in training, and say how good they are.

    avg@n is the mean reward, pass@k the unbiased chance that one of k answers is
    right, maj@n the reward of the most frequent answer; all with 95 % intervals
    that count questions, not answers. Responses are stored as they arrive: the
    same command goes on where a killed one stopped.

      rlctl evaluate runs/rlctl/rloo-seq-is-20260101-120000

      rlctl evaluate Qwen/Qwen2.5-0.5B-Instruct --data data/gsm8k/test.parquet --n 4 --limit 200

      rlctl evaluate evaluations/20260101-120000 --regrade --reward my_reward.py:grade

    Two evaluations side by side: rlctl evaluate compare A B
    """
    ks = None if k is None else numbers(k)
    if regrade:
        _refuse_sampling_options(context)
        _regrade(Path(model_or_run), ks, reward, out)
        return
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
        reward=reward,
        engine=engine.value if engine else None,
        fresh=fresh,
        out=out,
        batch_size=batch_size,
    )
    with _progress() as progress:
        found = run_evaluation(request, progress)
    _print(*found)


def _regrade(directory: Path, ks: list[int] | None, reward: str | None, out: Path | None) -> None:
    from rlctl.evaluate.regrade import RegradeRequest, regrade

    with _progress() as progress:
        found = regrade(RegradeRequest(directory, ks, reward, out), progress)
    _print(*found)


def _refuse_sampling_options(context: typer.Context) -> None:
    for name in _OF_SAMPLING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} is about sampling, and --regrade samples nothing",
                where=option,
                fix="leave it out, or leave --regrade out",
            )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, on terminals only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the model", total=None)
        yield lambda doing, done, total: bar.update(task, description=doing, completed=done, total=total)


def _print(out: Path, evaluation: Evaluation) -> None:
    from rlctl.cli.evaluate_output import print_evaluation

    print_evaluation(out, evaluation)
