"""`rlctl diagnose mismatch`: causes of differences between the log-probs of engine and trainer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.command import Format, Out, SamplingSeed, Trust, default_option, request

if TYPE_CHECKING:
    from rlctl.mismatch.mismatch_run import MismatchReport
    from rlctl.terminal import Console


def mismatch(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The trainer's model: a run, a model directory or a hub id.")
    ] = "embedded",
    engine: Annotated[
        str | None,
        default_option(
            "NAME|FILE", "Engine that samples: hf, vllm, or FILE.py:FUNCTION.", "the run's, or hf"
        ),
    ] = None,
    engine_dtype: Annotated[
        Literal["fp32", "bf16", "int8"] | None,
        typer.Option(help="The engine's precision.", show_default="the run's, or the trainer's"),
    ] = None,
    engine_model: Annotated[
        str | None,
        default_option("PATH", "Model and tokenizer the engine loads.", "the trainer's"),
    ] = None,
    data: Annotated[
        list[str] | None,
        default_option(
            "FILE",
            "Prompts, Parquet as `prepare-data` writes it; may be repeated.",
            "the run's, or built-in questions",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Sent to the engine.", show_default="the run's, or 1")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Sent to the engine.", show_default="the run's, or 1"),
    ] = None,
    seed: SamplingSeed = 1,
    trust: Trust = False,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Sample with the rollout engine, score with the trainer, and find out why the two differ.

    rlctl diagnose mismatch --model Qwen/Qwen2.5-0.5B-Instruct --engine vllm --engine-dtype bf16

    rlctl diagnose mismatch --model runs/rlctl/rloo-seq-is-20260101-120000 --temperature 0.7
    """
    from rlctl.cli.output import write_report
    from rlctl.mismatch.mismatch_run import MismatchRequest, as_document, run_preflight

    report = run_preflight(request(MismatchRequest, context.params, data_files=list(data or [])))
    write_report(output_format, out, partial(_print, report=report), partial(as_document, report))


def _print(console: Console, report: MismatchReport) -> None:
    from rich.text import Text

    from rlctl.text_table import print_table

    def line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    gap = report.gap
    line((report.conclusion, "bold"))
    counts = f"{report.num_sequences} responses, {gap.num_tokens} tokens"
    sizes = f"mean |r| {gap.abs_mean:.2g}, mean {gap.mean:.2g}, std {gap.std:.2g}, max |r| {gap.abs_max:.2g}"
    ess = f"ESS {gap.ess_token:.3f} per token, {gap.ess_sequence:.3f} per sequence"
    about = {
        "trainer": report.trainer,
        "engine": report.engine,
        "request": f"{report.settings}; {counts}",
        "gap": f"log-ratio r: {sizes}; k3 {gap.k3:.2g}; {ess}",
    }
    if report.total_variation:
        low, high = report.total_variation
        about["apart"] = f"total variation of the next-token distributions between {low:.2g} and {high:.2g}"
    for name, text in about.items():
        line((f"  {name:<8}", "dim"), text)
    for number, cause in enumerate(report.causes, start=1):
        line((f"\n{number}. {cause.name}", "bold yellow"), (f"  {cause.share:.0%} of the gap", "dim"))
        line(f"  {cause.what}")
        if cause.before and cause.after:
            line((f"  mean |log-ratio| {cause.before.abs_mean:.2g} → {cause.after.abs_mean:.2g}", "dim"))
        line(("  fix   ", "dim"), cause.fix)
        for index, change in enumerate(cause.spec):
            line(("  or    " if index else "  try   ", "dim"), (change, "cyan"))
    console.print()
    if not gap.agrees:
        rows = []
        for part in report.parts:
            values = f"from {part.low:g}" if part.high is None else f"{part.low:g} to {part.high:g}"
            figures = (str(part.num_tokens), f"{part.abs_mean:.2g}", f"{part.share:.0%}")
            rows.append((f"{part.by} {values}", *figures))
        headings = ("gap by", "tokens", "mean |r|", "share of Σ r²")
        print_table(console, headings, rows, right=range(1, 4), wide=True)
        console.print()
    if report.remainder:
        line((f"left: {report.remainder}", "yellow"))
    for note in report.open_questions:
        line(("unknown   ", "dim"), note)
    for note in report.notes:
        line(("note  ", "dim"), note)
