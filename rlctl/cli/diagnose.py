"""`rlctl diagnose`: reports faults in a run's log, and replays its rollouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.command import FailOn, Out, Trust, echo, refuse_options, run_path
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.diagnose.readers.reader_files import Readers
    from rlctl.diagnose.rule import Diagnosis
    from rlctl.diagnose.table import RunLog
    from rlctl.mismatch.sampler_report import SamplerReport
    from rlctl.mismatch.who_sampled import WhoSampled
    from rlctl.terminal import Console

DiagnosisFormat = Literal["text", "json", "markdown", "html"]


def diagnose(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH…",
            parser=run_path,
            help="Run directories (or parts of their names) or logs, of rlctl, verl, TRL, ms-swift, "
            "LLaMA-Factory, OpenRLHF, slime, prime-rl, NeMo-RL, SkyRL, AReaL, torchforge, ROLL, Oat, "
            "open-instruct or Tinker; directories or ZIP archives of several; `-` for "
            "standard input: one pasted step is enough.",
        ),
    ] = None,
    output_format: Annotated[
        DiagnosisFormat, typer.Option("--format", help="Text, JSON, or a page with plots.")
    ] = "text",
    out: Out = None,
    fail_on: FailOn = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the run's spec with the fixes applied, for `rlctl train --spec FILE`."
        ),
    ] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Also apply your own diagnosis rule; may be repeated."),
    ] = None,
    map_: Annotated[
        list[Path] | None,
        typer.Option(
            "--map",
            metavar="FILE.toml",
            help='Names of your own for metrics: lines of `"my name" = "metric"`; may be repeated.',
        ),
    ] = None,
    reader: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.toml", help="Also read the log format that this file describes; may be repeated."
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Replay the run's dumped rollouts under other corrections; report the best."
        ),
    ] = False,
    who_sampled: Annotated[
        bool,
        typer.Option(
            "--who-sampled",
            help="Score the run's dumped rollouts under its kept weights: which sampled them, and what the "
            "log-ratio consists of.",
        ),
    ] = False,
    sampler_test: Annotated[
        bool,
        typer.Option(
            "--sampler-test",
            help="Test with a run's rollouts, or files (.parquet, .jsonl, slime's .pt) with both log-probs "
            "per token, whether the sampler drew its tokens with the log-probs that it reports.",
        ),
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Predict seconds per step from logged durations: synchronous, one batch ahead, in flight, "
            "by number of replicas.",
        ),
    ] = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Also list the rules that found nothing, and report healthy runs.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Report faults of a run, their causes, and settings to try.

    rlctl diagnose runs/rlctl/rloo-seq-is-20260101-120000

    rlctl diagnose RUN OTHER_RUN --format html --output report.html

    rlctl diagnose RUN --fix fixed.yaml && rlctl train --spec fixed.yaml

    rlctl diagnose RUN --what-if

    rlctl diagnose RUN --who-sampled

    rlctl diagnose RUN --sampler-test

    rlctl diagnose RUN --plan

    kubectl logs trainer | rlctl diagnose - --fail-on critical

    rlctl diagnose - # paste a step, a table or a part of a log, then Ctrl-D
    """
    if not paths:
        raise UsageError("no log is given", where="rlctl diagnose", fix="name a run directory, or a log")
    questions = {
        "--what-if": what_if,
        "--who-sampled": who_sampled,
        "--sampler-test": sampler_test,
        "--plan": plan,
    }
    asked = [option for option, is_asked in questions.items() if is_asked]
    if asked:
        from rlctl.cli.diagnose_questions import ask

        if len(asked) > 1:
            message = "these are different questions"
            raise UsageError(message, where=" ".join(asked), fix=f"give one of {', '.join(asked)}")
        refused = (
            "rules",
            "fix",
            "map_",
            "reader",
            "all_",
            *(() if who_sampled or sampler_test else ("fail_on",)),
        )
        refuse_options(context, refused, f"applies to findings, and {asked[0]} computes none")
        answers = ask(asked[0], paths, output_format, out, trust=trust)
        raise typer.Exit(3 if fail_on and any(_reaches(answer, fail_on) for answer in answers) else 0)
    _check(paths, output_format, out, fix)
    from rlctl.diagnose.readers.reader_files import BUILT_IN
    from rlctl.diagnose.rule import all_rules, examine, metrics_read
    from rlctl.report.run_dumps import with_dumps

    own = tuple(rules or ())
    applied = all_rules(own)
    wanted = metrics_read(own, with_others=output_format == "html")
    readers = BUILT_IN.with_files(reader or (), map_ or ())
    unreadable: list[UsageError] = []
    runs = _read_all(paths, wanted, readers, unreadable)
    diagnoses = [examine(with_dumps(run, trust=trust), applied) for run in runs]
    if not diagnoses:
        _report(unreadable[:-1])
        raise unreadable[-1]
    if fix is not None:
        _check_fix(fix, len(diagnoses))  # a path may hold several runs
    _write(diagnoses, output_format, out, all_=all_)
    if fix is not None:
        _write_fix(diagnoses[0], fix)
    _report(unreadable)
    if fail_on and any(diagnosis.reaches(fail_on) for diagnosis in diagnoses):
        raise typer.Exit(3)
    if unreadable:
        raise typer.Exit(2)


