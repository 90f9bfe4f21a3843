"""`rlctl`: registration of the commands. Only this module prints errors and exits.

Command modules import heavy packages inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from rlctl.cli import environment, prepare_data, presets
from rlctl.cli.command import (
    PLAIN,
    Command,
    CommandWithSubcommands,
    Group,
    Root,
    SpecCommand,
    WordsCommand,
    echo,
)
from rlctl.cli.convert import import_config
from rlctl.cli.diagnose import diagnose
from rlctl.cli.diagnose_mismatch import mismatch
from rlctl.cli.doctor import doctor
from rlctl.cli.evaluate import evaluate
from rlctl.cli.evaluate_compare import compare as compare_evaluations
from rlctl.cli.evaluate_list import list_benchmarks
from rlctl.cli.explain import explain
from rlctl.cli.export import export
from rlctl.cli.report import report
from rlctl.cli.reward import reward
from rlctl.cli.runs import runs
from rlctl.cli.samples import samples
from rlctl.cli.train import train
from rlctl.cli.watch import watch
from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, UsageError, memory_failure
from rlctl.extras import missing_package

#: Error numbers of a disk that is full, or of a place that cannot be written, which are no bugs.
_DISK_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
}
#: Former spellings of commands → the words that replace them.
_RENAMED = {
    ("schema",): ["explain", "--format", "schema"],
    ("reward", "test"): ["reward"],
    ("init",): ["presets", "show"],
}
#: Command, or command and option, that was removed → what to do instead.
_REMOVED = {
    "sweep": "start `rlctl train` for each setting in a loop (docs/how-to/runs.md, “Many runs”)",
    "diagnose compare": "`rlctl diagnose A B --format html --out FILE` draws both runs in each plot",
    "export --dtype": 'AutoModelForCausalLM.from_pretrained(OUT, dtype="bfloat16").save_pretrained(…)',
    "prepare-data --placeholders": "rows without an answer are never written",
    "reward --responses": "grade an evaluation's samples again: `rlctl evaluate DIR --regrade --reward …`",
}

app = typer.Typer(
    name="rlctl",
    help=(
        "Train language models with reinforcement learning. First, with no download:\n\n"
        "rlctl train --preset rloo-seq-is"
    ),
    epilog=(
        "rlctl COMMAND --help shows examples. Options: --version, --help, and for completion in your shell "
        "--install-completion, --show-completion."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Root,
    **PLAIN,
)
_EVALUATE = CommandWithSubcommands.of(compare=compare_evaluations, list=list_benchmarks)
_DIAGNOSE = CommandWithSubcommands.of(mismatch=mismatch)
#: Heading in the help → (name, function or app of subcommands, class).
_COMMANDS: dict[str, list[tuple[str, Any, Any]]] = {
    "Train": [
        *(("train", train, SpecCommand), ("reward", reward, Command)),
        *(("environment", environment.app, Group), ("prepare-data", prepare_data.app, Group)),
    ],
    "Look at runs": [
        *(("runs", runs, Command), ("watch", watch, Command), ("samples", samples, Command)),
        *(("report", report, Command), ("diagnose", diagnose, _DIAGNOSE)),
    ],
    "Use the model": [("evaluate", evaluate, _EVALUATE), ("export", export, Command)],
    "Look things up": [
        *(("presets", presets.app, Group), ("explain", explain, WordsCommand)),
        *(("import", import_config, Command), ("doctor", doctor, Command)),
    ],
}
for panel, commands in _COMMANDS.items():
    for name, command, kind in commands:
        if isinstance(command, typer.Typer):
            for each in command.registered_commands:
                each.cls = Command
            app.add_typer(command, name=name, cls=kind, rich_help_panel=panel)
        else:
            app.command(name, cls=kind, rich_help_panel=panel)(command)


def _version(is_asked: bool) -> None:
    if is_asked:
        from rlctl.track.run_dir import version_of

        echo(f"rlctl {version_of('rlctl') or '(not installed: running from a checkout)'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of `rlctl` without a command; the help text is that of the app."""


def main() -> None:
    """Entry point of the `rlctl` command."""
    _open_closed_streams()
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else each retry of a download is a warning
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open closed standard streams as /dev/null, so that no file of the run gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open to the end
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream in (sys.stdout, sys.stderr):  # on an ASCII terminal print escapes instead of raising an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raises an exception, so that temporary files and processes are cleaned up.

    Ends at once during an import, because an exception crashes extensions that are being initialised, and on
    a second signal, because an exception in a destructor is ignored.
    """
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, lambda number, _: os._exit(128 + number))
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def run(arguments: list[str]) -> int:
    """Run one command line. All errors are printed here and converted to an exit code.

    Returns:
        0 ok, 1 failed at run time, 2 wrong usage or spec, 3 findings, 4 environment, 130 or 143 interrupted.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            try:
                Path.cwd()
            except FileNotFoundError:
                message = "the working directory no longer exists"
                fix = "cd into another directory"
                raise EnvironmentFailure(message, fix=fix) from None
            for old, new in _RENAMED.items():
                if tuple(arguments[: len(old)]) == old:
                    echo(f"note: `rlctl {' '.join(old)}` is now `rlctl {' '.join(new)}`", err=True)
                    arguments = [*new, *arguments[len(old) :]]
            options = {argument.partition("=")[0] for argument in arguments}
            for removed, instead in _REMOVED.items():
                command, dashes, option = removed.partition(" --")
                words = command.split()
                if arguments[: len(words)] == words and (not option or f"{dashes[1:]}{option}" in options):
                    raise UsageError(f"`rlctl {removed}` no longer exists", fix=instead)
            app(args=arguments, prog_name="rlctl")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        failure = _failure_of(error)
        if failure:
            from rlctl.cli.output import print_error

            print_error(failure)
            return failure.exit_code
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = f": {str(error.filename)[:200]}" if error.filename else ""
            echo(f"error: {error.strerror}{where}", err=True)
            return 2 if error.errno == errno.ENAMETOOLONG else 4
        _report_bug(error)
        return 1
    return 0


def _failure_of(error: Exception) -> RlctlError | None:
    """The failure to print; None: another error of the disk, of user code, or a bug."""
    return error if isinstance(error, RlctlError) else missing_package(error) or memory_failure(error)


def _show_warning(
    otherwise: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any
) -> None:
    """Prints a warning about an installed package as text, others with the line of code that gave it."""
    from rlctl.registry import PartWarning

    if issubclass(category, PartWarning):
        echo(f"warning: {message}", err=True)
    else:
        otherwise(message, category, *where)


def _report_bug(error: Exception) -> None:
    """Prints what failed, in rlctl or in the user's code, and writes the traceback to a file."""
    import tempfile
    import traceback

    from rlctl.user_code import line_in_user_code

    text = "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "w", prefix="rlctl-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    line = line_in_user_code(error)
    if line:
        from rlctl.cli.output import print_error

        fix = f"correct the function; the traceback is in {file.name}"
        print_error(RunFailure(f"{type(error).__name__}: {error}", where=line, fix=fix))
        return
    echo(f"error: {type(error).__name__}: {error}", err=True)
    echo(f"  This is a bug in rlctl. The traceback is in {Path(file.name)}", err=True)
