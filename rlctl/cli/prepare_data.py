"""`rlctl prepare-data`: any input into the Parquet that training reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.prepare_data_inspect import check, show
from rlctl.errors import UsageError

Recipe = Literal[
    "auto",
    "gsm8k",
    "math",
    "aime",
    "dapo-math",
    "countdown",
    "multiple-choice",
    "verl",
    "trl",
    "openrlhf",
    "generic",
]

app = typer.Typer(no_args_is_help=True, help="Prepare prompts and answers for training and evaluation.")


@app.callback()
def prepare_data() -> None:
    """Prepare prompts and answers for training and evaluation."""


@app.command()
def parquet(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="JSONL, JSON, CSV, TSV (each also .gz or .zst), Parquet, Arrow, directories of them, a "
            "directory written by a dataset's save_to_disk, or hf:organisation/name[:split].",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    recipe: Annotated[
        Recipe, typer.Option(help="How columns become rows; auto: recognised by the first row.")
    ] = "auto",
    prompt_key: Annotated[str | None, typer.Option(help="Column of the prompt; dots reach inside.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the answer; dots reach inside.")] = None,
    data_source: Annotated[
        str | None,
        typer.Option(help="Name of the source, which chooses the grader. Default: by recipe or file name."),
    ] = None,
    source_key: Annotated[
        str | None, typer.Option(help="Column that names each row's source instead.")
    ] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Put before each conversation.")] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Put after each question; '' for none. Default: by the recipe.")
    ] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="Share of rows for the test split. Default: 0.05.")
    ] = None,
    val_size: Annotated[int | None, typer.Option(min=0, help="Number of test rows instead.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 1,
    bad_rows: Annotated[
        Literal["refuse", "quarantine"],
        typer.Option(help="Refuse the input, or set bad rows aside in quarantine.jsonl."),
    ] = "refuse",
    duplicates: Annotated[
        Literal["check", "keep", "drop"],
        typer.Option(help="Rows that ask what an earlier row asked. check: refuse more than 5 %."),
    ] = "check",
    near_duplicates: Annotated[
        Literal["count", "drop", "off"],
        typer.Option(help="Rows much like an earlier row (MinHash, Jaccard similarity of 0.8)."),
    ] = "count",
    against: Annotated[
        list[str] | None,
        typer.Option(help="A benchmark that must not be trained on, of any readable format. Repeatable."),
    ] = None,
    leakage: Annotated[
        Literal["report", "drop", "refuse", "off"],
        typer.Option(
            help="Training rows that occur in the test split or in --against: exactly, but for "
            "numbers, or 13 words in a row."
        ),
    ] = "report",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose tokenizer and chat template measure the prompts. Default: unmeasured."
        ),
    ] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a prompt may have; needs --model.")
    ] = None,
    overlong: Annotated[
        Literal["keep", "drop", "cut-left", "cut-right"],
        typer.Option(help="Longer prompts: keep them, drop them, or cut the question."),
    ] = "keep",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's tokenizer run code of its own.")
    ] = False,
    check_graders: Annotated[
        bool, typer.Option(help="Check that each ground truth is graded right by its own grader.")
    ] = True,
    rows_per_shard: Annotated[int, typer.Option(min=1, help="Rows of one output file.")] = 1_000_000,
    to: Annotated[
        Literal["verl", "trl", "openrlhf"],
        typer.Option(help="Columns of the output; rlctl and verl read the same."),
    ] = "verl",
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local processes, or Ray Data on one machine or many.")
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Local processes. Default: one per core, none for a small input."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
) -> None:
    """Write train.parquet, test.parquet and manifest.json, in verl's row layout.

    The same input, options and versions give the same bytes; running it again changes nothing.

    rlctl prepare-data parquet gsm8k/train.jsonl --out data/gsm8k

    rlctl prepare-data parquet sums.csv --out data/sums --prompt-key problem --answer-key solution

    rlctl prepare-data parquet hf:org/name --out data/name --model MODEL --max-prompt-length 1024
    --overlong drop --duplicates drop --against aime.jsonl --leakage drop
    """
    from rlctl.cli.prepare_data_output import show_progress, summary_lines
    from rlctl.prepare.pipeline import prepare
    from rlctl.prepare.request import PrepareRequest

    if val_fraction is not None and val_size is not None:
        raise UsageError("--val-fraction and --val-size exclude each other", fix="give one of them")
    request = PrepareRequest(
        sources=tuple(sources),
        out=out,
        recipe=recipe,
        prompt_key=prompt_key,
        answer_key=answer_key,
        data_source=data_source,
        source_key=source_key,
        system_prompt=system_prompt,
        instruction=instruction,
        val_fraction=0.05 if val_fraction is None else val_fraction,
        val_size=val_size,
        seed=seed,
        overwrite=overwrite,
        bad_rows=bad_rows,
        duplicates=duplicates,
        near_duplicates=near_duplicates,
        against=tuple(against or ()),
        leakage=leakage,
        model=model,
        max_prompt_length=max_prompt_length,
        overlong=overlong,
        trust_remote_code=trust_remote_code,
        check_graders=check_graders,
        rows_per_shard=rows_per_shard,
        to=to,
        engine=engine,
        workers=workers,
    )
    with show_progress() as progress:
        summary = prepare(request, progress)
    typer.echo("\n".join(summary_lines(request, summary)))


app.command()(check)
app.command()(show)
