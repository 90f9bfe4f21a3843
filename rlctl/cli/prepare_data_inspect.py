"""`rlctl prepare-data check` and `show`: inspect data without changing it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE…",
        help="Parquet of rlctl, verl, TRL or OpenRLHF, or anything `parquet` reads; or directories.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Model whose tokenizer and chat template are used. Default: characters are counted."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's tokenizer run code of its own.")
]


def check(
    files: Files,
    model: Model = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="A benchmark whose questions must not occur, of any readable format. Repeatable."),
    ] = None,
    max_prompt_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a prompt may have (characters without --model)."),
    ] = None,
    fail_on: Annotated[
        Literal["warning", "error", "never"],
        typer.Option(help="Exit with code 3 if anything at least this bad is found."),
    ] = "never",
    output: Annotated[Literal["text", "json", "markdown"], typer.Option("--format")] = "text",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Report everything that is wrong with data files, worst first, with places and remedies.

    Columns and types, rows that cannot be used, repeated questions and conflicting answers, data sources
    without a grader, ground truths their grader cannot read, stray characters, lengths, the chat template,
    questions shared between files or with a benchmark. Files are read once and never changed.

    rlctl prepare-data check data/gsm8k/train.parquet data/gsm8k/test.parquet

    rlctl prepare-data check train.parquet --model MODEL --max-prompt-length 1024 --against aime.jsonl
    --fail-on error
    """
    from rlctl.cli.prepare_data_output import show_progress
    from rlctl.cli.prepare_data_report import print_report
    from rlctl.prepare.check import CheckRequest
    from rlctl.prepare.check import check as run
    from rlctl.prepare.findings import reaches

    request = CheckRequest(
        files=tuple(files),
        model=model,
        against=tuple(against or ()),
        max_prompt_length=max_prompt_length,
        trust_remote_code=trust_remote_code,
    )
    with show_progress() as progress:
        report = run(request, progress)
    print_report(report, output)
    if fail_on != "never" and reaches(report.findings, fail_on):
        raise typer.Exit(3)


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Anything `parquet` or `check` reads.")],
    model: Model = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many rows.")] = 3,
    row: Annotated[int, typer.Option(min=1, help="The first row, counted from 1.")] = 1,
    ids: Annotated[bool, typer.Option("--ids", help="Also the token ids; needs --model.")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show prompts exactly as the model reads them, their answers, and how long prompts are.

    With --model the chat template is applied and special tokens stand out; without it messages are shown as
    they are. Control characters are written out.

    rlctl prepare-data show data/gsm8k/train.parquet --model MODEL

    rlctl prepare-data show data/gsm8k/train.parquet --model MODEL --row 42 -n 1 --ids
    """
    from rlctl.cli.prepare_data_report import print_rows
    from rlctl.errors import UsageError
    from rlctl.prepare.lengths import PromptLengths
    from rlctl.prepare.show import measure, show_rows

    if ids and model is None:
        raise UsageError("token ids need a tokenizer", where="--ids", fix="name a model with --model")
    lengths = PromptLengths(model, trust_remote_code=trust_remote_code) if model is not None else None
    print_rows(show_rows(file, lengths, first=row, count=number), measure(file, lengths), ids=ids)