def _reaches(answer: WhoSampled | SamplerReport, level: Literal["warning", "critical"]) -> bool:
    """Whether an answer accuses the sampler at this level; a named fault is critical unless it says less."""
    severity = getattr(answer, "severity", "critical") if answer.fault else None
    return severity in {"critical", level}


def _report(errors: Sequence[UsageError]) -> None:
    from rlctl.cli.output import print_error

    for error in errors:
        print_error(error)


def _read_all(
    paths: Sequence[Path], wanted: frozenset[str], readers: Readers, unreadable: list[UsageError]
) -> Iterator[RunLog]:
    """Reads the runs at all paths one by one; says on a terminal what is being read.

    The error of each path or log that cannot be read is added to `unreadable`.
    """
    from rich.text import Text

    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.diagnose.readers.detect import read_runs
    from rlctl.diagnose.table import STDIN
    from rlctl.terminal import Console

    for path in paths:
        is_pasted = path == STDIN  # a spinner would disturb it
        with nullcontext() if is_pasted else Console(stderr=True).status(Text(visible(f"reading {path}"))):
            try:
                yield from read_runs(path, wanted, readers, unreadable.append)
            except UsageError as error:
                unreadable.append(error)


def _check(paths: Sequence[Path], output_format: DiagnosisFormat, out: Path | None, fix: Path | None) -> None:
    """Refuse invalid combinations of paths and options before anything is read."""
    if paths.count(Path("-")) > 1:
        raise UsageError("standard input is given twice but can be read only once", where="-")
    if Path("-") in paths and sys.stdin.isatty():
        echo("Paste a log, or a part of one; end it with Ctrl-D on an empty line.", err=True)
    from rlctl.cli.output import check_out

    check_out(paths, out, is_page=output_format == "html")
    if fix is not None:
        _check_fix(fix, len(paths))


def _check_fix(fix: Path, num_runs: int) -> None:
    """Refuses to fix several runs, and to overwrite a file."""
    if num_runs > 1:
        message = f"--fix writes the spec of one run, but {num_runs} are given"
        raise UsageError(message, where="--fix", fix="give one run")
    from rlctl.diagnose.spec_patch import check_free

    check_free(fix)


def _write(
    diagnoses: list[Diagnosis], output_format: DiagnosisFormat, out: Path | None, *, all_: bool
) -> None:
    from rlctl.cli.output import write_report
    from rlctl.diagnose.diagnosis_page import diagnosis_page
    from rlctl.diagnose.diagnosis_report import as_markdown, diagnosis_document, shown
    from rlctl.diagnose.output_text import print_diagnosis, print_overview

    def text(console: Console) -> None:
        if len(diagnoses) > 1:
            print_overview(console, diagnoses)
        for index, diagnosis in enumerate(shown(diagnoses, all_=all_)):
            console.print(end="\n" * (index or len(diagnoses) > 1))
            print_diagnosis(console, diagnosis, all_=all_)

    pages = {
        "markdown": partial(as_markdown, diagnoses, all_=all_),
        "html": partial(diagnosis_page, diagnoses),
    }
    write_report(output_format, out, text, partial(diagnosis_document, diagnoses), **pages)


def _write_fix(diagnosis: Diagnosis, path: Path) -> None:
    """Write the fixed spec, and report on standard error which findings it covers."""
    from rlctl.diagnose.output_text import print_patch
    from rlctl.diagnose.spec_patch import propose_patch, write_patch
    from rlctl.terminal import Console

    patch = propose_patch(diagnosis)
    if patch.applied:
        write_patch(path, patch)
    print_patch(Console(stderr=True, highlight=False), patch, path if patch.applied else None)
