"""Sweeps: one run of a spec per combination of values, continued after interruptions.

`sweep.json` defines the sweep. Its progress is read from the directories of its runs, so the same command
continues an interrupted sweep.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rlctl.engine.checkpoint import CHECKPOINTS
from rlctl.errors import UsageError
from rlctl.evaluate.compare import compare
from rlctl.evaluate.intervals import Difference, IntervalFigure, estimate, paired
from rlctl.files import open_to_append, write_text
from rlctl.processes import end_with_parent
from rlctl.spec.load import load_spec
from rlctl.track.open_run import RunState, read_state
from rlctl.train.validate import EVALUATIONS

SWEEP_FILE = "sweep.json"
TRAIN = (sys.executable, "-P", "-m", "rlctl", "train")
#: The axis whose values are repetitions of one setting.
SEED = "trainer.seed"
#: Directory prefix for a run that died before its first checkpoint; the run is started again.
_LOST = ".lost-"
_POLL_S = 0.5
#: Characters of a run's name; longer names are cut.
_LONGEST_NAME = 100
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
#: States of runs that need no further work.
_DONE = {"finished", "stopped"}


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One combination: its values by key."""

    values: dict[str, str]

    @property
    def name(self) -> str:
        """The name of its directory."""
        words = "_".join(f"{key.rpartition('.')[2]}-{value}" for key, value in self.values.items())
        name = re.sub(r"[^A-Za-z0-9._-]", "_", words)
        if name == words and len(name) <= _LONGEST_NAME:
            return name
        return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

    @property
    def overrides(self) -> list[str]:
        """The values as `key=value`."""
        return [f"{key}={value}" for key, value in self.values.items()]


@dataclass(frozen=True, slots=True)
class Sweep:
    """All combinations, in the order in which they run.

    Attributes:
        presets, files: as in `rlctl train`; paths of files are absolute.
        fixed: `key=value` that all runs share.
        axes: key → its values.
    """

    presets: list[str]
    files: list[str]
    fixed: list[str]
    axes: dict[str, list[str]]

    @property
    def runs(self) -> list[SweepRun]:
        """Every combination; the last axis varies fastest."""
        combinations = itertools.product(*self.axes.values())
        return [SweepRun(dict(zip(self.axes, values, strict=True))) for values in combinations]

    @property
    def key(self) -> str:
        """Hash of the definition: equal sweeps have equal keys."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """Result of one setting over all its seeds.

    Attributes:
        setting: values of the axes, without the seed.
        num_done, num_runs: number of completed runs, and of all runs.
        value: mean over the completed runs, see `result`; None: no run is completed.
        against_first: difference from the first setting, paired by seed, or by question if only one seed is
            completed.
        paired_by: `seed` or `question`; None for the first setting.
    """

    setting: dict[str, str]
    num_done: int
    num_runs: int
    value: IntervalFigure | None
    against_first: Difference | None
    paired_by: str | None


def plan(presets: Sequence[str], arguments: Sequence[str]) -> Sweep:
    """Reads a sweep from command-line arguments and checks the spec of every run.

    `arguments` are spec files, `key=value`, and axes: `key=a,b,c` or `key=1..5`.

    Raises:
        UsageError: there is no axis.
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
        load_spec(sweep.presets, [Path(file) for file in files], [*fixed, *run.overrides])
    return sweep


def open_sweep(directory: Path, sweep: Sweep | None = None) -> Sweep:
    """Opens the sweep of a directory, or creates `sweep` there.

    Raises:
        UsageError: the directory has no sweep and none is given, or it has another one.
    """
    file = directory / SWEEP_FILE
    if file.is_file():
        recorded = Sweep(**json.loads(file.read_text(encoding="utf-8")))
        if sweep is not None and sweep != recorded:
            raise UsageError(
                "the directory contains a different sweep", where=str(directory), fix="choose another --dir"
            )
        return recorded
    if sweep is None:
        raise UsageError(f"not a sweep: it has no {SWEEP_FILE}", where=str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(asdict(sweep), indent=2) + "\n")
    return sweep


def run_sweep(
    directory: Path, sweep: Sweep, *, jobs: int, note: Callable[[str], None], only: int | None = None
) -> int:
    """Runs all combinations that are not completed; returns the number of failed runs.

    An interrupted run continues from its checkpoint; a run that another process trains is waited for. When
    this process is stopped or killed, its runs save and end.

    Args:
        jobs: maximum number of concurrent runs.
        only: index of the only run to start; None: all runs.
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
    """Results of every setting over its seeds, compared with the first setting."""
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
    """Reward of the last validation, averaged over data sources; without validation, of the last batch."""
    if state.validation:
        return math.fsum(state.validation.values()) / len(state.validation)
    return state.reward


def slurm_script(directory: Path, sweep: Sweep, *, jobs: int, options: Sequence[str]) -> str:
    """Slurm script of a job array with one task per run; submitted again, it continues the sweep.

    A task saves when a signal ends it. At its time limit it requeues itself; Slurm requeues it after a
    preemption. After `scancel` it is not requeued.

    Args:
        jobs: maximum number of concurrent tasks.
        options: further sbatch options, such as `--gpus=1`.
    """
    place = directory.resolve()
    heads = [
        shlex.quote(f"--job-name=rlctl-{directory.name}"),  # sbatch reads quotes as a shell does
        f"--array=0-{len(sweep.runs) - 1}%{jobs}",
        shlex.quote(f"--output={str(place).replace('%', '%%')}/slurm-%a.log"),
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@120",  # 120 s before the time limit; scancel and preemption send TERM
        *options,
    ]
    command = f"{shlex.quote(sys.executable)} -m rlctl sweep --dir {shlex.quote(str(place))}"
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
        a, b = (
            max((side[shared[0]].path / EVALUATIONS).glob("step_*"), default=None) for side in (first, other)
        )
        if a and b:
            return compare(a, b).comparisons[-1].figures[0].difference, "question"
    pairs = [(result(first[seed]), result(other[seed])) for seed in shared]
    return paired([b - a for a, b in pairs if a is not None and b is not None]), "seed"


def _start(directory: Path, sweep: Sweep, run: SweepRun) -> subprocess.Popen[bytes]:
    path = directory / run.name
    if any((path / CHECKPOINTS).glob("step_*")):
        words = ["--resume", str(path)]
    else:
        if path.exists():  # it died before its first checkpoint
            number = sum(1 for _ in directory.glob(f"{_LOST}*"))
            path.rename(directory / f"{_LOST}{number}-{run.name}")
        presets = itertools.chain.from_iterable(("--preset", preset) for preset in sweep.presets)
        words = [*presets, *sweep.files, *sweep.fixed, *run.overrides, f"trainer.run_dir={path}"]
    with open_to_append(directory / f"{run.name}.log") as log:
        return subprocess.Popen(
            [*TRAIN, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which stops the runs
            preexec_fn=partial(end_with_parent, signal.SIGTERM, os.getpid()),  # noqa: PLW1509 - no other thread
        )


def _values(text: str) -> list[str]:
    """Splits `1e-6,3e-6` and expands `1..5`; text in brackets or quotes is one value."""
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
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return parts
