"""`rlctl reward`: checks correctness and speed of a reward before training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.command import Format, Out, Trust, count_option, spec_named

if TYPE_CHECKING:
    from rlctl.reward.trial import Trial
    from rlctl.terminal import Console


def reward(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SPEC_OR_FUNCTION",
            help="A run's spec (YAML, run directory or preset), a grader's name, or file.py:function.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(metavar="FILE", help="Rows: any file that `prepare-data` reads; may be repeated."),
    ],
    limit: Annotated[
        int | None,
        count_option("--limit", "-n", help="Only the first rows.", show_default="all"),
    ] = None,
    fail_on: Annotated[
        Literal["error", "disagreement", "never"],
        typer.Option(help="Exit with code 3 on grader errors, or on disagreements too."),
    ] = "never",
    trust: Trust = False,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Try a reward on answers with known scores, before training.

    Reports disagreements, failures and slow gradings.

    As a response, the ground truth of a row should score 1, the ground truth with a changed number 0, and an
    empty answer 0. Tests for programs are run only on empty answers. No policy is loaded. `rlctl evaluate
    --regrade` tries a reward on stored responses.

    rlctl reward maths --data data/gsm8k/train.parquet

    rlctl reward rewards.py:score --data train.parquet --limit 500 --fail-on error
    """
    from rlctl.data.prompts import messages_of
    from rlctl.prepare.data_files import read_any
    from rlctl.prepare.needs import check_needs
    from rlctl.registry import GRADERS
    from rlctl.reward.protocol import Sample
    from rlctl.reward.trial import try_reward

    spec = spec_named(what, GRADERS, trust=trust)
    read = read_any(data, reward=spec.reward, continue_final_message=True)[:limit]
    check_needs(read, spec.reward)
    rows = {
        row.where: Sample(
            response="",
            ground_truth=row.ground_truth,
            prompt=row.prompt_text,
            data_source=row.data_source,
            extra_info=row.extra,
            messages=messages_of(row),
        )
        for row in read
    }
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    from rlctl.cli.output import counting, write_report
    from rlctl.reward.build import build_terms

    terms = {label: scorer for label, (_, scorer) in build_terms(spec.reward).items()}
    try:
        graders = {term.label: term.name for term in spec.reward.all_terms}
        with counting("grading", MofNCompleteColumn(), TimeRemainingColumn()) as count:
            trial = try_reward(terms, graders, rows, count)
    finally:
        for scorer in terms.values():
            scorer.close()
    write_report(output_format, out, partial(_print, trial=trial), trial.as_document)
    is_bad = bool(trial.num_errors or (fail_on == "disagreement" and trial.num_disagreements))
    if fail_on != "never" and is_bad:
        raise typer.Exit(3)


def _print(console: Console, trial: Trial) -> None:
    from rich.text import Text

    from rlctl.text_table import print_table

    rows = []
    for counts in trial.all_counts:
        agree = f"{counts.num_agreeing / counts.num_compared:.1%}" if counts.num_compared else "—"
        names = (counts.kind, counts.data_source, counts.term)
        rows.append((*names, f"{counts.num:,}", agree, f"{counts.num_errors:,}"))
    headings = ("responses", "source", "reward", "tried", "as expected", "errors")
    print_table(console, headings, rows, right=range(3, 6))
    for disagreement in [
        *trial.examples,
        *(disagreement for disagreement in trial.disagreements if disagreement not in trial.examples),
    ]:
        is_right = disagreement not in trial.disagreements
        expects = (
            f"{disagreement.got:g}, as expected"
            if is_right
            else f"expected {disagreement.expected:g}, got {disagreement.got:g}"
        )
        place = f"  {disagreement.term}, {disagreement.kind}, {disagreement.where}"
        console.print(
            Text.assemble("\n", (expects, "green" if is_right else "bold red"), place), soft_wrap=True
        )
        console.print(Text(f"  ground truth  {disagreement.ground_truth!r}"), soft_wrap=True)
        console.print(Text(f"  response ends {disagreement.response_end!r}"), soft_wrap=True)
    if trial.num_disagreements > len(trial.disagreements):
        console.print(f"\n… and {trial.num_disagreements - len(trial.disagreements):,} more disagreements")
    if trial.errors:
        console.print(Text("\nthe first error", style="bold red"))
        console.print(Text(trial.errors[0]), soft_wrap=True)
    if trial.durations:
        times = trial.durations
        shown = ", ".join(f"{name} {1e3 * times[name]:.2f}" for name in ("mean", "p50", "p99", "max"))
        console.print(f"\nms per call: {shown}", markup=False)
