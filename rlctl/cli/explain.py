"""`rlctl explain`: describes keys of the spec, metrics and parts, searches them, and writes the schema."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.command import Out, as_json, complete_key

if TYPE_CHECKING:
    from rlctl.terminal import Console


def explain(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|WORDS",
            help="A spec key (actor.lr, or lr), a section (rollout), a metric (rollout_corr/kl), or the "
            "name of a loss, estimator, weight, criterion, grader, engine, tracker or rule (grpo). "
            "Other words are searched in all of them. Without words: the sections of a spec.",
            autocompletion=complete_key,
        ),
    ] = None,
    output_format: Annotated[
        Literal["text", "json", "markdown", "schema"],
        typer.Option(
            "--format",
            help="markdown: a table of keys; schema: JSON Schema, for the YAML support of editors.",
        ),
    ] = "text",
    out: Out = None,
) -> None:
    """Explain a key, a section, a metric or a part; or search.

    rlctl explain algorithm.rollout_correction.rollout_is

    rlctl explain rollout_corr/rollout_is_eff_sample_size

    rlctl explain lora

    rlctl explain rejection threshold

    rlctl explain actor --format markdown

    rlctl explain --format schema --output rlctl.schema.json
    """
    from rlctl.cli.explain_entries import entries_of
    from rlctl.cli.output import write_report
    from rlctl.run_spec.key_table import key_table, schema_document

    name = " ".join(word.lstrip("-+~").partition("=")[0] for word in words or ()) or None
    entries = entries_of(name) if output_format in {"text", "json"} else []
    write_report(
        output_format,
        out,
        partial(_print, entries=entries),
        lambda: entries,
        markdown=lambda: key_table(name),
        schema=lambda: as_json(schema_document(name)),
    )


def _print(console: Console, entries: list[dict[str, Any]]) -> None:
    """Prints what each entry says; of entries with no more than a meaning, a table."""
    from rich.text import Text

    from rlctl.cli.output import print_indented
    from rlctl.errors import visible
    from rlctl.text_table import print_table

    if all(entry.keys() == {"name", "meaning"} for entry in entries):
        print_table(console, ("", ""), [(entry["name"], entry["meaning"]) for entry in entries])
        return
    for entry in entries:
        console.print(entry["name"], style="bold", markup=False, soft_wrap=True)
        for heading, text in entry.items():
            for index, line in enumerate(text if isinstance(text, list) else [text]):
                if heading != "name":
                    print_indented(
                        Text(visible(line)), 2, console, head=Text(f"{'' if index else heading:<9}", "dim")
                    )
        console.print()
