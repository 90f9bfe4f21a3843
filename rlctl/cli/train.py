"""`rlctl train`: reads the spec, then shows it or runs it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.complete import complete_override, complete_preset, complete_run
from rlctl.errors import EnvironmentFailure, SpecError, UsageError

if TYPE_CHECKING:
    from rlctl.spec.load import LoadedSpec


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE|FILE.yaml",
            help="Single values, which override presets and files: actor.lr=1e-6. Or a spec file.",
            show_default=False,
            autocompletion=complete_override,
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            "-p",
            metavar="NAME",
            help="A preset by name or path; several are layered left to right.",
            autocompletion=complete_preset,
        ),
    ] = None,
    spec: Annotated[
        list[Path] | None,
        typer.Option(
            "--spec", "-s", metavar="FILE", help="A YAML spec file, which overrides presets; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print intervals of ρ, batch sizes, memory and changed keys; check the files; then stop.",
        ),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="With --dry-run: every key, defaults included.")
    ] = False,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="With --dry-run: plan for 1xh100, 8xh100, 2x8h100, 1xh200 or 1x24gb, not this machine.",
        ),
    ] = None,
    print_command: Annotated[
        bool,
        typer.Option(
            "--print-command",
            help="Print how torchrun, DeepSpeed's launcher and Slurm start this run on its nodes; then stop.",
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of the live panel, as in a log file.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN_DIR",
            help="Continue a run from its last checkpoint, with its own spec.",
            autocompletion=complete_run,
        ),
    ] = None,
) -> None:
    """Train a policy.

    Without arguments it trains the built-in tiny model on addition, with no download.

      rlctl train --preset rloo-seq-is

      rlctl train -p rloo-seq-is model.path=Qwen/Qwen2.5-0.5B data.train_files=data/gsm8k/train.parquet

      rlctl train fixed.yaml

      rlctl train --resume runs/rlctl/rloo-seq-is-20260101-120000

    Every key: `rlctl schema`. Presets: `rlctl presets list`.
    """
    from rlctl.spec.load import load_spec

    given = list(overrides or [])
    values = [item for item in given if "=" in item or not item.endswith((".yaml", ".yml"))]
    files = [*(spec or []), *(Path(item) for item in given if item not in values)]
    if resume is not None:
        files.insert(0, _spec_of_run(resume, preset))
    loaded = load_spec(list(preset or []), files, values)
    if resume is not None and not (spec or given):
        loaded.warnings.clear()  # shown when the run started
    if dry_run:
        from rlctl.cli.dry_run import print_dry_run

        raise typer.Exit(print_dry_run(loaded, show_all=show_all, machine=machine))
    if machine is not None:
        fix = "add --dry-run; without it the run starts on this machine"
        raise UsageError("--machine only plans a run", where="--machine", fix=fix)
    if print_command:
        from rlctl.cli.print_command import print_commands

        options = {"--preset": preset, "--spec": spec, "--resume": [resume] if resume else []}
        print_commands(loaded.spec, [*_as_given(options), *given])
        return
    if plain:
        os.environ["RLCTL_PLAIN"] = "1"  # ranks in other processes read it too
    raise typer.Exit(_start(loaded, resume))


def _start(loaded: LoadedSpec, resume: Path | None) -> int:
    """Train; heavy packages are imported here."""
    from rlctl.cli.messages import print_problems
    from rlctl.spec.machine import this_machine
    from rlctl.spec.model_size import model_size
    from rlctl.spec.placement import Placement
    from rlctl.train.preflight import check_disk, check_inputs

    found = [*loaded.warnings, *check_inputs(loaded.spec)]
    if any(problem.severity == "error" for problem in found):
        raise SpecError(found)
    print_problems(found)
    placement = Placement(loaded.spec, model_size(loaded.spec.model), this_machine())
    for problem in [*placement.problems(), *check_disk(loaded.spec)]:
        if problem.severity == "error":
            raise EnvironmentFailure(problem.what, where=problem.key, fix=problem.fix)
        print_problems([problem])

    from rlctl.cli.train_output import announcing, print_summary
    from rlctl.train.start import start_run

    with announcing() as announce:
        run_dir, exit_code = start_run(loaded.spec, resume=resume, announce=announce)
    print_summary(run_dir)
    return exit_code


def _as_given(options: Mapping[str, Iterable[object] | None]) -> list[str]:
    """Converts options back to words of a command line."""
    return [word for name, values in options.items() for value in values or () for word in (name, str(value))]


def _spec_of_run(run_dir: Path, presets: list[str] | None) -> Path:
    """Path of the resolved spec of a run to resume.

    Raises:
        UsageError: no such run, or presets are given, which the run's spec would override silently.
    """
    from rlctl.spec.load import spec_file_of

    path = spec_file_of(run_dir)
    if presets:
        fix = "leave --preset out; change single values with key=value"
        raise UsageError("a resumed run continues with its own spec", where=str(path), fix=fix)
    return path
