"""`rlctl evaluate list`: the benchmarks that `--data` knows by name."""

from __future__ import annotations

from typing import Annotated

import typer


def list_benchmarks(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned."""
    from rlctl.data.benchmarks import BENCHMARKS

    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps([asdict(each) for each in BENCHMARKS.values()], indent=2, ensure_ascii=False))
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
