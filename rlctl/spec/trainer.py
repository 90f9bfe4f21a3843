"""`trainer`, its guardrails, and `engine` (DeepSpeed)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.registry import TRACKERS
from rlctl.spec.base import NullWord, OpenMapping, Section, json_file, one_or_many
from rlctl.spec.parts import Registered

Logger = Annotated[str, Registered(TRACKERS)]
#: What may become a directory: no separators, neither hidden nor `..`.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class EngineSpec(Section):
    """The training engine (DeepSpeed)."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over ranks: 1 optimizer states, 2 and gradients, 3 and parameters."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the forward and backward pass."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: `optimizer` (states and float32 copies; stage 1 and up), `all` (the
    parameters too; stage 3). Saves memory on the GPU and costs time."""
    deepspeed: Annotated[OpenMapping, BeforeValidator(json_file)] = Field(default={})
    """Merged into DeepSpeed's configuration, as it is: a mapping, or the path of a JSON file with one."""


class GuardrailsSpec(Section):
    """The rules' levels are diagnosis's own; here is what follows from them."""

    mode: Literal["off", "warn", "act"] = "warn"
    """Whether rules are watched while training, and whether their actions are taken or only named."""
    ess_floor: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Raw effective sample size under which an update is far off-policy; null: diagnosis's level, 0.3."""
    on_low_ess: Literal["warn", "scale_lr", "skip_step"] = "scale_lr"
    """One update under the floor. `scale_lr`: its rate × ESS / floor; `skip_step`: no update. After both the
    rate is halved until updates are well again."""
    on_drift: Literal["warn", "skip_step"] = "skip_step"
    """One update at which the policy is over 0.1 nats per token from the one that sampled. `skip_step` as
    above."""
    on_heavy_tail: Literal["warn", "tighten"] = "tighten"
    """Raw ESS under the floor batch after batch. `tighten`: bounds of weights and rejection halve in log ρ
    until it recovers."""
    on_collapse: Literal["warn", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """Nothing is learned any more: no reward for 20 batches, no update for 11, or a spiral into gibberish."""


class TrainerSpec(Section):
    """Length, seed, tracking and checkpoints of the run."""

    logger: Annotated[list[Logger], BeforeValidator(one_or_many)] = Field(default=["console"])
    """Where metrics go besides `metrics.jsonl`, which is always written; `file.py:function` for your own."""
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
