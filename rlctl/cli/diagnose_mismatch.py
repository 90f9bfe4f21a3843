"""`rlctl diagnose mismatch`: causes of differences between the log-probs of engine and trainer."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer


def mismatch(
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The trainer's model: a run, a model directory or a hub id.")
    ] = "embedded",
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Engine that samples: hf, vllm, or FILE.py:FUNCTION.",
            show_default="the run's, or hf",
        ),
    ] = None,
    engine_dtype: Annotated[
        Literal["fp32", "bf16", "int8"] | None,
        typer.Option(help="The engine's precision.", show_default="the run's, or the trainer's"),
    ] = None,
    engine_model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Model and tokenizer the engine loads.", show_default="the trainer's"
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, Parquet as `prepare-data` writes it; may be repeated.",
            show_default="the run's, or built-in questions",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Sent to the engine.", show_default="the run's, or 1")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Sent to the engine.", show_default="the run's, or 1"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 1,
    output_format: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Text or JSON.")
    ] = "text",
) -> None:
    """Sample with the rollout engine, score with the trainer, and find out why the two differ.

    rlctl diagnose mismatch --model Qwen/Qwen2.5-0.5B-Instruct --engine vllm --engine-dtype bf16

    rlctl diagnose mismatch --model runs/rlctl/rloo-seq-is-20260101-120000 --temperature 0.7
    """
    from rlctl.cli.output import write_report
    from rlctl.mismatch.mismatch_run import MismatchRequest, as_document, print_report, run_preflight

    report = run_preflight(
        MismatchRequest(
            model=model,
            engine=engine,
            engine_model=engine_model,
            engine_dtype=engine_dtype,
            data_files=list(data or []),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
    )
    write_report(output_format, None, partial(print_report, report=report), partial(as_document, report))
