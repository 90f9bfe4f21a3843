"""What is evaluated: a run's newest checkpoint with its own validation data, or any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.engine.checkpoint import CHECKPOINTS, model_checksums, newest_intact
from rlctl.errors import UsageError
from rlctl.spec.load import RUN_SPEC_FILE, load_spec
from rlctl.spec.run_spec import RunSpec
from rlctl.tiny.embedded import ensure_embedded


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the data to ask it."""

    model_path: str  # Hugging Face directory or hub id
    data_files: list[str]  # Parquet in verl's row schema
    #: run_dir, step, spec: of the run it comes from, if it comes from one
    run_dir: Path | None = None
    step: int | None = None
    spec: RunSpec | None = None
    #: file of the model → SHA-256, where they are known
    checksums: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what the user should know, such as damaged checkpoints passed over


def find_target(model_or_run: str, data_files: list[str]) -> Target:
    """Decide whether a name is a run directory or a model, and find what belongs to it.

    Args:
        model_or_run: run directory, model directory or hub id.
        data_files: what to evaluate on; empty: the run's own validation files.

    Raises:
        UsageError: a model without data, or a run without a checkpoint, a readable spec, or
            validation files when it needs them.
    """
    path = Path(model_or_run).expanduser()
    if (path / RUN_SPEC_FILE).is_file():
        return _run_target(path, data_files)
    if data_files:
        return Target(str(path) if path.exists() else model_or_run, data_files)
    what = "is not a run directory" if path.exists() else "does not exist here, and a hub model needs data"
    raise UsageError(
        f"`{model_or_run}` {what}",
        where="MODEL_OR_RUN",
        fix=f"name a directory with a {RUN_SPEC_FILE}, such as runs/rlctl/run-…; for a model add --data FILE",
    )


def _run_target(run_dir: Path, data_files: list[str]) -> Target:
    spec = load_spec([], [run_dir / RUN_SPEC_FILE], []).spec
    checkpoint, notes = newest_intact(run_dir / CHECKPOINTS)
    if checkpoint is None:
        raise UsageError(
            "the run has no complete checkpoint" + (f" ({notes[0]})" if notes else ""),
            where=str(run_dir / CHECKPOINTS),
            fix="wait for one (trainer.save_freq says when), or resume the run to its end",
        )
    data_files = data_files or spec.data.val_files
    if not data_files and spec.is_embedded:
        data_files = [str(ensure_embedded(spec.trainer.seed).val_file)]
    if not data_files:
        raise UsageError(
            "the run has no validation files (data.val_files)", where=str(run_dir), fix="add --data FILE"
        )
    return Target(
        str(checkpoint.model_dir),
        data_files,
        run_dir,
        checkpoint.state.step,
        spec,
        checksums=model_checksums(checkpoint),
        notes=tuple(notes),
    )
