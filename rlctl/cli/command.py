"""What commands share: help format, common options, shell completion, JSON output."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Request = TypeVar("Request", bound="DataclassInstance")

#: An option for a positive integer.
count_option = partial(typer.Option, min=1, metavar="N")
#: Option of every command that lists something.
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
#: Option of every command that writes a report.
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Write there.", show_default="standard output"),
]
HELP_NAMES = {"help_option_names": ["-h", "--help"]}


class _Help:
    """Mixin for help without `<bool>` after flags and with prose wrapped to the width of the terminal."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Formats the help; restores the original text, so that it can be called repeatedly."""
        given, self.help = self.help, _laid_out(self.help or "")
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.help = given

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """The context; messages about wrong arguments quote them with control characters escaped."""
        try:
            return super().make_context(*args, **extra)  # type: ignore[misc]
        except Exception as error:
            if isinstance(message := getattr(error, "message", None), str):
                error.message = visible(message)  # type: ignore[attr-defined]
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; flags show no type."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_Help, TyperCommand):
    """A command with this help format."""


class Group(_Help, TyperGroup):
    """A group of commands with this help format."""


class CommandWithSubcommands(Command):
    """A command with arguments that runs a subcommand if the first argument is the name of one."""

    #: name → function. A path with such a name must be written as `./NAME`
    subcommands: ClassVar[dict[str, Callable[..., None]]]

    @classmethod
    def of(cls, **subcommands: Callable[..., None]) -> type[CommandWithSubcommands]:
        """The class of a command with these subcommands."""
        return type(cls.__name__, (cls,), {"subcommands": subcommands})

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command, or of the subcommand if the first argument is its name."""
        if not args or args[0] not in self.subcommands:
            return super().make_context(info_name, args, parent, **extra)
        return self.subcommand(args[0]).make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)

    def subcommand(self, name: str) -> Any:
        """The Click command of a subcommand."""
        app = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=HELP_NAMES)
        app.command(name=name, cls=Command)(self.subcommands[name])
        return typer.main.get_command(app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Formats the help, then lists the subcommands."""
        super().format_help(ctx, formatter)
        echo(" Commands below this one, each with --help:")
        for name, function in self.subcommands.items():
            first_line = (function.__doc__ or "").strip().splitlines()[0]
            head = f"   {ctx.command_path} {name:<10} "
            width = shutil.get_terminal_size().columns
            echo(textwrap.fill(head + first_line, width, subsequent_indent=" " * len(head)))


def _laid_out(text: str) -> str:
    """Removes the line breaks of the source from prose; indents examples and prints them bold.

    Typer removes the indentation of a line unless the line begins with a tag.
    """
    paragraphs = [paragraph.strip() for paragraph in text.split("\n\n")]
    return "\n\n".join(
        f"[bold]  {paragraph}[/bold]"
        if paragraph.startswith(("rlctl ", "kubectl "))
        else " ".join(paragraph.split())
        for paragraph in paragraphs
    )


def request(kind: type[Request], parameters: Mapping[str, Any], **others: Any) -> Request:
    """A dataclass from those parameters of a command that have the names of its fields, and `others`."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in parameters.items() if name in names} | others)


def refuse_options(context: typer.Context, names: Sequence[str], why: str, fix: str | None = None) -> None:
    """Refuses parameters that do not apply.

    Raises:
        UsageError: one of them is given on the command line; `why` is the reason.
    """
    params: dict[str | None, Any] = {param.name: param for param in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            is_option = params[name].param_type_name == "option"
            option = params[name].opts[0] if is_option else params[name].metavar
            raise UsageError(f"{option} {why}", where=option, fix=fix)


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints text, with control characters escaped, to standard output or standard error."""
    typer.echo(visible(str(text)), err=err, nl=nl)


def as_json(document: object) -> str:
    """Indented ASCII JSON.

    Numbers that JSON cannot represent become strings, as in `metrics.jsonl`: "NaN", "Infinity", "-Infinity".
    """
    only_json = json.loads(json.dumps(document, default=str), parse_constant=str)
    return json.dumps(only_json, indent=2) + "\n"


def print_json(document: object) -> None:
    """Prints a document as JSON to standard output."""
    echo(as_json(document), nl=False)


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: presets whose names begin with the text, with their descriptions."""
    from rlctl.spec.sources import all_presets

    found = all_presets().values()
    return [(each.name, each.description) for each in found if each.name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys that begin with the text."""
    from rlctl.spec.keys import known_leaves

    return [key for key in known_leaves() if key.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """`key=` for keys that begin with the text, and such spec files in the working directory."""
    files = [str(path) for path in Path().glob("*.y*ml") if path.name.startswith(incomplete)]
    return [f"{key}=" for key in complete_key(incomplete)] + files


def complete_run(incomplete: str) -> list[str]:
    """Run directories below `runs/` whose paths begin with the text."""
    found = sorted(path.parent for path in Path("runs").glob("*/*/spec.yaml"))
    return [str(path) for path in found if str(path).startswith(incomplete)]


#: The presets of commands that train.
Presets = Annotated[
    list[str] | None,
    typer.Option(
        "--preset",
        "-p",
        metavar="NAME",
        help="A preset by name or path; several are layered left to right.",
        autocompletion=complete_preset,
    ),
]
#: The run directory of commands about one run.
RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run directory, for example runs/rlctl/run-20260101-120000.",
        autocompletion=complete_run,
    ),
]
