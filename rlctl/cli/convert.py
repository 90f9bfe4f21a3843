"""`rlctl import` and `rlctl export-config`: translate other frameworks' configurations to a spec and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.command import echo, print_json
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.convert.export import Export
    from rlctl.convert.translate import Translation


Format = Annotated[
    Literal["text", "json"], typer.Option("--format", help="Output format of the report on every key.")
]


def import_config(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A launch script (.sh), Python file, YAML or TOML.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The launch script's own arguments, $1 ….")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Framework of the file: nemo-rl, openrlhf, prime-rl, slime, trl, verl.",
            show_default="detected from launch command, classes or keys",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable that the script expects to be set."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the spec here.", show_default="printed")
    ] = None,
    format_: Format = "text",
) -> None:
    """Translate another framework's launch script or configuration into a spec.

    Reads verl, TRL, OpenRLHF, slime, prime-rl and NeMo-RL. The file is not executed. Every key is listed:
    translated with the same meaning, translated with a different one (and what differs), not supported, or
    unknown. Defaults of the framework that differ from rlctl's are written into the spec.

      rlctl import run_grpo.sh --set MODEL=Qwen/Qwen3-4B --output grpo.yaml

      rlctl import train_grpo.py --from trl --format json
    """
    from rlctl.convert.conversion_report import spec_yaml
    from rlctl.convert.source import read
    from rlctl.convert.translate import translate

    result = translate(
        read(file, framework=framework, environment=_variables(variables or []), arguments=arguments or [])
    )
    check = f"; check it with: rlctl train --spec {output} --dry-run"
    _write(result, spec_yaml(result, file.name), output, format_, check)


def export_config(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A spec file, or the name of a preset.")],
    to: Annotated[
        Literal["verl", "trl", "openrlhf"], typer.Option("--to", help="Whose configuration to write.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here.", show_default="printed")
    ] = None,
    format_: Format = "text",
) -> None:
    """Write a spec as a configuration of verl, TRL or OpenRLHF.

    Every key of the spec that differs from its default, or that is written, is listed with its translation.
    The output is a launch script for verl and OpenRLHF, and the YAML of `--config` for TRL.

      rlctl export-config my-run.yaml --to verl --output run.sh

      rlctl export-config rloo-seq-is --to trl --output trl.yaml
    """
    from rlctl.convert.export import as_text, export
    from rlctl.convert.table import table
    from rlctl.spec.load import LEFT_TO_THE_USER, load_spec

    result = export(load_spec([spec], left_open=LEFT_TO_THE_USER).spec, table(to))
    _write(result, as_text(result), output, format_)


def _variables(given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"not NAME=VALUE: {text}", where="--set", fix="for example --set N_GPUS=8")
        pairs[name] = value
    return pairs


def _write(
    result: Translation | Export, text: str, output: Path | None, format_: str, check: str = ""
) -> None:
    """Writes `text` to the file, if one is given, and prints the report; `check` follows the file's name."""
    from rlctl.cli.output import write_file
    from rlctl.convert import conversion_report

    if output is not None:
        write_file(output, text)
    if format_ == "json":
        print_json(conversion_report.document(result, text))
    else:
        echo(f"{result.table.title}, {conversion_report.summary(result)}")
        for heading, below in conversion_report.sections(result):
            echo(f"\n{heading}")
            for row in below:
                echo(f"  {row}" if isinstance(row, str) else conversion_report.as_text(row))
        echo(f"\n{text.rstrip()}" if output is None else f"{output} written{check}")
