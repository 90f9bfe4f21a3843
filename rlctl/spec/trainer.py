"""`trainer`: the run around the algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.spec.base import NullWord, Section, _one_or_many
from rlctl.spec.guardrails import GuardrailsSpec

Logger = Literal["console", "wandb", "tensorboard"]
#: What may become a directory: no separators, neither hidden nor `..`.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class TrainerSpec(Section):
    """Length, seed, tracking and checkpoints of the run."""

    logger: Annotated[list[Logger], BeforeValidator(_one_or_many)] = Field(default=["console"])
    """Where metrics go besides `metrics.jsonl`, which is always written."""
    project_name: str = Field(default="rlctl", pattern=NAME)
    """Project in W&B, and the folder under `runs/`."""
    experiment_name: str = Field(default="run", pattern=NAME)
    """Run name in W&B, and the start of the run directory's name."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training prompts."""
    total_training_steps: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Batches to train on; null: as many as `total_epochs` gives."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks started on this machine (processes, where there is no GPU)."""
    nnodes: int = Field(default=1, ge=1)
    """Machines. For more than one, start `rlctl train` under torchrun on each."""
    save_freq: int = Field(default=-1, ge=-1)
    """Checkpoint every this many steps, and at the end; -1: only at the end."""
    test_freq: int = Field(default=-1, ge=-1)
    """Validate every this many steps, and at start and end; -1: never."""
    critic_warmup: int = Field(default=0, ge=0)
    """Batches at the start that train the critic alone."""
    max_ckpt_to_keep: Annotated[int | None, NullWord] = Field(default=2, ge=1)
    """Checkpoints kept, newest first; null: all."""
    guardrails: GuardrailsSpec = GuardrailsSpec()
    rollouts_per_step: int = Field(default=32, ge=-1)
    """Responses per step written to `rollouts/` with their log-probs; 0: none, -1: all."""
    seed: int = Field(default=1, ge=0)
    """Seeds data order, sampling and initialisation."""
    run_dir: Annotated[str | None, NullWord] = None
    """Where everything goes; null: `runs/<project_name>/<experiment_name>-<time>`."""
