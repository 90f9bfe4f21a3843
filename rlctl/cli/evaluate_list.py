"""`rlctl evaluate list`: the benchmarks that rlctl knows by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlctl.cli.command import Format, Out

if TYPE_CHECKING:
    from rlctl.terminal import Console


def list_benchmarks(output_format: Format = "text", out: Out = None) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned.

    rlctl evaluate list

    rlctl evaluate list --format json
    """
    from rlctl.cli.output import write_report
    from rlctl.prepare.benchmarks import all_benchmarks

    write_report(output_format, out, _print, lambda: [asdict(each) for each in all_benchmarks().values()])


def _print(console: Console) -> None:
    from rlctl.prepare.benchmarks import all_benchmarks
    from rlctl.text_table import print_table

    for each in all_benchmarks().values():
        choices = "its choices, " if each.recipe == "multiple-choice" else ""
        lines = {
            "questions": f"{each.num_questions:,} ({each.split} split)",
            "source": f"{each.dataset}, {each.file}",
            "revision": each.revision,
            "prompt": f"the question, {choices}then: {each.instruction}",
            "grader": each.grader,
        }
        console.print(each.name, style="bold", markup=False)
        print_table(console, ("", ""), lines.items(), indent=2)
