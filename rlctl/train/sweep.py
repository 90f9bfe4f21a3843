"""Many runs of one spec: every combination of some values, each run once, whatever is killed in between.

`sweep.json` says what a sweep is. How far it is, is read from its runs' own directories: the same command
given again goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rlctl.engine.checkpoint import CHECKPOINTS
from rlctl.errors import UsageError
from rlctl.evaluate.compare import compare
from rlctl.evaluate.intervals import Difference, IntervalFigure, estimate, paired
from rlctl.files import write_text
from rlctl.processes import end_with_parent
from rlctl.spec.load import load_spec
from rlctl.track.run_state import RunState, read_state
from rlctl.train.validate import EVALUATIONS

SWEEP_FILE = "sweep.json"
TRAIN = (sys.executable, "-P", "-m", "rlctl.cli.app", "train")
#: The axis whose values are repetitions of one setting.
SEED = "trainer.seed"
#: A run that died before its first checkpoint is kept under this name and started anew.
_LOST = ".lost-"
_POLL_S = 0.5
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
#: States in which there is nothing left to do.
_DONE = {"finished", "stopped"}


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One combination: its directory's name, and the values in which it differs, by key."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """All combinations, in the order in which they run.

    Attributes:
        presets, files: of `rlctl train`, the files' paths absolute.
        fixed: `key=value` that all runs share.
        axes: key → its values.
    """

    presets: list[str]
    files: list[str]
    fixed: list[str]
    axes: dict[str, list[str]]

    @property
    def runs(self) -> list[SweepRun]:
        """Every combination, the last axis fastest."""
        combinations = itertools.product(*self.axes.values())
        return [_run(dict(zip(self.axes, values, strict=True))) for values in combinations]

    @property
    def key(self) -> str:
        """The same for the same request."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One setting over all its seeds.

    Attributes:
        setting: the values in which it differs.
        num_done, num_runs: runs at their end, and all of them.
        value: mean over the runs that are done, see `result`; None: none is done.
        against_first: difference from the first setting, paired by seed, or of a single seed by question.
        paired_by: `seed` or `question`.
    """

    setting: dict[str, str]
    num_done: int
    num_runs: int
    value: IntervalFigure | None
    against_first: Difference | None
    paired_by: str | None


def plan(presets: Sequence[str], arguments: Sequence[str]) -> Sweep:
    """Read a sweep from the words of the command line, every run of it checked.

    Args:
        presets: names.
        arguments: spec files, `key=value`, and axes: `key=a,b,c` or `key=1..5`.

    Raises:
        UsageError: no axis.
        SpecError: a run's spec is wrong.
    """
    fixed: list[str] = []
    files: list[str] = []
    axes: dict[str, list[str]] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        values = _values(text)
        if not equals and word.endswith((".yaml", ".yml")):
            files.append(str(Path(word).resolve()))
        elif len(values) > 1:
            axes[key] = values
        else:
            fixed.append(word)
    if not axes:
        fix = "give a key several values: actor.lr=1e-6,3e-6 trainer.seed=1..5"
        raise UsageError("nothing is varied", where="rlctl sweep", fix=fix)
    sweep = Sweep(list(presets), files, fixed, axes)
    for run in sweep.runs:
        load_spec(sweep.presets, [Path(file) for file in files], [*fixed, *_overrides(run)])
    return sweep


def open_sweep(directory: Path, sweep: Sweep | None = None) -> Sweep:
    """The sweep of a directory, begun if it is new.

    Raises:
        UsageError: there is none, or another one.
    """
    file = directory / SWEEP_FILE
    if file.is_file():
        known = Sweep(**json.loads(file.read_text(encoding="utf-8")))
        if sweep is not None and sweep != known:
            raise UsageError("another sweep is here", where=str(directory), fix="choose another --dir")
        return known
    if sweep is None:
        raise UsageError(f"not a sweep: it has no {SWEEP_FILE}", where=str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(asdict(sweep), indent=2) + "\n")
    return sweep


def run_sweep(
    directory: Path, sweep: Sweep, *, jobs: int, note: Callable[[str], None], only: int | None = None
) -> int:
    """Run what is not done yet; returns how many runs failed.

    A run that was interrupted goes on from its checkpoint; one that another process trains is waited for.
    When this process is stopped or killed, its runs save and end.

    Args:
        directory: of the sweep.
        sweep: what to run.
        jobs: runs at a time.
        note: shows a line.
        only: the number of the one run to run; None: all.
    """
    waiting = list(sweep.runs if only is None else [sweep.runs[only]])
    working: dict[subprocess.Popen[bytes], SweepRun] = {}
    num_failed = 0
    try:
        while waiting or working:
            for run in list(waiting):
                state = read_state(directory / run.name).state
                if state in _DONE:
                    waiting.remove(run)
                elif state != "running" and len(working) < jobs:
                    waiting.remove(run)
                    working[_start(directory, sweep, run)] = run
                    note(f"{run.name}: started, {len(waiting)} more")
            time.sleep(_POLL_S)
            for process in [process for process in working if process.poll() is not None]:
                run = working.pop(process)
                ended = read_state(directory / run.name)
                num_failed += ended.state not in _DONE
                code = f", exit code {process.returncode}" if process.returncode else ""
                note(f"{run.name}: {ended.state} after step {ended.step}{code}")
    finally:
        for process in working:
            process.send_signal(signal.SIGTERM)
        for process in working:
            process.wait()
    return num_failed


def table(directory: Path, sweep: Sweep) -> list[SweepRow]:
    """Every setting over its seeds, compared with the first."""
    settings: dict[tuple[tuple[str, str], ...], dict[str, RunState]] = {}
    for run in sweep.runs:
        setting = tuple((key, value) for key, value in run.values.items() if key != SEED)
        state = read_state(directory / run.name)
        settings.setdefault(setting, {})[run.values.get(SEED, "")] = state
    first = next(iter(settings.values()))
    rows = []
    for setting, states in settings.items():
        done = {seed: state for seed, state in states.items() if state.state in _DONE}
        values = [value for state in done.values() if (value := result(state)) is not None]
        against, by = (None, None) if states is first else _difference(first, states)
        mean = estimate(values, is_share=False)  # rewards need not lie in [0, 1]
        rows.append(SweepRow(dict(setting), len(done), len(states), mean, against, by))
    return rows


def result(state: RunState) -> float | None:
    """Mean reward of the last validation over its data sources; without one, the last batch's."""
    if state.validation:
        return math.fsum(state.validation.values()) / len(state.validation)
    return state.reward


