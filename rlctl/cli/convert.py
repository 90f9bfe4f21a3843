"""`rlctl import`: translates another framework's configuration to a spec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import Format, as_json, echo, output_option
from rlctl.errors import UsageError


def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A launch script (.sh), Python file or YAML.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The launch script's own arguments, $1 ….")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Framework of the file: openrlhf, slime, trl, verl.",
            show_default="detected from launch command, classes or keys",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A variable that the script expects to be set."),
    ] = None,
    output: Annotated[
        Path | None, output_option(metavar="FILE", help="Write the spec there.", show_default="printed")
    ] = None,
    output_format: Format = "text",
) -> None:
    """Translate another framework's launch script into a spec.

    Reads verl, TRL, OpenRLHF and slime. The file is not executed. Every key is listed:
    translated with the same meaning, translated with a different one (and what differs), not supported, or
    unknown. What the file does not determine is ???. Defaults of the framework that differ from rlctl's
    are written into the spec. Functions of a script that an import of it would not give without training
    are copied to a file beside the spec.

      rlctl import run_grpo.sh --set MODEL=Qwen/Qwen3-4B --output grpo.yaml

      rlctl import train_grpo.py --from trl --format json
    """
    from rlctl.cli.output import write_file
    from rlctl.convert import conversion_report
    from rlctl.convert.source import read
    from rlctl.convert.translate import translate

    functions = output and output.with_name(f"{output.stem}_functions.py")
    result = translate(
        read(
            file,
            framework=framework,
            environment=_variables(variables or []),
            arguments=arguments or [],
            functions=functions,
        )
    )
    text = conversion_report.spec_yaml(result, file.name)
    if output is not None:
        write_file(output, text)
        if result.functions:
            write_file(*result.functions)
    if output_format == "json":
        echo(as_json(conversion_report.document(result, text)), nl=False)
        return
    echo(f"{result.table.title}, {conversion_report.summary(result)}")
    for heading, below in conversion_report.sections(result):
        echo(f"\n{heading}")
        for row in below:
            echo(f"  {row}" if isinstance(row, str) else conversion_report.as_text(row))
    check = f"check it with: rlctl train --spec {output} --dry-run"
    if result.functions and output is None:
        echo(f"\n{result.functions[0]}, which --output writes too\n{result.functions[1]}")
    both = f"{output} and {result.functions[0].name}" if result.functions else output
    echo(f"\n{text.rstrip()}" if output is None else f"{both} written; {check}")


def _variables(given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"not NAME=VALUE: {text}", where="--set", fix="for example --set N_GPUS=8")
        pairs[name] = value
    return pairs
