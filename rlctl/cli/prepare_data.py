"""`rlctl prepare-data`: converts data files to Parquet for training; `check` and `show` only read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rlctl.cli.command import Format, Out, count_option, default_option, output_option, request
from rlctl.errors import UsageError
from rlctl.prepare.layouts import LAYOUT_TABLE
from rlctl.prepare.request import (
    BadRows,
    Duplicates,
    Leakage,
    NearDuplicates,
    Overlong,
    PrepareRequest,
)

app = typer.Typer(
    no_args_is_help=True,
    help=(
        "Prepare prompts and answers for training and evaluation.\n\n"
        "rlctl prepare-data parquet sums.csv --out data/sums --val-size 40"
    ),
)

DataSource = Annotated[
    str | None,
    default_option("NAME", "Name of the source, which chooses the grader.", "by recipe or file name"),
]
RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help=f"How columns become rows: {', '.join(LAYOUT_TABLE['layouts'])}, or file.py:function; "
        "auto: by the first row.",
    ),
]
_policy = partial(typer.Option, metavar="POLICY")
_column = partial(typer.Option, metavar="COLUMN", show_default="the recipe's")
PromptKey = Annotated[str | None, _column(help="Column of the prompt; a dot separates nested fields.")]
AnswerKey = Annotated[str | None, _column(help="Column of the answer; a dot separates nested fields.")]
Instruction = Annotated[
    str | None,
    default_option("TEXT", "Text appended to each question; '' for none.", "the recipe's"),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model whose tokenizer and chat template measure the prompts."),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A benchmark that must not occur: its name (see `rlctl evaluate list`), or a file of any "
        "readable format. May be repeated.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's tokenizer run its own code.")
]
TemplateKwargs = Annotated[
    list[str] | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="NAME=VALUE",
        help="Argument of the chat template, as in data.chat_template_kwargs. May be repeated.",
    ),
]


def _template_kwargs(model: str | None, texts: list[str] | None) -> dict[str, Any]:
    """Parses arguments of the chat template as `rlctl train` parses `data.chat_template_kwargs`."""
    if not texts:
        return {}
    from rlctl.run_spec.load import load_spec

    if model is None:
        where = "--chat-template-kwargs"
        fix = "name the model with --model"
        raise UsageError("arguments of a chat template need a model", where=where, fix=fix)
    spec = load_spec(overrides=[f"data.chat_template_kwargs.{text}" for text in texts]).spec
    return dict(spec.data.chat_template_kwargs)


ContinueFinalMessage = Annotated[
    bool,
    typer.Option(
        "--continue-final-message",
        help="Accept prompts that end with a message of the assistant, which the response continues.",
    ),
]


@app.command()
def parquet(
    context: typer.Context,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="JSONL, JSON, CSV, TSV (each also .gz, .zst, .bz2), Parquet, Arrow, Feather, "
            "directories of them, a directory written by a dataset's save_to_disk, or a data set of the hub, "
            "hf:organisation/name[:split].",
        ),
    ],
    out: Annotated[Path, output_option(metavar="DIR", help="Directory to write.")],
    recipe: RecipeOption = "auto",
    prompt_key: PromptKey = None,
    answer_key: AnswerKey = None,
    data_source: DataSource = None,
    source_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column that names each row's source instead.")
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message, in place of a conversation's own.")
    ] = None,
    instruction: Instruction = None,
    val_fraction: Annotated[
        float | None,
        default_option("SHARE", "Share of rows for the test split.", "0.05"),
    ] = None,
    val_size: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Number of test rows instead.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the split.")] = 1,
    bad_rows: Annotated[
        BadRows, _policy(help="refuse the input, or quarantine: move bad rows to quarantine.jsonl.")
    ] = "refuse",
    duplicates: Annotated[
        Duplicates,
        _policy(help="Rows with the question of an earlier row: check (refuse more than 5 %), keep or drop."),
    ] = "check",
    near_duplicates: Annotated[
        NearDuplicates,
        _policy(
            help="Rows similar to an earlier row (MinHash, Jaccard similarity of 0.8): count, drop or off."
        ),
    ] = "count",
    against: Against = None,
    leakage: Annotated[
        Leakage,
        _policy(
            help="Training rows that occur in the test split or in --against (the same words, other numbers, "
            "or 13 words in a row): report, drop, refuse or off."
        ),
    ] = "report",
    model: Model = None,
    max_prompt_length: Annotated[
        int | None, count_option(help="Tokens a prompt may have; needs --model.")
    ] = None,
    overlong: Annotated[Overlong, _policy(help="Longer prompts: keep or drop.")] = "keep",
    trust_remote_code: TrustRemoteCode = False,
    chat_template_kwargs: TemplateKwargs = None,
    continue_final_message: ContinueFinalMessage = False,
    check_graders: Annotated[
        bool,
        typer.Option(
            "--check-graders/--no-check-graders",
            help="Check that the grader gives each ground truth 1, a wrong one 0.",
        ),
    ] = True,
    rows_per_shard: Annotated[int, count_option(help="Rows of one output file.")] = 1_000_000,
    workers: Annotated[
        int | None, count_option(help="Local processes.", show_default="one per core, none for a small input")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")] = False,
    output_format: Format = "text",
) -> None:
    """Write train.parquet, test.parquet and manifest.json, in verl's row layout.

    The same input, options and versions give the same bytes; running it again changes nothing.

      rlctl prepare-data parquet gsm8k/train.jsonl --output data/gsm8k --against gsm8k

      rlctl prepare-data parquet sums.csv --output sums --answer-key solution
    """
    from dataclasses import asdict

    from rlctl.cli.output import write_report
    from rlctl.cli.prepare_data_output import print_summary, show_progress
    from rlctl.prepare.pipeline import prepare
    from rlctl.prepare.recipes import Recipe

    if val_fraction is not None and val_size is not None:
        raise UsageError("--val-fraction and --val-size exclude each other", fix="give one of them")
    asked = request(
        PrepareRequest,
        context.params,
        sources=tuple(sources),
        recipe=Recipe(
            name=recipe,
            prompt_key=prompt_key,
            answer_key=answer_key,
            data_source=data_source,
            system_prompt=system_prompt,
            instruction=instruction,
            source_key=source_key,
            continue_final_message=continue_final_message,
        ),
        val_fraction=0.05 if val_fraction is None else val_fraction,
        against=tuple(against or ()),
        chat_template_kwargs=_template_kwargs(model, chat_template_kwargs),
    )
    with show_progress() as progress:
        summary = prepare(asked, progress)
    text = partial(print_summary, request=asked, summary=summary)
    write_report(output_format, None, text, lambda: asdict(summary) | {"out": str(out)})


@app.command()
def check(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="Parquet of rlctl, verl, TRL or OpenRLHF, anything `parquet` reads, or directories.",
        ),
    ],
    model: Model = None,
    against: Against = None,
    max_prompt_length: Annotated[
        int | None, count_option(help="Tokens a prompt may have (characters without --model).")
    ] = None,
    fail_on: Annotated[
        Literal["warning", "error", "never"],
        typer.Option(
            metavar="LEVEL",
            help="Exit with code 3 if a finding is at least this severe: warning, error or never.",
        ),
    ] = "never",
    output_format: Format = "text",
    out: Out = None,
    trust_remote_code: TrustRemoteCode = False,
    chat_template_kwargs: TemplateKwargs = None,
    continue_final_message: ContinueFinalMessage = False,
) -> None:
    """Report everything that is wrong with data files, worst first, with places and fixes.

    Columns and types, rows that cannot be used, repeated questions and
    conflicting answers, data sources without a grader, ground truths their
    grader cannot read, stray characters, lengths, the chat template, questions
    shared between files or with a benchmark. Files are read once and never
    changed.

      rlctl prepare-data check data/gsm8k/train.parquet data/gsm8k/test.parquet

      rlctl prepare-data check train.parquet --against gsm8k --fail-on error
    """
    from rlctl.cli.output import write_report
    from rlctl.cli.prepare_data_output import print_check, show_progress
    from rlctl.prepare.check import CheckRequest
    from rlctl.prepare.check import check as run
    from rlctl.prepare.findings import reaches

    asked = request(
        CheckRequest,
        context.params,
        files=tuple(files),
        against=tuple(against or ()),
        chat_template_kwargs=_template_kwargs(model, chat_template_kwargs),
    )
    with show_progress() as progress:
        report = run(asked, progress)
    write_report(output_format, out, partial(print_check, report=report), report.to_json)
    if fail_on != "never" and reaches(report.findings, fail_on):
        raise typer.Exit(3)


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Anything `parquet` or `check` reads.")],
    model: Model = None,
    number: Annotated[int, count_option("--count", "-n", help="How many rows.")] = 3,
    row: Annotated[int, count_option(help="The first row, counted from 1.")] = 1,
    ids: Annotated[bool, typer.Option("--ids", help="Also the token ids; needs --model.")] = False,
    output_format: Format = "text",
    out: Out = None,
    trust_remote_code: TrustRemoteCode = False,
    chat_template_kwargs: TemplateKwargs = None,
) -> None:
    """Show prompts exactly as the model reads them, their answers, and how long prompts are.

    With --model the chat template is applied and special tokens are in colour;
    without it messages are shown as they are. Control characters are written out.

      rlctl prepare-data show data/gsm8k/train.parquet --model MODEL

      rlctl prepare-data show train.parquet --model MODEL --row 42 -n 1 --ids
    """
    from rlctl.cli.output import write_report
    from rlctl.cli.prepare_data_output import print_rows, rows_document
    from rlctl.prepare.lengths import PromptLengths, show_rows

    if ids and model is None:
        raise UsageError("token ids need a tokenizer", where="--ids", fix="name a model with --model")
    kwargs = _template_kwargs(model, chat_template_kwargs)
    lengths = None
    if model is not None:
        lengths = PromptLengths(model, trust_remote_code=trust_remote_code, chat_template_kwargs=kwargs)
    shown, measured = show_rows(file, lengths, first=row, count=number)
    text = partial(print_rows, rows=shown, lengths=measured, ids=ids)
    write_report(output_format, out, text, lambda: rows_document(shown, measured, ids=ids))