def slurm_script(directory: Path, sweep: Sweep, *, jobs: int, options: Sequence[str]) -> str:
    """A job array with one task per run; given again it does what is left.

    A task saves when it is asked to end. At its time limit it is queued again, and by Slurm itself after a
    preemption; not after `scancel`.

    Args:
        directory: of the sweep.
        sweep: what to run.
        jobs: tasks at a time.
        options: further ones of sbatch, such as `--gpus=1`.
    """
    place = directory.resolve()
    heads = [
        shlex.quote(f"--job-name=rlctl-{directory.name}"),  # sbatch reads quotes as a shell does
        f"--array=0-{len(sweep.runs) - 1}%{jobs}",
        shlex.quote(f"--output={str(place).replace('%', '%%')}/slurm-%a.log"),
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",  # before the time limit; TERM is scancel's, or of a preemption
        *options,
    ]
    command = f"{shlex.quote(sys.executable)} -m rlctl.cli.app sweep --dir {shlex.quote(str(place))}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {head}" for head in heads),
        f'{command} --only "$SLURM_ARRAY_TASK_ID" &',
        "child=$!",
        "trap 'kill -TERM $child' TERM  # the run saves",
        "trap 'again=1; kill -TERM $child' USR1",
        "wait $child; code=$?",
        'if [ "$code" -gt 128 ]; then wait $child; code=$?; fi',
        'if [ "$code" -gt 128 ] && [ "$again" ]; then',
        '  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _difference(
    first: Mapping[str, RunState], other: Mapping[str, RunState]
) -> tuple[Difference | None, str | None]:
    shared = [seed for seed in other if all(side[seed].state in _DONE for side in (first, other))]
    if len(shared) == 1:
        a, b = (_last_evaluation(side[shared[0]].path) for side in (first, other))
        if a and b:
            return compare(a, b).comparisons[-1].figures[0].difference, "question"
    pairs = [(result(first[seed]), result(other[seed])) for seed in shared]
    return paired([b - a for a, b in pairs if a is not None and b is not None]), "seed"


def _last_evaluation(run_dir: Path) -> Path | None:
    return max((run_dir / EVALUATIONS).glob("step_*"), default=None)


def _start(directory: Path, sweep: Sweep, run: SweepRun) -> subprocess.Popen[bytes]:
    path = directory / run.name
    if any((path / CHECKPOINTS).glob("step_*")):
        words = ["--resume", str(path)]
    else:
        if path.exists():  # it died before its first checkpoint
            number = sum(1 for _ in directory.glob(f"{_LOST}*"))
            path.rename(directory / f"{_LOST}{number}-{run.name}")
        presets = itertools.chain.from_iterable(("--preset", preset) for preset in sweep.presets)
        words = [*presets, *sweep.files, *sweep.fixed, *_overrides(run), f"trainer.run_dir={path}"]
    with (directory / f"{run.name}.log").open("ab") as log:
        return subprocess.Popen(
            [*TRAIN, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which asks the runs to stop
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),  # noqa: PLW1509 - no other thread
        )


def _run(values: dict[str, str]) -> SweepRun:
    words = (f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    return SweepRun(re.sub(r"[^A-Za-z0-9._-]", "_", "_".join(words)), values)


def _overrides(run: SweepRun) -> Iterable[str]:
    return (f"{key}={value}" for key, value in run.values.items())


def _values(text: str) -> list[str]:
    """`1e-6,3e-6` and `1..5`; a list or mapping in brackets, and a text in quotes, is one value."""
    if found := _RANGE.fullmatch(text):
        first, last = int(found[1]), int(found[2])
        step = 1 if last >= first else -1
        return [str(value) for value in range(first, last + step, step)]
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts
