"""What commands share: help format, common options, shell completion, JSON output."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from rlctl.registry import Registry
    from rlctl.run_spec.run_spec import RunSpec

Request = TypeVar("Request", bound="DataclassInstance")

#: Where runs are, as seen from the working directory.
RUNS = Path("runs")
#: An option for a positive integer.
count_option = partial(typer.Option, min=1, metavar="N")


def default_option(metavar: str, help: str, default: str, *names: str, **more: Any) -> Any:  # noqa: A002
    """An option whose default, in words, depends on other things; `more` as in `typer.Option`."""
    return typer.Option(*names, metavar=metavar, help=help, show_default=default, **more)


#: An option for the file or directory that a command writes.
output_option = partial(typer.Option, "--output", "-o", "--out")
#: Option of every command whose results can be read by programs.
Format = Annotated[
    Literal["text", "json"], typer.Option("--format", help="How to print the result; --json: as JSON.")
]
#: Option of commands whose results can also be a page.
PageFormat = Annotated[
    Literal["text", "json", "html"], typer.Option("--format", help="Text, JSON, or a self-contained page.")
]
#: Option of every command that writes a report.
Out = Annotated[
    Path | None, output_option(metavar="FILE", help="Write there.", show_default="standard output")
]
#: Settings of every command: help in plain text, because Rich takes longer to import than all else together.
PLAIN: dict[str, Any] = {
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 102},
}


class _Help:
    """Mixin for help with prose wrapped to the width of the terminal and examples that can be pasted."""

    help: str | None

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Formats the description. Lines of an example that are too long end with a backslash."""
        for paragraph in (self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                text = " ".join(paragraph.split())
                if text.startswith(("rlctl ", "kubectl ")):
                    text = re.sub(r"( --?[a-z][\w-]*) (?=[^-])", "\\1\N{NO-BREAK SPACE}", text)
                    lines = textwrap.wrap(
                        text, formatter.width - 6, break_long_words=False, break_on_hyphens=False
                    )
                    text = " \\\n        ".join(lines).replace("\N{NO-BREAK SPACE}", " ")
                    formatter.write(f"    {text}\n")
                else:
                    formatter.write_text(text)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """The context; messages about wrong arguments quote them with control characters escaped."""
        try:
            return super().make_context(*args, **extra)  # type: ignore[misc]
        except Exception as error:
            message = getattr(error, "message", None)
            if isinstance(message, str):
                error.message = visible(message)  # type: ignore[attr-defined]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Formats arguments, without Python's names of their types, and options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            name, text = param.get_help_record(ctx) or ("", "")
            is_argument = param.param_type_name == "argument"
            if name:
                row = (param.metavar or name if is_argument else name, text)
                sections["Arguments" if is_argument else "Options"].append(row)
        _write(formatter, sections)


class Command(_Help, TyperCommand):
    """A command with this help format, and `--json` as a short form of `--format json`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; words after `--` are no options."""
        end = args.index("--") if "--" in args else len(args)
        words = ["--format=json" if word == "--json" else word for word in args[:end]]
        return super().parse_args(ctx, words + args[end:])


class WordsCommand(Command):
    """A command whose arguments are words: an unknown option is the name of one, such as `--init_kl_coef`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments; next to `--format` an unknown option is a mistake."""
        ctx.ignore_unknown_options = not any(word.startswith("--format") for word in args)
        return super().parse_args(ctx, args)


class SpecCommand(Command):
    """A command that takes keys of the spec; the error of an unknown option names the key that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments.

        Raises:
            UsageError: an unknown option is a key of the spec.
        """
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            option = str(getattr(error, "option_name", ""))
            if not hasattr(error, "possibilities"):  # the option exists, but its value is missing
                raise
            from rlctl.run_spec.keys import advice_for, known_leaves

            name = option.lstrip("-").replace("-", "_")
            is_key = any(f".{key}".endswith(f".{name}") for key in known_leaves())
            if (error.possibilities and not is_key) or not (advice := advice_for(name)):
                raise
            after = " ".join([*args, ""]).partition(option)[2]
            value = re.match(r"[= ]?([^\s-]\S*)", after)
            given = value[1] if value else "VALUE"
            fix = re.sub("`([a-z_.]+)`", lambda key: f"`{key[1]}={given}`", advice, count=1)
            message = f"no such option: {option}"
            raise UsageError(message, fix=f"{fix} Keys of the spec take no dashes") from None


class Group(_Help, TyperGroup):
    """A group of commands with this help format, listed by the panel in which each is registered."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Formats the commands with the first paragraphs of their help, then the options."""
        _write(formatter, self._panels())
        super().format_options(ctx, formatter)

    def _panels(self) -> dict[str, list[tuple[str, str]]]:
        """Heading → names of commands and the first paragraphs of their help."""
        panels: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            row = (name.ljust(width), _first_paragraph(command.help))
            panels.setdefault(str(getattr(command, "rich_help_panel", None) or "Commands"), []).append(row)
        return panels


class Root(Group):
    """The group of all commands: its help fits one screen, so the epilog names the few options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Formats the commands under their headings, without blank lines between these."""
        formatter.write_paragraph()
        for heading, rows in self._panels().items():
            formatter.write(f"{heading}:\n")
            with formatter.indentation():
                formatter.write_dl(rows)


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
        app = typer.Typer(add_completion=False, **PLAIN)
        app.command(name=name, cls=Command)(self.subcommands[name])
        return typer.main.get_command(app)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Formats the options, then lists the subcommands."""
        super().format_options(ctx, formatter)
        rows = [(name, _first_paragraph(each.__doc__)) for name, each in self.subcommands.items()]
        _write(formatter, {"Commands below this one, each with --help": rows})


def _write(formatter: Any, sections: Mapping[str, list[tuple[str, str]]]) -> None:
    """Writes lists of names and their meanings under headings; empty ones are left out."""
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().partition("\n\n")[0].split())


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


def complete_preset(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: presets whose names begin with the text, with their descriptions."""
    from rlctl.run_spec.sources import all_presets

    found = all_presets().values()
    return [(each.name, each.description) for each in found if each.name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Keys that begin with the text."""
    from rlctl.run_spec.keys import known_leaves

    return [key for key in known_leaves() if key.startswith(incomplete)]


def complete_override(incomplete: str) -> list[str]:
    """`key=` for keys that begin with the text, and such spec files in the working directory."""
    files = [str(path) for path in Path().glob("*.y*ml") if path.name.startswith(incomplete)]
    return [f"{key}=" for key in complete_key(incomplete)] + files


def complete_run(incomplete: str) -> list[str]:
    """Run directories below `runs/` whose paths begin with the text."""
    found = sorted(path.parent for path in RUNS.glob("*/*/spec.yaml"))
    return [str(path) for path in found if str(path).startswith(incomplete)]


def run_path(name: str) -> Path:
    """The run directory with this path, or with this text in its name."""
    from rlctl.track.open_run import run_named

    return run_named(name, RUNS)


def run_or_model(name: str) -> str:
    """The run directory with this name, or the name of a model, of which a run's name may have a part."""
    from rlctl.track.open_run import run_named

    path = run_named(name, RUNS, whole=True)
    return str(path) if path.is_dir() else name


def spec_named(
    name_or_path: str, parts: Registry, overrides: Sequence[str] = (), *, trust: bool = False
) -> RunSpec:
    """The spec that `what` names: a file, run directory or preset; or a default spec with this part.

    Raises:
        UsageError: it is neither, or a run directory with code that this user has not allowed.
    """
    from rlctl.run_spec.load import LEFT_TO_THE_USER, RUN_SPEC_FILE, load_spec
    from rlctl.run_spec.sources import all_presets

    path = Path(name_or_path)
    if name_or_path in set(parts) or ":" in name_or_path:
        return load_spec(
            overrides=[f"{parts.key}={name_or_path}", *overrides], left_open=LEFT_TO_THE_USER
        ).spec
    if (path / RUN_SPEC_FILE).is_file():
        from rlctl.track.trust import require_permission_of_run

        require_permission_of_run(path, trust=trust)
        path /= RUN_SPEC_FILE
    if path.is_file() or name_or_path in all_presets():
        return load_spec([str(path)], overrides=overrides, left_open=LEFT_TO_THE_USER).spec
    fix = f"name a YAML file, a run directory, a preset, file.py:NAME, or {', '.join(parts)}"
    article = "an" if parts.kind[0] in "aeiou" else "a"
    raise UsageError(f"neither a spec nor {article} {parts.kind}", where=name_or_path, fix=fix)


#: Permission of this user for the code that a directory names.
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run the code that the directory names, although no run of yours has written it."
    ),
]
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
#: A step of a run, see `rlctl.track.open_run.chosen_step`.
Step = Annotated[
    str | None,
    typer.Option(
        "--step",
        "-s",
        metavar="N|best",
        help="Which step; best: of the best validation.",
        show_default="the newest",
    ),
]
#: Severity of findings from which a command fails.
FailOn = Annotated[
    Literal["warning", "critical"] | None,
    typer.Option(help="Exit with 3 if a finding is at least this severe.", show_default="never"),
]
#: Option of commands with a live panel.
Plain = Annotated[bool, typer.Option("--plain", help="One line per step instead of the live panel.")]
#: Option of commands that sample.
SamplingSeed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of sampling.")]
#: Numbers k of pass@k, of commands about evaluations.
PassAtK = Annotated[
    str | None,
    default_option("K,…", "The k of pass@k.", "1,4,8, up to the number of responses", "--k"),
]
#: How arguments and options read a run directory.
RUN: dict[str, Any] = {"metavar": "RUN", "autocompletion": complete_run, "parser": run_path}
_RUN_HELP = "A run directory, or a part of its name that no other run below runs/ has."
#: The run directory of commands about one run, and those of commands about several.
RunDirectory = Annotated[Path, typer.Argument(help=_RUN_HELP, **RUN)]
RunDirectories = Annotated[list[Path], typer.Argument(help=_RUN_HELP, **RUN)]
