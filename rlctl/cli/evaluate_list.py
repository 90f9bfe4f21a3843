"""`rlctl evaluate list`: the benchmarks that rlctl knows by name."""

from __future__ import annotations

from dataclasses import asdict

from rlctl.cli.command import AsJson, echo, print_json


def list_benchmarks(is_json: AsJson = False) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned.

    rlctl evaluate list

    rlctl evaluate list --json
    """
    from rlctl.cli.output import unwrapped
    from rlctl.prepare.benchmarks import BENCHMARKS
    from rlctl.text_table import print_table

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
        echo(each.name)
        print_table(unwrapped(), ("", ""), lines.items(), indent=2)
