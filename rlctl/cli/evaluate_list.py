"""`rlctl evaluate list`: the benchmarks that rlctl knows by name."""

from __future__ import annotations

from dataclasses import asdict

import typer

from rlctl.cli.command import AsJson, print_json


def list_benchmarks(is_json: AsJson = False) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned.

    rlctl evaluate list

    rlctl evaluate list --json
    """
    from rlctl.prepare.benchmarks import BENCHMARKS

    if is_json:
        print_json([asdict(each) for each in BENCHMARKS.values()])
        return
    for each in BENCHMARKS.values():
        choices = "its choices, " if each.recipe == "multiple-choice" else ""
        lines = {
            "questions": f"{each.num_questions:,} ({each.split} split)",
            "source": f"{each.dataset}, {each.file}",
            "revision": each.revision,
            "prompt": f"the question, {choices}then: {each.instruction}",
            "grader": each.grader,
        }
        typer.secho(each.name, bold=True)
        typer.echo("\n".join(f"  {name:<10} {text}" for name, text in lines.items()))
