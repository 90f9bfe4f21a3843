"""`rlctl train`: reads the spec, then shows it or runs it; output before and after the live panel."""

from __future__ import annotations

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.command import (
    RUN,
    Format,
    Plain,
    Presets,
    Trust,
    complete_override,
    complete_preset,
    echo,
)
from rlctl.errors import EnvironmentFailure, SpecError, UsageError

if TYPE_CHECKING:
    from rlctl.run_spec.flags import Flags
    from rlctl.run_spec.load import LoadedSpec
    from rlctl.terminal import Console


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE|FILE.yaml",
            help="Single values, which override presets and files: actor.lr=1e-6. Or a spec file.",
            autocompletion=complete_override,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model to train: a directory, a hub id, or the preset of a model (smollm2-135m).",
            autocompletion=complete_preset,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Training prompts, as data.train_files; may be repeated."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A grader (maths) or your function (file.py:score). Several: NAME=WEIGHT, repeated.",
        ),
    ] = None,
    preset: Presets = None,
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
            metavar="NAME",
            help="With --dry-run: plan for 8xh100, 2x8h100, 1x24gb or another number of GPUs and card "
            "(4xa100), not for this machine.",
        ),
    ] = None,
    mean_response: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|RUN",
            help="With --dry-run: mean length of responses, or a run whose last steps have it.",
        ),
    ] = None,
    output_format: Format = "text",
    print_command: Annotated[
        bool,
        typer.Option(
            "--print-command",
            help="Print how torchrun and Slurm start this run on its nodes; then stop.",
        ),
    ] = False,
    prove_sync: Annotated[
        bool,
        typer.Option(
            "--prove-sync",
            help="Start model and engines, prove that weight syncs reach every replica; then stop.",
        ),
    ] = False,
    plain: Plain = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue a run, given by its directory or a part of its name, with its own spec.", **RUN
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Train a policy.

    Without arguments it trains the built-in tiny model on addition, with no download. With --model, --data
    and --reward it chooses what else a run needs, and prints it; every value can be set.

      rlctl train --model smollm2-135m --data sums.parquet --reward maths

      rlctl train --preset rloo-seq-is

      rlctl train -p rloo-seq-is model.path=Qwen/Qwen2.5-0.5B data.train_files=data/gsm8k/train.parquet

      rlctl train fixed.yaml

      rlctl train --resume runs/rlctl/rloo-seq-is-20260101-120000

    Every key: `rlctl explain`. Presets: `rlctl presets list`.
    """
    from rlctl.run_spec.flags import Flags
    from rlctl.run_spec.load import spec_file_of

    arguments = list(overrides or [])
    values = [item for item in arguments if "=" in item or not item.endswith((".yaml", ".yml"))]
    files = [*(spec or []), *(Path(item) for item in arguments if item not in values)]
    flags = Flags(model, tuple(data or ()), tuple(reward or ()))
    if resume is not None:
        files.insert(0, spec_file_of(resume))
        _may_resume(resume, files[0], values, trust=trust, preset=preset, flags=flags)
    elif trust:
        message = "a new run executes what this command names"
        raise UsageError(message, where="--trust", fix="leave it out, or add --resume RUN")
    fetch = not (dry_run or print_command)
    try:
        loaded = _loaded(flags, list(preset or []), files, values, machine, fetch=fetch)
    except SpecError as error:
        from rlctl.train.first_row import with_problems_of_files

        raise (error if print_command else with_problems_of_files(error)) from None
    if resume is not None:
        from rlctl.train.start import changes_of

        changes_of(resume, loaded.spec)
        if not (spec or arguments):
            loaded.warnings.clear()  # shown when the run started
    if dry_run:
        from rlctl.cli.dry_run import PlanOptions, print_dry_run

        options = PlanOptions(
            show_all=show_all,
            machine=machine,
            mean_response=mean_response,
            resumed=resume,
            output_format=output_format,
        )
        raise typer.Exit(print_dry_run(loaded, options))
    _refuse_options_of_plans(machine, mean_response, output_format)
    if print_command:
        from rlctl.cli.print_command import print_commands
        from rlctl.track.trust import code_in, values_of

        words = [word for name in preset or () for word in ("--preset", name)]
        words += flags.words()
        words += [word for file in spec or () for word in ("--spec", str(file))]
        if resume:  # the other nodes may lack the key that has signed the run
            words += ["--resume", str(resume), *(["--trust"] if code_in(values_of(loaded.spec)) else [])]
        print_commands(loaded.spec, [*words, *arguments])
        return
    if plain:
        os.environ["RLCTL_PLAIN"] = "1"  # ranks in other processes read it too
    if prove_sync and resume is not None:
        message = "--prove-sync starts a run's engines; it cannot resume one"
        raise UsageError(message, where="--prove-sync", fix=f"write {files[0]} instead of --resume")
    raise typer.Exit(_start(loaded, resume, trains=not prove_sync))


def _refuse_options_of_plans(
    machine: str | None, mean_response: str | None, output_format: Literal["text", "json"]
) -> None:
    """Options that only --dry-run reads are mistakes where a run starts (UsageError)."""
    given = {
        "--machine": machine is not None,
        "--mean-response": mean_response is not None,
        "--format json": output_format == "json",
    }
    for option in (name for name, is_given in given.items() if is_given):
        fix = "add --dry-run; without it the run starts on this machine"
        raise UsageError(f"{option} only plans a run", where=option, fix=fix)


def _start(loaded: LoadedSpec, resume: Path | None, *, trains: bool) -> int:
    """Train, or only prove the weight sync; heavy packages are imported here."""
    from rlctl.cli.output import print_problems
    from rlctl.run_spec.keys import value_of
    from rlctl.run_spec.machine import this_machine
    from rlctl.run_spec.model_size import model_size
    from rlctl.run_spec.placement import Placement
    from rlctl.train.first_row import check_first_row
    from rlctl.train.preflight import check_disk, check_inputs, has_errors

    for key, origin in loaded.origins.items():
        if origin.layer == "inferred":
            echo(f"{key}={value_of(loaded.spec, key)}  ({origin.name})", err=True)
    problems = [*loaded.warnings, *check_inputs(loaded.spec)]
    if resume is None and os.environ.get("RANK", "0") == "0":
        problems += check_first_row(loaded.spec, problems, starts=True).problems
    placement = Placement(loaded.spec, model_size(loaded.spec.model), this_machine())
    of_machine = [*placement.problems(), *check_disk(loaded.spec)]
    if has_errors(problems):
        raise SpecError([*problems, *of_machine])
    print_problems([*problems, *(problem for problem in of_machine if problem.severity != "error")])
    for problem in of_machine:
        if problem.severity == "error":
            raise EnvironmentFailure(problem.what, where=problem.key, fix=problem.fix)

    from rlctl.leftovers import own_temporary_files
    from rlctl.train.start import prove, start_run

    note = partial(echo, err=True)
    with own_temporary_files():
        if not trains:
            return prove(loaded.spec, note)
        run_dir, exit_code = start_run(loaded.spec, resume=resume, note=note)
    _print_summary(run_dir)
    return exit_code


def _print_summary(run_dir: Path) -> None:
    """Prints what was learned, and at the end the result, the model and the next command."""
    from rlctl.terminal import Console
    from rlctl.track.run_dir import SUMMARY_FILE

    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8"))
    console = Console(highlight=False)
    ended = "interrupted" if summary["interrupted"] else "finished"
    ended = "ended early" if summary.get("early_stop") else ended
    console.print(
        f"\n[bold]{ended}[/bold] after step {summary['step']} of {summary['total_steps']}, "
        f"{summary['num_updates']} updates, {summary['seconds']:.0f} s\n"
    )
    if summary["first"]:
        _print_learned(console, summary)
    else:
        console.print("The run was already complete; for more steps: trainer.total_training_steps=N")
    reason = summary.get("early_stop")
    if reason:
        console.print(f"\nEnded early: {reason}", markup=False)
    guardrails = summary.get("guardrails", {})
    reason = guardrails.get("stopped_because")
    if reason:
        console.print(f"\nGuardrails stopped the run: {reason}", markup=False)
    elif guardrails.get("alarms"):
        console.print("\nGuardrails: {alarms} alarms, {interventions} interventions".format(**guardrails))
    _print_places(console, run_dir, summary)


def _print_learned(console: Console, summary: dict[str, Any]) -> None:
    from rlctl.metric_names import validation_rewards
    from rlctl.text_table import print_table

    names = {
        "critic/score/mean": "mean reward",
        "rollout_corr/rollout_is_raw_eff_sample_size": "ESS, raw",
        "rollout_corr/rollout_is_eff_sample_size": "ESS, applied",
        "rollout_corr/rollout_rs_masked_fraction": "masked fraction",
        "response_length/mean": "response length",
    }
    first = summary["first"]
    last = summary["last"]
    rows = [
        (name, *(f"{end[key]:.3f}" if key in end else "" for end in (first, last)))
        for key, name in names.items()
        if key in first or key in last
    ]
    before, after = (validation_rewards(summary[f"validation_{when}"]) for when in ("first", "last"))
    once = summary["validation_first"] == summary["validation_last"]
    for source, value in after.items():
        shown = "" if once or source not in before else f"{before[source]:.3f}"
        rows.append((f"validation ({source})", shown, f"{value:.3f}"))
    print_table(console, ("", "first steps", "last steps"), rows, right=range(1, 3))


def _print_places(console: Console, run_dir: Path, summary: dict[str, Any]) -> None:
    from rich.markup import escape

    model = run_dir / summary["model"]
    directory = shlex.quote(str(run_dir))
    following = f"rlctl report {directory}"
    if summary.get("guardrails", {}).get("stopped_because"):
        following = f"rlctl diagnose {directory}"
    elif summary["interrupted"] and not summary.get("early_stop"):
        following = f"rlctl train --resume {directory}"
    lines = {
        "result": _result(summary),
        "model": str(model) if model.exists() else "",
        "next": following,
    }
    console.print()
    for name, text in lines.items():
        if text:
            console.print(f"[bold]{name:<6}[/bold]  {escape(text)}", soft_wrap=True)


def _result(summary: dict[str, Any]) -> str:
    """`reward 0.338 → 0.679, validation 0.982 → 0.996`, as far as they were measured."""
    from rlctl.metric_names import validation_score

    ends = ("first", "last")
    reward = [summary[end].get("critic/score/mean") for end in ends if summary[end]]
    scores = [validation_score(summary[f"validation_{end}"]) for end in ends]
    measured = {"reward": reward, "validation": scores[-1:] if scores[0] == scores[-1] else scores}
    return ", ".join(
        f"{name} {' → '.join(f'{value:.3f}' for value in values)}"
        for name, values in measured.items()
        if values and None not in values
    )


def _may_resume(
    run_dir: Path,
    spec_file: Path,
    values: list[str],
    *,
    trust: bool,
    preset: list[str] | None,
    flags: Flags,
) -> None:
    """Refuses what a resumed run cannot take, and code of others without permission."""
    from rlctl.track.trust import require_permission_of_run

    if preset or flags:
        message = "a resumed run continues with its own spec"
        fix = "change single values with key=value"
        left_out = "--preset" if preset else "--model, --data and --reward"
        raise UsageError(message, where=str(spec_file), fix=f"leave {left_out} out; {fix}")
    accepts = {"trainer.accept_changed_inputs=true", "trainer.accept_changed_inputs=True"} & set(values)
    require_permission_of_run(run_dir, trust=trust, accepts_changes=bool(accepts))


def _loaded(
    flags: Flags,
    presets: list[str],
    files: list[Path],
    values: list[str],
    machine: str | None,
    *,
    fetch: bool,
) -> LoadedSpec:
    """The spec of all layers; with flags also what is inferred from the data and the model."""
    from rlctl.run_spec.load import load_spec

    if not flags:
        return load_spec(presets, files, values)
    from rlctl.run_spec.machine import machine_of
    from rlctl.train.infer import load_with_flags

    return load_with_flags(flags, presets, files, values, machine_of(machine), fetch=fetch)
