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
    """ZeRO stage: what is sharded over the ranks. 1: optimizer states; 2: also gradients; 3: also
    parameters."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of the forward and backward pass. If not set: `bf16` if the GPU or the CPU (AMX-BF16,
    AVX512-BF16) of the machine that starts the run supports it, else `fp32`; the same for all ranks."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Offloading to host memory: `optimizer` (states and float32 copies; from stage 1 on) or `all` (also the
    parameters; stage 3). Saves GPU memory and costs time."""
    offload_base: bool = False
    """With LoRA: move the frozen weights to host memory while a colocated vLLM samples, so that only one of
    the two copies is on the GPU at a time."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the tokens of each row (DeepSpeed-Ulysses), which reduces the activations
    per rank. Must divide the ranks of a node, and the model's attention and key heads."""
    deepspeed: Annotated[OpenMapping, BeforeValidator(json_file)] = Field(default={})
    """Options that are merged into DeepSpeed's configuration unchanged: a mapping, or the path of a JSON
    file."""

    @property
    def width(self) -> int:
        """Bytes per number in `dtype`."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def effective_stage(self) -> int:
        """The ZeRO stage in effect: in bf16 at least 1, as the engine keeps float32 copies like stage 1."""
        return self.zero_stage if self.dtype == "fp32" else max(self.zero_stage, 1)


class GuardrailsSpec(Section):
    """Actions of training when a diagnosis rule fires; the thresholds are those of `rlctl diagnose`."""

    mode: Literal["off", "warn", "act"] = "warn"
    """Mode of the guardrails. `off`: no rule is evaluated; `warn`: actions are only reported; `act`: actions
    are taken."""
    ess_floor: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Raw effective sample size (ESS) below which an update counts as far off-policy; null: 0.3, as in
    diagnosis."""
    on_low_ess: Literal["warn", "scale_lr", "skip_step"] = "scale_lr"
    """Action on an update with raw ESS below the floor. `scale_lr`: multiply its learning rate by ESS /
    floor; `skip_step`: skip it. Both also halve the learning rate of the following updates; 11 updates
    without an alarm undo one halving."""
    on_drift: Literal["warn", "skip_step"] = "skip_step"
    """Action on an update if trained and sampling policy differ by more than 0.1 nats per token. `skip_step`:
    as in `on_low_ess`."""
    on_heavy_tail: Literal["warn", "tighten"] = "tighten"
    """Action if the median raw ESS of 11 batches is below the floor. `tighten`: halve the bounds of weights
    and rejection in log ρ until ESS recovers."""
    on_forecast: Literal["warn", "scale_lr", "tighten", "checkpoint_and_stop"] = "warn"
    """Action if the trend of a metric reaches its critical level before the end of the run. `scale_lr`: halve
    the learning rate at every check with such a forecast, and double it back at every other check; `tighten`
    as in `on_heavy_tail`, `checkpoint_and_stop` as in `on_collapse`."""
    on_collapse: Literal["warn", "checkpoint_and_stop"] = "checkpoint_and_stop"
    """Action if the run no longer learns: no reward in 20 batches, no update in 11, or degenerate
    responses."""


class TrainerSpec(Section):
    """Length, seed, tracking and checkpoints of the run."""

    logger: Annotated[list[Logger], BeforeValidator(one_or_many)] = Field(default=["console"])
    """Trackers in addition to `metrics.jsonl`, which is always written; `file.py:function`: a user-defined
    one."""
    project_name: str = Field(default="rlctl", pattern=NAME)
    """Project name in trackers such as W&B, and directory under `runs/`."""
    experiment_name: str = Field(default="run", pattern=NAME)
    """Run name in trackers such as W&B, and prefix of the run directory's name."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the training prompts."""
    total_training_steps: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Number of batches to train on; null: as many as `total_epochs` contains."""
    n_gpus_per_node: int = Field(default=1, ge=1)
    """Ranks per machine, one per GPU (CPU processes without GPUs)."""
    nnodes: int = Field(default=1, ge=1)
    """Number of machines. For more than one, start `rlctl train` with torchrun on each."""
    save_freq: int = Field(default=-1, ge=-1)
    """Steps between checkpoints, in addition to `save_every`; -1: none by steps. A last checkpoint is saved
    at the end in any case."""
    save_every: Annotated[Duration | None, NullWord] = "30min"
    """Time between checkpoints, such as `90s`, `30min` or `2h`; null: none by time."""
    keep_best: bool = True
    """Save a checkpoint after every validation that is the best so far, and keep the best
    (`checkpoints/best`)."""
    test_freq: int = Field(default=-1, ge=-1)
    """Steps between validations; also validates at start and end. -1: never."""
    critic_warmup: int = Field(default=0, ge=0)
    """Number of batches at the start that train only the critic."""
    max_ckpt_to_keep: Annotated[int | None, NullWord] = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, in addition to the best; null: all."""
    hang_timeout: Duration = "20min"
    """End the run if no rank makes progress for this long; the error names the rank that is waited for and
    the file with the stacks of all threads. A warning is printed after a twentieth of this time."""
    guardrails: GuardrailsSpec = GuardrailsSpec()
    rollouts_per_step: int = Field(default=32, ge=-1)
    """Responses per step that are written to `rollouts/` with their log-probs, from the main rank's share of
    the batch; 0: none, -1: the whole share."""
    seed: int = Field(default=1, ge=0)
    """Seed of data order, sampling and initialisation."""
    run_dir: Annotated[str | None, NullWord] = None
    """Run directory; null: `runs/<project_name>/<experiment_name>-<time>`."""
