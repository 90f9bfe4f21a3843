"""`rlctl evaluate`: scores of a model on benchmarks or files, with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import (
    Format,
    PassAtK,
    SamplingSeed,
    Step,
    Trust,
    count_option,
    default_option,
    echo,
    output_option,
    refuse_options,
    request,
    run_or_model,
)
from rlctl.cli.evaluate_compare import numbers
from rlctl.cli.prepare_data import (
    AnswerKey,
    ContinueFinalMessage,
    DataSource,
    Instruction,
    PromptKey,
    RecipeOption,
)
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.evaluate.evaluate_report import Evaluation
    from rlctl.evaluate.evaluation import Progress


#: Options that apply only to sampling; `--regrade` refuses them.
_OF_SAMPLING = (
    *("data", "recipe", "prompt_key", "answer_key", "data_source", "instruction", "benchmarks_dir"),
    "continue_final_message",
    "chat_template_kwargs",
    *("n", "temperature", "top_p", "max_response_length", "limit", "seed"),
    *("environment", "engine", "fresh", "batch_size"),
)


def evaluate(
    context: typer.Context,
    model_or_run: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            parser=run_or_model,
            help="A run directory or its name, a model directory or a hub id; with --regrade an "
            "evaluation's directory.",
        ),
    ],
    data: Annotated[
        list[str] | None,
        default_option(
            "NAME|FILE",
            "A benchmark (see `rlctl evaluate list`) or a file that `prepare-data` reads. Repeatable.",
            "the run's validation files",
        ),
    ] = None,
    recipe: RecipeOption = "auto",
    prompt_key: PromptKey = None,
    answer_key: AnswerKey = None,
    data_source: DataSource = None,
    instruction: Instruction = None,
    continue_final_message: ContinueFinalMessage = False,
    chat_template_kwargs: Annotated[
        str | None,
        default_option(
            "JSON", "Variables of the chat template, '{\"enable_thinking\": false}'.", "the run's"
        ),
    ] = None,
    benchmarks_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="RLCTL_BENCHMARKS",
            metavar="DIR",
            help="Directory of benchmark files.",
            show_default="the hub and its cache",
        ),
    ] = None,
    step: Step = None,
    n: Annotated[int, count_option("--n", "-n", help="Responses per question.")] = 8,
    k: PassAtK = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="0: the most likely token, with --n 1.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="P", help="Nucleus sampling; 1: all tokens.")
    ] = 1.0,
    max_response_length: Annotated[
        int | None, count_option(help="Tokens of a response at most.", show_default="the run's, or 512")
    ] = None,
    limit: Annotated[
        int | None, count_option(help="Only the first questions of each source.", show_default="all")
    ] = None,
    seed: SamplingSeed = 1,
    reward: Annotated[
        str | None,
        default_option(
            "NAME|FILE",
            "Grader: its name, FILE.py:FUNCTION, or a YAML file with the section `reward`.",
            "the run's, or by data source",
        ),
    ] = None,
    environment: Annotated[
        str | None,
        default_option(
            "NAME|FILE",
            "Environment of the episodes: FILE.py:CLASS, or a YAML file with the section `environment`.",
            "the run's, or single_turn",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        default_option(
            "NAME|FILE",
            "Engine that samples: hf, vllm, FILE.py:FUNCTION, or openai:URL for a model behind an API.",
            "the run's, or hf",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Sample again instead of using stored responses.")
    ] = False,
    regrade: Annotated[
        bool, typer.Option("--regrade", help="Grade an evaluation's samples again: no model, no sampling.")
    ] = False,
    out: Annotated[
        Path | None,
        output_option(
            metavar="DIR",
            help="Directory to write, new or empty.",
            show_default="evaluations/TIME in the run",
        ),
    ] = None,
    batch_size: Annotated[
        int, count_option(help="Sequences sampled at once; affects memory and speed, not the result.")
    ] = 256,
    trust: Trust = False,
    output_format: Format = "text",
) -> None:
    """Sample answers, grade them as in training, and report scores.

    avg@n is the mean reward, pass@k the unbiased probability that one of k answers is
    right, maj@n the reward of the most frequent answer; all with 95 % intervals
    over questions. Responses are stored as they arrive: the same command
    continues where a killed one stopped.

      rlctl evaluate runs/rlctl/rloo-seq-is-20260101-120000

      rlctl evaluate MODEL --data gsm8k --data math500 -n 4 --limit 200

      rlctl evaluate evaluations/A --regrade --reward my_reward.py:grade
    """
    from rlctl.evaluate.request import EvaluateRequest

    ks = None if k is None else numbers(k)
    if regrade:
        why = "applies to sampling, and --regrade samples nothing"
        refuse_options(context, _OF_SAMPLING, why, "leave it out, or leave --regrade out")
        from rlctl.evaluate.evaluation import regrade as run_regrade

        directory = Path(model_or_run)
        _run(
            lambda progress: run_regrade(directory, progress, ks=ks, reward=reward, out=out, trust=trust),
            output_format,
        )
        return
    from rlctl.evaluate.evaluation import evaluate as run_evaluation
    from rlctl.prepare.recipes import Recipe

    columns = Recipe(recipe, prompt_key, answer_key, data_source, instruction=instruction)
    variables = None if chat_template_kwargs is None else _variables(chat_template_kwargs)
    given = {"data": list(data or []), "ks": ks, "columns": columns, "chat_template_kwargs": variables}
    asked = request(EvaluateRequest, context.params, **given)
    _run(lambda progress: run_evaluation(asked, progress), output_format)


def _variables(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
    except ValueError as error:
        variables = None
        why = str(error)
    else:
        why = "it is not an object"
    if not isinstance(variables, dict):
        fix = """for example '{"enable_thinking": false}'"""
        raise UsageError(f"no JSON object: {why}", where="--chat-template-kwargs", fix=fix)
    return variables


def _run(work: Callable[[Progress], tuple[Path, Evaluation]], output_format: str) -> None:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    from rlctl.cli.output import counting

    with counting("reading the model", MofNCompleteColumn(), TimeRemainingColumn()) as count:
        out, evaluation = work(lambda doing, done, total: count(done, total, doing))
    if output_format == "json":
        from rlctl.evaluate.evaluate_report import RESULTS_FILE

        echo((out / RESULTS_FILE).read_text(encoding="utf-8"), nl=False)
    else:
        _print(out, evaluation)


def _print(out: Path, evaluation: Evaluation) -> None:
    """Prints scores with intervals per source, notes, and the directory of the results."""
    from rich.text import Text

    from rlctl.evaluate.evaluate_report import RESULTS_FILE, results_document
    from rlctl.evaluate.page import PAGE_FILE, SCORE_HEADINGS, score_notes, score_rows
    from rlctl.evaluate.samples import SAMPLES_FILE
    from rlctl.terminal import Console
    from rlctl.text_table import print_table

    console = Console(highlight=False)
    model = evaluation.about["model"]
    of_run = f", step {model['step']} of {model['run_dir']}" if model["run_dir"] else ""
    console.print(Text(f"{model['path']}{of_run}"), soft_wrap=True)
    document = results_document(evaluation)
    n = document["sampling"]["n"]
    for score in document["scores"]:
        amount = f": {score['num_questions']:,} questions × {n} responses"
        console.print(Text.assemble("\n", (score["data_source"], "bold"), amount), soft_wrap=True)
        rows = [(row.name, *row.cells) for row in score_rows(score, n)]
        print_table(console, ("", *SCORE_HEADINGS), rows, right=range(1, 4), wide=True)
    console.print()
    for note in (*evaluation.notes, *score_notes(document)):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(f"{out}/  {RESULTS_FILE}, {SAMPLES_FILE}, {PAGE_FILE}"), soft_wrap=True)
