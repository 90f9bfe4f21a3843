"""Reads a run directory: spec, metrics, rollouts, checkpoints. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import UsageError
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.run_dir import ENVIRONMENT_FILE, SPEC_FILE, read_mapping
from rlctl.track.run_state import State, read_state

if TYPE_CHECKING:
    import pyarrow as pa

    from rlctl.spec.run_spec import RunSpec

_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Files of a run; also works while the run is training."""

    path: Path

    @property
    def spec(self) -> RunSpec:
        """The resolved spec.

        Raises:
            UsageError: `spec.yaml` is missing or cannot be read.
        """
        from rlctl.errors import SpecError
        from rlctl.spec.load import recorded_spec

        try:
            return recorded_spec(self.path / SPEC_FILE)
        except SpecError as error:
            raise UsageError(str(error), where=str(self.path / SPEC_FILE)) from error

    @property
    def state(self) -> State:
        """`finished`, `stopped` by the guardrails, `interrupted`, `running`, `failed`, `died` or `empty`."""
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
        return sorted((self.path / _CHECKPOINTS).glob("step_*[0-9]"))

    def metrics(self) -> pa.Table:
        """Metrics with one row per logged step and one float64 column per metric; null if not logged.

        `.to_pandas()` converts to a data frame. An incomplete last line is ignored.

        Raises:
            UsageError: there is no `metrics.jsonl`, or a line before the last is damaged.
        """
        import pyarrow as pa

        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {
            name: pa.array([_number(row.get(name)) for row in rows], pa.float64())
            for name in names
            if name not in {"step", "timestamp"}
        }
        steps = pa.array([row["step"] for row in rows], pa.int64())
        stamps = pa.array([row.get("timestamp") for row in rows], pa.string())
        return pa.table({"step": steps, "timestamp": stamps, **columns})

    def rollouts(self, step: int | None = None) -> pa.Table:
        """Dumped responses of a step (None: all) with the per-token log-probs of both policies, one per row.

        Raises:
            UsageError: the run has no dumped rollouts.
        """
        import pyarrow.dataset as ds

        condition = None if step is None else ds.field("step") == step
        return ds.dataset(self._rollout_files()).to_table(filter=condition)

    def rollout_steps(self) -> list[int]:
        """Steps with dumped responses, ascending.

        Raises:
            UsageError: the run has no dumped rollouts.
        """
        import pyarrow.compute as pc
        import pyarrow.dataset as ds

        table = ds.dataset(self._rollout_files()).to_table(columns=["step"])
        return sorted(pc.unique(table["step"]).to_pylist())

    def _rollout_files(self) -> list[str]:
        files = sorted(map(str, (self.path / "rollouts").glob("*.parquet")))
        if not files:
            raise UsageError(
                "the run saved no rollouts",
                where=str(self.path),
                fix="train with trainer.rollouts_per_step=-1",
            )
        return files

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl` as logged; an incomplete last line is ignored.

        Raises:
            UsageError: as for `metrics`.
        """
        file = self.path / METRICS_FILE
        try:
            lines = file.read_bytes().splitlines()  # bytes: `str.splitlines` splits at more separators
        except OSError as error:
            what = f"the metrics cannot be read: {error.strerror}"
            raise UsageError(what, where=str(file)) from error
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                if number < len(lines):
                    raise UsageError("not a line of JSON", where=f"{file}:{number}") from None
        return rows


def open_run(path: str | Path) -> RunRecord:
    """Opens a run directory.

    Raises:
        UsageError: the path is not a run directory.
    """
    if not isinstance(path, str | Path):
        raise UsageError(f"is a {type(path).__name__}", where="path", fix="give the path of a run directory")
    directory = Path(path).expanduser()
    if not (directory / SPEC_FILE).is_file():
        what = f"not a run directory: it holds no {SPEC_FILE}"
        raise UsageError(what, where=str(path), fix="name a directory such as runs/rlctl/run-…")
    return RunRecord(directory)


def log_ratios(row: Mapping[str, Any]) -> list[float]:
    """Training log-prob minus rollout log-prob of each token of a row of `RunRecord.rollouts`, in nats."""
    pairs = zip(row["training_log_probs"], row["rollout_log_probs"], strict=True)
    return [trained - sampled for trained, sampled in pairs]


def steps_in_words(steps: Sequence[int]) -> str:
    """Formats ascending steps compactly, for example `steps 1 to 4, 7`."""
    starts = [step for step in steps if step - 1 not in set(steps)]
    ends = [step for step in steps if step + 1 not in set(steps)]
    spans = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    shown = spans if len(spans) <= 8 else [*spans[:7], f"… {spans[-1]}"]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(shown)


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]
