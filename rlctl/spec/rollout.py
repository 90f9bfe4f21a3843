"""Spec sections `data` and `rollout`: prompts, and sampling of responses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlctl.registry import ROLLOUT_ENGINES
from rlctl.spec.base import NullWord, OpenMapping, Section, StrList
from rlctl.spec.parts import Registered

#: Values of vLLM's `max_lora_rank`; an engine applies adapters of any rank up to its value.
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """Capabilities of a rollout engine. Checks of the spec and the trainer depend on them, not on its name.

    Attributes:
        modes: supported values of `rollout.mode`.
        dtypes: supported values of `rollout.dtype` besides null.
        starts_with_policy: it starts with the policy's weights; otherwise it gets them in the first sync.
        checks_syncs: each sync is checked: the trainer scores a few tokens that the engine samples.
        samples_while_training: values of `rollout.mode` in which it can sample while the trainer trains.
        applies_adapters: it receives only the LoRA adapter and applies it; otherwise it gets merged weights.
        takes_engine_kwargs: it reads `rollout.engine_kwargs`.
        frees_memory: with `rollout.free_cache_engine` it releases its GPU memory between calls.
        forms_batches: it accepts any number of prompts at once and forms batches internally.
        tensor_parallel: one engine's model can be sharded over several GPUs.
        min_temperature: the lowest temperature that it does not raise.
        reports_kept: when it can report the tokens that top_p, top_k and min_p kept: `never`, `top_k` (if
            rollout.top_k bounds their number) or `always`.
    """

    modes: frozenset[str] = frozenset({"colocated"})
    dtypes: frozenset[str] = frozenset({"fp32", "bf16"})
    starts_with_policy: bool = False
    checks_syncs: bool = True
    samples_while_training: frozenset[str] = frozenset()
    applies_adapters: bool = False
    takes_engine_kwargs: bool = False
    frees_memory: bool = False
    forms_batches: bool = False
    tensor_parallel: bool = False
    min_temperature: float = 0.0
    reports_kept: Literal["never", "top_k", "always"] = "never"


class DataSpec(Section):
    """Training and validation prompts (Parquet in verl's row schema)."""

    train_files: StrList = Field(default=[])
    """Parquet files, directories, or patterns such as `data/train-*.parquet`; empty together with
    `model.path: embedded` means the built-in task."""
    val_files: StrList = Field(default=[])
    """Validation prompts, same schema; empty: no validation (the built-in task has its own)."""
    train_batch_size: int = Field(default=128, ge=1)
    """Prompts per batch; each is answered `rollout.n` times."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens; `filter_overlong_prompts` decides about longer prompts."""
    max_response_length: int = Field(default=512, ge=1)
    """Largest number of sampled tokens."""
    filter_overlong_prompts: bool = True
    """Leave out prompts longer than `max_prompt_length` (they are counted); false: refuse to start."""
    chat_template_kwargs: OpenMapping = Field(default={})
    """Further arguments of the model's chat template: `data.chat_template_kwargs.enable_thinking=false`.
    null: not given."""
    shuffle: bool = True
    """Reshuffle the prompts every epoch, from `trainer.seed`."""


class ValKwargs(Section):
    """Sampling of responses to validation prompts."""

    n: int = Field(default=1, ge=1)
    """Responses per prompt; above 1 pass@k and maj@n are logged too."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0: the likeliest token, which needs n = 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""


class ServerSpec(Section):
    """Engines in separate processes, with `rollout.mode: server`."""

    replicas: int = Field(default=1, ge=1)
    """Engines to start: on each node of the run, on GPUs after `trainer.n_gpus_per_node`; by Ray, in all."""
    placement: Literal["auto", "nodes", "ray"] = "auto"
    """Where: on `nodes` of the run (where weights are files, on the first), or by `ray` wherever its
    cluster has free resources. `auto`: ray if RAY_ADDRESS is set."""
    urls: StrList = Field(default=[])
    """Running engines, on any node (`http://host:port`); if set, no engine is started."""
    weights_dir: str | None = None
    """Directory for new weights, visible to every engine; null: shared memory of this machine."""
    weight_transfer: Literal["auto", "broadcast", "files"] = "auto"
    """How engines get new weights: `broadcast` over NCCL (on CPUs gloo), or `files` in `weights_dir`. `auto`:
    broadcast on GPUs, files on CPUs, for adapters, and where no broadcast is possible."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds an engine may take to start or restart."""
    answer_timeout: float = Field(default=120.0, gt=0)
    """Seconds after which an engine that listens and does not answer counts as crashed."""
    max_restarts: int = Field(default=3, ge=0)
    """Largest number of restarts of crashed engines in one run."""

    @property
    def is_placed_by_ray(self) -> bool:
        """Whether Ray chooses the machines on which engines start."""
        has_cluster = self.placement == "auto" and "RAY_ADDRESS" in os.environ
        return not self.urls and (has_cluster or self.placement == "ray")


class RolloutSpec(Section):
    """Sampling of responses."""

    name: Annotated[str, Registered(ROLLOUT_ENGINES)] = "hf"
    """Engine: `hf` is Hugging Face generation in the trainer's process; `vllm`; `file.py:function` for your
    own."""
    engine_params: OpenMapping = Field(default={})
    """Parameters that a registered engine declares: `rollout.engine_params.NAME=VALUE`."""
    mode: Literal["colocated", "server"] = "colocated"
    """Of `vllm`: in the trainer's processes, one engine per rank (or per `tensor_model_parallel_size` ranks),
    or in separate processes."""
    n: int = Field(default=8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; log-probs of rollout and trainer are computed at it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 every ratio is biased by the mass cut off, unless `exact_sampling`."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the k likeliest tokens; -1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest one's probability."""
    exact_sampling: bool = False
    """Renormalise the trainer's log-probs (π_θ, π_old, π_ref) over the tokens that top_p, top_k and min_p
    left to sample from, so that both policies are of one kind."""
    max_num_seqs: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Sequences that one engine generates at once; null: as many as it is asked for or its memory holds."""
    dtype: Annotated[Literal["fp32", "bf16", "int8"] | None, NullWord] = None
    """Precision of the sampling copy; null: `engine.dtype`. `int8`: weights rounded to 8 bits per row."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share one engine's model; without servers those of as many ranks of one node."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of a GPU's memory that a vLLM engine may use, for weights and cache."""
    free_cache_engine: bool = True
    """On GPUs a colocated vLLM engine frees its memory while the trainer trains."""
    sync_every: int = Field(default=1, ge=1)
    """Batches between weight syncs; above 1 some responses come from older weights."""
    merge_lora: bool = False
    """Of `vllm` under LoRA: sync all weights with the adapter merged, instead of the adapter alone."""
    server: ServerSpec = ServerSpec()
    engine_kwargs: OpenMapping = Field(default={})
    """Further arguments of vLLM's engine, passed unchanged: `rollout.engine_kwargs.enforce_eager=true`."""
    max_staleness: int = Field(default=0, ge=0)
    """Sample up to this many batches ahead while the trainer trains, with the newest weights; 0: never."""
    staleness: int = Field(default=0, ge=0)
    """Train every batch on responses sampled this many batches ago, to study off-policyness."""
    val_kwargs: ValKwargs = ValKwargs()
