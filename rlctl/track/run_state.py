"""Determines the state of a run from its directory."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil

from rlctl.metric_names import validation_rewards
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.run_dir import (
    ENVIRONMENT_FILE,
    FAILURE_FILE,
    HOLDER_FILE,
    SPEC_FILE,
    SUMMARY_FILE,
    read_mapping,
)

State = Literal["running", "finished", "interrupted", "stopped", "failed", "died", "empty"]

_REWARD = "critic/score/mean"
#: Directories that a run writes; they contain no other runs.
_OWN = {"checkpoints", "rollouts", "wandb", "tensorboard"}


@dataclass(frozen=True, slots=True)
class RunState:
    """One run in the list of `rlctl runs`."""

    path: Path
    preset: str  # presets in its command line, otherwise its experiment name
    model: str  # `model.path` of its spec
    step: int  # number of batches trained on
    total_steps: int | None  # of the whole run; None if unknown before its end
    #: `finished`: all steps are done. `interrupted`: Ctrl-C, SIGTERM. `stopped`: by the guardrails. `failed`:
    #: with an error, see `reason`. `died`: killed without a message. `empty`: no step logged
    state: State
    reason: str | None  # why it failed or was stopped
    reward: float | None  # mean of the last step
    validation: Mapping[str, float]  # rewards of the last validation per data source
    started: str | None  # time of the start or last resume, ISO 8601


def find_runs(root: Path) -> list[RunState]:
    """Finds all runs in or below `root`, sorted by start time."""
    return sorted(map(read_state, _run_dirs(root)), key=lambda run: (run.started or "", str(run.path)))


def read_state(run_dir: Path) -> RunState:
    """Reads the state of one run; fields from missing or damaged files are empty."""
    spec = read_mapping(run_dir / SPEC_FILE)
    summary, failure = read_mapping(run_dir / SUMMARY_FILE), read_mapping(run_dir / FAILURE_FILE)
    environment = read_mapping(run_dir / ENVIRONMENT_FILE)
    last, validation = _last_rows(run_dir / METRICS_FILE)
    step = int(last.get("step", 0))
    stopped = summary.get("guardrails", {}).get("stopped_because")
    state: State
    reason = None
    if is_running(run_dir):
        state = "running"
    elif failure:
        state, reason = "failed", str(failure.get("what", "unknown"))
    elif not last:
        state = "empty"
    elif summary.get("step") != step:
        state = "died"
    elif stopped:
        state, reason = "stopped", str(stopped)
    else:
        state = "interrupted" if summary["interrupted"] else "finished"
    trainer, model = spec.get("trainer") or {}, spec.get("model") or {}
    total = summary.get("total_steps") or trainer.get("total_training_steps")
    reward = last.get(_REWARD)
    return RunState(
        path=run_dir,
        preset=_presets(environment.get("command")) or str(trainer.get("experiment_name", "")),
        model=str(model.get("path", "")),
        step=step,
        total_steps=total,
        state=state,
        reason=reason,
        reward=None if reward is None else float(reward),
        validation=validation,
        started=environment.get("time"),
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
        lines = path.read_bytes().splitlines()
    except OSError:
        return last, {}
    for line in reversed(lines):
        if last and b'"val/' not in line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        last = last or row
        if rewards := validation_rewards(row):
            return last, rewards
    return last, {}


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
    except (psutil.Error, OSError, KeyError, ValueError):
        return False


def _presets(command: object) -> str:
    """The presets in a command line, joined by `+`."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    found = [word.split("=", 1)[1] for word in words if word.startswith("--preset=")]
    found += [after for word, after in pairwise(words) if word in {"-p", "--preset"}]
    return "+".join(found)
