"""`rlctl train`: reads the spec, then shows it or runs it; output before and after the live panel."""

from __future__ import annotations

import json
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import Presets, complete_override, complete_run, echo, run_path
from rlctl.errors import EnvironmentFailure, SpecError, UsageError

if TYPE_CHECKING:
    from rlctl.spec.load import LoadedSpec
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
            help="With --dry-run: plan for 1xh100, 8xh100, 2x8h100, 1xh200 or 1x24gb, not this machine.",
        ),
    ] = None,
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
    plain: Annotated[
        bool, typer.Option("--plain", help="One line per step instead of the live panel, as in a log file.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue a run, given by its directory or a part of its name, with its own spec.",
            autocompletion=complete_run,
            parser=run_path,
        ),
    ] = None,
) -> None:
    """Train a policy.

    Without arguments it trains the built-in tiny model on addition, with no download.

      rlctl train --preset rloo-seq-is

      rlctl train -p rloo-seq-is model.path=Qwen/Qwen2.5-0.5B data.train_files=data/gsm8k/train.parquet

      rlctl train fixed.yaml

      rlctl train --resume runs/rlctl/rloo-seq-is-20260101-120000

    Every key: `rlctl explain`. Presets: `rlctl presets list`.
    """
    from rlctl.spec.load import load_spec, spec_file_of

    given = list(overrides or [])
    values = [item for item in given if "=" in item or not item.endswith((".yaml", ".yml"))]
    files = [*(spec or []), *(Path(item) for item in given if item not in values)]
    if resume is not None:
        files.insert(0, spec_file_of(resume))
        if preset:
            what, fix = "a resumed run continues with its own spec", "change single values with key=value"
            raise UsageError(what, where=str(files[0]), fix=f"leave --preset out; {fix}")
    loaded = load_spec(list(preset or []), files, values)
    if resume is not None:
        from rlctl.train.start import changes_of

        changes_of(resume, loaded.spec)
        if not (spec or given):
            loaded.warnings.clear()  # shown when the run started
    if dry_run:
        from rlctl.cli.dry_run import print_dry_run

        raise typer.Exit(print_dry_run(loaded, show_all=show_all, machine=machine))
    if machine is not None:
        fix = "add --dry-run; without it the run starts on this machine"
        raise UsageError("--machine only plans a run", where="--machine", fix=fix)
    if print_command:
        from rlctl.cli.print_command import print_commands

        words = [word for name in preset or () for word in ("--preset", name)]
        words += [word for file in spec or () for word in ("--spec", str(file))]
        words += ["--resume", str(resume)] if resume else []
        print_commands(loaded.spec, [*words, *given])
        return
    if plain:
        os.environ["RLCTL_PLAIN"] = "1"  # ranks in other processes read it too
    if prove_sync and resume is not None:
        what = "--prove-sync starts a run's engines; it cannot resume one"
        raise UsageError(what, where="--prove-sync", fix=f"write {files[0]} instead of --resume")
    raise typer.Exit(_start(loaded, resume, trains=not prove_sync))


def _start(loaded: LoadedSpec, resume: Path | None, *, trains: bool) -> int:
    """Train, or only prove the weight sync; heavy packages are imported here."""
    from rlctl.cli.output import print_problems
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

    from rlctl.train.start import prove, start_run

    note = partial(echo, err=True)
    if not trains:
        return prove(loaded.spec, note)
    run_dir, exit_code = start_run(loaded.spec, resume=resume, note=note)
    _print_summary(run_dir)
    return exit_code


def _print_summary(run_dir: Path) -> None:
    """Prints results, files, and the next commands to run."""
    from rlctl.terminal import Console
    from rlctl.track.run_dir import SUMMARY_FILE

    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8"))
    console = Console(highlight=False)
    ended = "interrupted" if summary["interrupted"] else "finished"
    console.print(
        f"\n[bold]{ended}[/bold] after step {summary['step']} of {summary['total_steps']}, "
        f"{summary['num_updates']} updates, {summary['seconds']:.0f} s\n"
    )
    if summary["first"]:
        _print_learned(console, summary)
    else:
        console.print("The run was already complete; for more steps: trainer.total_training_steps=N")
    guardrails = summary.get("guardrails", {})
    if reason := guardrails.get("stopped_because"):
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
    first, last = summary["first"], summary["last"]
    rows = [(name, f"{first[key]:.3f}", f"{last[key]:.3f}") for key, name in names.items() if key in first]
    before, after = (validation_rewards(summary[f"validation_{when}"]) for when in ("first", "last"))
    once = summary["validation_first"] == summary["validation_last"]
    for source, value in after.items():
        shown = "" if once or source not in before else f"{before[source]:.3f}"
        rows.append((f"validation ({source})", shown, f"{value:.3f}"))
    print_table(console, ("", "first steps", "last steps"), rows, right=range(1, 3))


def _print_places(console: Console, run_dir: Path, summary: dict[str, Any]) -> None:
    from rich.markup import escape

    place = escape(shlex.quote(str(run_dir)))
    console.print(f"\n[bold]Where[/bold]   {escape(str(run_dir))}", soft_wrap=True)
    for name, what in {
        "metrics.jsonl": "every metric of every step",
        "rollouts/": "responses with both policies' log-probs (Parquet)",
        summary["model"] + "/": "the trained model, a plain Hugging Face directory",
    }.items():
        if (run_dir / name).exists():
            console.print(f"        {name}  [dim]{what}[/dim]", soft_wrap=True)
    console.print("\n[bold]Next[/bold]")
    if summary["interrupted"]:
        console.print(f"        rlctl train --resume {place}", soft_wrap=True)
    console.print(f"        rlctl evaluate {place}", soft_wrap=True)
    console.print(f"        rlctl diagnose {place}", soft_wrap=True)
