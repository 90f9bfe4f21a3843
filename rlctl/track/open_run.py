"""Reads run directories: spec, metrics, rollouts, checkpoints and state. Does not import torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from rlctl.digits import whole_number
from rlctl.errors import UsageError, first_line
from rlctl.files import lines_of
from rlctl.metric_names import best_validation, validation_rewards
from rlctl.track.heartbeats import beats_of_node
from rlctl.track.jsonl import METRICS_FILE, decode_line
from rlctl.track.run_dir import (
    ENVIRONMENT_FILE,
    FAILURE_FILE,
    HOLDER_FILE,
    SPEC_FILE,
    SUMMARY_FILE,
    read_mapping,
    typed,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from rlctl.run_spec.run_spec import RunSpec

State = Literal["running", "finished", "interrupted", "stopped", "failed", "died", "empty"]

_REWARD = "critic/score/mean"
#: Directories that a run writes; they contain no other runs.
_OWN = {"checkpoints", "rollouts", "wandb", "tensorboard"}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Files of a run; also works while the run is training."""

    path: Path

    @property
    def spec(self) -> RunSpec:
        """The resolved spec.

        Raises:
            SpecError: `spec.yaml` is missing or is not a spec.
        """
        from rlctl.run_spec.load import recorded_spec

        return recorded_spec(self.path / SPEC_FILE)

    @property
    def state(self) -> State:
        """As `RunState.state`."""
        return read_state(self.path).state

    @property
    def reason(self) -> str | None:
        """Why the run failed or was stopped; else None."""
        return read_state(self.path).reason

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine and command of the run; empty if `environment.json` is missing or damaged."""
        return read_mapping(self.path / ENVIRONMENT_FILE)

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first; `model/` in each is a Hugging Face model directory."""
        return sorted((self.path / "checkpoints").glob("step_*[0-9]"))

    @property
    def best_step(self) -> int:
        """The step with the best validation.

        Raises:
            UsageError: no trained weights were validated.
        """
        best = best_validation(self.rows())
        if best is None:
            fix = "train with data.val_files and trainer.test_freq, or give a number"
            raise UsageError("no validation tells which step is the best", where=str(self.path), fix=fix)
        return best[0]

    def metrics(self) -> pa.Table:
        """Metrics with one row per logged step and one float64 column per metric; null if not logged.

        `.to_pandas()` converts to a data frame. An incomplete last line is ignored.

        Raises:
            UsageError: there is no `metrics.jsonl`, or a line before the last is damaged.
        """
        import pyarrow as pa

        kinds = {"step": pa.int64(), "timestamp": pa.string()}
        rows = [
            {key: value if key in kinds or value is None else float(value) for key, value in row.items()}
            for row in self.rows()
        ]
        metrics = {key: pa.float64() for row in rows for key in row if key not in kinds}
        return pa.Table.from_pylist(rows, pa.schema(kinds | metrics))

    def rollouts(self, step: int | None = None) -> pa.Table:
        """Dumped sequences of a step (None: all), one per row, with the log-probs of both policies per token.

        Raises:
            UsageError: the run has no dumped rollouts, or they are damaged.
        """
        import pyarrow.compute as pc

        return self._rollouts(filters=None if step is None else pc.field("step") == step)

    def rollout_steps(self) -> list[int]:
        """Steps with dumped responses, ascending.

        Raises:
            UsageError: as for `rollouts`.
        """
        return sorted(self._rollouts(columns=["step"])["step"].unique().to_pylist())

    def _rollouts(self, **options: Any) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        files = sorted(file for file in (self.path / "rollouts").glob("*.parquet") if file.is_file())
        if not files:
            raise UsageError(
                "the run saved no rollouts",
                where=str(self.path),
                fix="wait for a checkpoint, or train with trainer.rollouts_per_step=-1",
            )
        try:
            return pa.concat_tables(
                (pq.read_table(file, **options) for file in files), promote_options="default"
            )
        except (OSError, pa.ArrowInvalid) as error:
            message = f"the rollouts cannot be read: {first_line(error)}"
            fix = "move damaged files aside"
            raise UsageError(message, where=str(self.path / "rollouts"), fix=fix) from error

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` as logged; an incomplete last line is ignored.

        Raises:
            UsageError: as for `metrics`.
        """
        file = self.path / METRICS_FILE
        try:
            lines = list(lines_of(file))  # bytes: `str.splitlines` splits at more separators
        except OSError as error:
            message = f"the metrics cannot be read: {error.strerror}"
            raise UsageError(message, where=str(file)) from error
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(decode_line(line))
            except ValueError:
                if number < len(lines):
                    raise UsageError("not a step's metrics in JSON", where=f"{file}:{number}") from None
        return rows


def open_run(path: str | Path) -> RunRecord:
    """Opens a run directory.

    Raises:
        UsageError: the path is not a run directory.
    """
    from rlctl.run_spec.load import spec_file_of

    if not isinstance(path, str | Path):
        raise UsageError(f"is a {type(path).__name__}", where="path", fix="give the path of a run directory")
    return RunRecord(spec_file_of(Path(path).expanduser()).parent)


def chosen_step(run_dir: str | Path, step: int | str | None) -> int | None:
    """The number of a step that is given as a number or as `best`; None stays None.

    Raises:
        UsageError: it is neither, or no validation tells which step is the best.
    """
    if step == "best":
        return open_run(run_dir).best_step
    if step is None or isinstance(step, int):
        return step
    number = whole_number(step)
    if number is None or number < 0:
        raise UsageError(f"not a step: {step:.30}", where="--step", fix="give its number, or best")
    return number


def log_ratios(row: Mapping[str, Any]) -> list[float]:
    """Training log-prob minus rollout log-prob of each sampled token of a row of `RunRecord.rollouts`, nats.

    Empty if the row was not trained on.
    """
    pairs = zip(row["training_log_probs"], row["rollout_log_probs"], strict=True)
    return [trained - sampled for trained, sampled in pairs if trained is not None and sampled is not None]


def spans(row: Mapping[str, Any]) -> list[tuple[int, range]]:
    """Number of each turn of a row of `RunRecord.rollouts` and the places of its tokens, from the first
    sampled token on. What was not sampled, such as output of tools, has the number −1."""
    turns = row["turn"]
    start = row["sampled"].index(True) if True in row["sampled"] else len(turns)
    edges = [index for index in range(start + 1, len(turns)) if turns[index] != turns[index - 1]]
    bounds = pairwise([start, *edges, len(turns)]) if start < len(turns) else ()
    return [(turns[first], range(first, last)) for first, last in bounds]


@dataclass(frozen=True, slots=True)
class RunState:
    """One run in the list of `rlctl runs`."""

    path: Path
    preset: str  # presets in its command line, otherwise its experiment name
    model: str  # `model.path` of its spec
    step: int  # number of batches trained on
    total_steps: int | None  # of the whole run; None if unknown before its end
    #: `finished`: all steps are done. `interrupted`: Ctrl-C, SIGTERM. `stopped`: early or by the guardrails.
    #: `failed`: with an error, see `reason`. `died`: killed without a message. `empty`: no step logged
    state: State
    reason: str | None  # why it failed or was stopped
    reward: float | None  # mean of the last step
    validation: Mapping[str, float]  # rewards of the last validation per data source
    started: str | None  # time of the start or last resume, ISO 8601


def find_runs(root: Path) -> list[RunState]:
    """Finds all runs in or below `root`, sorted by start time."""
    return sorted(map(read_state, _run_dirs(root)), key=lambda run: (run.started or "", str(run.path)))


def run_named(name: str, root: Path, *, whole: bool = False) -> Path:
    """The path `name`; if nothing is there, the only run below `root` whose path contains it, if any.

    A run whose directory has exactly this name comes first; with `whole`, no others are considered.

    Raises:
        UsageError: several runs are meant.
    """
    if name == "-" or Path(name).exists():
        return Path(name)
    candidates = [path for path in _run_dirs(root) if name in str(path)]
    exact = [path for path in candidates if path.name == name]
    if exact or whole:
        candidates = exact
    if len(candidates) > 1:
        shown = ", ".join(map(str, candidates[:5])) + (", …" if len(candidates) > 5 else "")
        message = f"{len(candidates)} runs have this in their names: {shown}"
        raise UsageError(message, where=name, fix="write more of it")
    return candidates[0] if candidates else Path(name)


def read_state(run_dir: Path) -> RunState:
    """Reads the state of one run; fields from missing or damaged files are empty."""
    spec = read_mapping(run_dir / SPEC_FILE)
    summary = read_mapping(run_dir / SUMMARY_FILE)
    failure = read_mapping(run_dir / FAILURE_FILE)
    environment = read_mapping(run_dir / ENVIRONMENT_FILE)
    last, validation = _last_rows(run_dir / METRICS_FILE)
    step = last.get("step", 0)
    stopped = typed(summary, "early_stop", str) or typed(summary, "guardrails", dict).get("stopped_because")
    state: State
    reason = None
    if is_running(run_dir):
        state = "running"
    elif failure:
        state = "failed"
        reason = str(failure.get("what", "unknown"))
    elif not last:
        state = "empty"
    elif summary.get("step") != step:
        state = "died"
    elif stopped:
        state = "stopped"
        reason = str(stopped)
    else:
        state = "interrupted" if summary.get("interrupted") else "finished"
    trainer = typed(spec, "trainer", dict)
    model = typed(spec, "model", dict)
    # The environment is of the last start; the summary may be of an earlier one with another number.
    totals = (
        typed(environment, "total_steps", int),
        typed(summary, "total_steps", int),
        typed(trainer, "total_training_steps", int),
    )
    reward = last.get(_REWARD)
    return RunState(
        path=run_dir,
        preset=_presets(environment.get("command")) or str(trainer.get("experiment_name", "")),
        model=str(model.get("path", "")),
        step=step,
        total_steps=next(filter(None, totals), None),
        state=state,
        reason=reason,
        reward=None if reward is None else float(reward),
        validation=validation,
        started=typed(environment, "time", str) or None,
    )


def _run_dirs(root: Path) -> Iterator[Path]:
    if (root / SPEC_FILE).is_file():
        yield root
        return
    try:
        below = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in below:
        if path.name not in _OWN and not path.name.startswith("."):
            yield from _run_dirs(path)


def _last_rows(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The last complete row, and the rewards of the last validation."""
    last: dict[str, Any] = {}
    try:
        lines = list(lines_of(path))
    except OSError:
        return last, {}
    for line in reversed(lines):
        if last and b'"val/' not in line:
            continue
        try:
            row = decode_line(line)
        except ValueError:
            continue
        last = last or row
        rewards = validation_rewards(row)
        if rewards:
            return last, rewards
    return last, {}


def phase_of(run_dir: Path) -> str:
    """What a run that is running does now, in words: `loading …`, or `step 3, sampling`."""
    beat = beats_of_node(run_dir, 0, size=1).get(0)  # of rank 0
    return beat.place if beat else "starting"


def is_running(run_dir: Path) -> bool:
    """Whether the process that locked the run is alive; a process on another host is assumed to be alive."""
    path = run_dir / HOLDER_FILE
    holder = read_mapping(path)
    if not holder:
        return False
    if holder.get("host") != platform.node():
        return True
    try:
        process = psutil.Process(int(holder["pid"]))
        return process.create_time() <= path.stat().st_mtime + 1 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError, KeyError, ValueError, TypeError, OverflowError):
        return False


def _presets(command: object) -> str:
    """The presets in a command line, joined by `+`."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = [word.split("=", 1)[1] for word in words if word.startswith("--preset=")]
    found += [after for word, after in pairwise(words) if word in {"-p", "--preset"}]
    return "+".join(found)
