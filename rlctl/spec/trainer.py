"""Spec sections `trainer` (with `guardrails`) and `engine` (DeepSpeed)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.registry import TRACKERS
from rlctl.spec.base import Duration, NullWord, OpenMapping, Section, json_file, one_or_many
from rlctl.spec.parts import Registered

Logger = Annotated[str, Registered(TRACKERS)]
#: A valid directory name: no separators, neither hidden nor `..`.
NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class EngineSpec(Section):
    """The training engine (DeepSpeed)."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """What is sharded over ranks: 1 optimizer states, 2 and gradients, 3 and parameters."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the forward and backward pass. Where a spec does not set it: `bf16` if the GPU or the CPU
    (AMX-BF16, AVX512-BF16) computes it, else `fp32`, as the starting machine decides for all ranks."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What is kept in host memory: `optimizer` (states and float32 copies; stage 1 and up), `all` (the
    parameters too; stage 3). Saves memory on the GPU and costs time."""
    offload_base: bool = False
    """Under LoRA the frozen weights lie in host memory while a colocated vLLM samples: only one of the two
    copies is on the GPU at a time."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks that run each row together, every one a part of its tokens (DeepSpeed-Ulysses): activations of a
    long row are cut up. Must divide the ranks of a node, and the model's attention and key heads."""
    deepspeed: Annotated[OpenMapping, BeforeValidator(json_file)] = Field(default={})
    """Merged into DeepSpeed's configuration unchanged: a mapping, or the path of a JSON file with one."""


class GuardrailsSpec(Section):
    """Actions of training when a diagnosis rule fires; the thresholds are those of `rlctl diagnose`."""

    mode: Literal["off", "warn", "act"] = "warn"
    """`off`: no rule is evaluated; `warn`: actions are only reported; `act`: actions are taken."""
    ess_floor: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Raw effective sample size below which an update is far off-policy; null: that of diagnosis, 0.3."""
    on_low_ess: Literal["warn", "scale_lr", "skip_step"] = "scale_lr"
    """For one update below the floor. `scale_lr`: its learning rate × ESS / floor; `skip_step`: no update.
    After both the learning rate is halved until ESS recovers."""
    on_drift: Literal["warn", "skip_step"] = "skip_step"
    """For one update whose policy differs from the sampling policy by over 0.1 nats per token. `skip_step` as
    above."""
    on_heavy_tail: Literal["warn", "tighten"] = "tighten"
    """For raw ESS below the floor in successive batches. `tighten`: bounds of weights and rejection halve in
    log ρ until ESS recovers."""
    on_forecast: Literal["warn", "scale_lr", "tighten", "checkpoint_and_stop"] = "warn"
    """For a metric that reaches its critical level before the run ends if its trend goes on. `scale_lr`: the
    learning rate is halved at every examination until nothing is forecast; the others as above and below."""
    on_collapse: Literal["warn", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """For a run that no longer learns: no reward for 20 batches, no update for 11, or diverging responses."""


class TrainerSpec(Section):
    """Length, seed, tracking and checkpoints of the run."""

    logger: Annotated[list[Logger], BeforeValidator(one_or_many)] = Field(default=["console"])
    """Outputs besides `metrics.jsonl`, which is always written; `file.py:function` for your own."""
    project_name: str = Field(default="rlctl", pattern=NAME)
    """Project in W&B, and the folder under `runs/`."""
    experiment_name: str = Field(default="run", pattern=NAME)
    """Run name in W&B, and the start of the run directory's name."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training prompts."""
    total_training_steps: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Batches to train on; null: as many as `total_epochs` gives."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks started on this machine (CPU processes without a GPU)."""
    nnodes: int = Field(default=1, ge=1)
    """Machines. For more than one, start `rlctl train` under torchrun on each."""
    save_freq: int = Field(default=-1, ge=-1)
    """Steps between checkpoints, beside `save_every`; one more is saved at the end. -1: none by steps."""
    save_every: Annotated[Duration | None, NullWord] = "30min"
    """Time between checkpoints, such as `90s`, `30min` or `2h`; null: none by time."""
    keep_best: bool = True
    """Save after every validation that is better than all before, and keep the best (`checkpoints/best`)."""
    test_freq: int = Field(default=-1, ge=-1)
    """Steps between validations, also at start and end; -1: never."""
    critic_warmup: int = Field(default=0, ge=0)
    """Batches at the start that train the critic alone."""
    max_ckpt_to_keep: Annotated[int | None, NullWord] = Field(default=2, ge=1)
    """Checkpoints kept, newest first, beside the best; null: all."""
    hang_timeout: Duration = "20min"
    """The run is ended if no rank has gone on for this long; it says who was waited for, with all threads'
    stacks. A warning comes after a twentieth of it."""
    guardrails: GuardrailsSpec = GuardrailsSpec()
    rollouts_per_step: int = Field(default=32, ge=-1)
    """Responses per step written to `rollouts/` with their log-probs; 0: none, -1: all."""
    seed: int = Field(default=1, ge=0)
    """Seeds data order, sampling and initialisation."""
    run_dir: Annotated[str | None, NullWord] = None
    """Run directory; null: `runs/<project_name>/<experiment_name>-<time>`."""
