"""The rollout engine a spec asks for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from rlctl.engine.ranks import Ranks
from rlctl.errors import UsageError
from rlctl.rollout.completions import MERGE_LORA, vllm_missing
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import RolloutEngine
from rlctl.rollout.published_weights import PublishedWeights
from rlctl.rollout.replicas import Replicas, ReplicaSettings
from rlctl.rollout.versioned_dir import VersionedDir
from rlctl.rollout.vllm import VLLM_DTYPES, TrainedVLLMRollout
from rlctl.rollout.vllm_reachable import reachable
from rlctl.rollout.vllm_server import VLLMServerRollout
from rlctl.rollout.weights import ExpectedWeights
from rlctl.spec.passthrough import as_arguments
from rlctl.spec.rollout import VLLM_LORA_RANKS
from rlctl.spec.run_spec import RunSpec

ENGINE_LOGS = "engines"


def build_rollout(
    spec: RunSpec, model_path: str, model: Any, tokenizer: Any, ranks: Ranks, run_dir: Path
) -> RolloutEngine:
    """The engine this rank samples with; except for `hf` its weights come with the first sync.

    Args:
        spec: names it.
        model_path: directory or hub id of the policy.
        model: the policy, not yet wrapped by the training engine.
        tokenizer: of the policy.
        ranks: the processes of the run.
        run_dir: servers write their logs below it.

    Raises:
        EnvironmentFailure, UsageError: the engine cannot be had here, or refuses the model.
    """
    rollout = spec.rollout
    if rollout.name == "hf":
        return HFRollout(
            model, tokenizer, ranks.device, max_num_seqs=rollout.max_num_seqs, dtype=rollout.dtype
        )
    if spec.syncs_adapter and torch.cuda.is_available() and _dtype(spec) == "fp32":
        what = "vLLM's kernels for adapters know half precision only"
        raise UsageError(what, where="rollout.dtype", fix=f"write bf16; or {MERGE_LORA}")
    if rollout.mode == "server":
        return _on_servers(spec, model, tokenizer, ranks, run_dir)
    return TrainedVLLMRollout(
        model_path,
        tokenizer,
        ExpectedWeights(model),
        dtype=_dtype(spec),
        max_model_len=_longest(spec),
        max_num_seqs=rollout.max_num_seqs,
        seed=spec.trainer.seed,
        trust_remote_code=spec.model.trust_remote_code,
        max_lora_rank=_max_lora_rank(spec),
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleeps=rollout.free_cache_engine,
        device=ranks.device,
        engine_kwargs=rollout.engine_kwargs,
    )


def _on_servers(spec: RunSpec, model: Any, tokenizer: Any, ranks: Ranks, run_dir: Path) -> VLLMServerRollout:
    server = spec.rollout.server
    published = adapters = replicas = None
    if ranks.is_main:
        if server.urls:
            reachable(server.urls, server.start_timeout, lora_rank=spec.model.lora_rank * spec.syncs_adapter)
        elif importlib.util.find_spec("vllm") is None:
            raise vllm_missing(ModuleNotFoundError(name="vllm"))
        directory = Path(server.weights_dir).expanduser() if server.weights_dir else None
        published = PublishedWeights(model, tokenizer, directory)
        if spec.syncs_adapter:
            adapters = VersionedDir(directory)
        if not server.urls:
            replicas = Replicas(
                server.replicas, replica_settings(spec), published.latest, run_dir / ENGINE_LOGS
            )
    urls = server.urls or ranks.first(" ".join(replicas.urls) if replicas else "").split()
    return VLLMServerRollout(
        [url.rstrip("/") for url in urls],
        tokenizer,
        model.generation_config,
        device=ranks.device,
        rank=ranks.rank,
        agree=ranks.first,
        published=published,
        replicas=replicas,
        start_timeout=server.start_timeout,
        adapters=adapters,
        takes_adapter=spec.syncs_adapter,
    )


def replica_settings(spec: RunSpec) -> ReplicaSettings:
    """What a vLLM server of this run is started with.

    Raises:
        UsageError: there are not enough GPUs beside the trainer's.
    """
    rollout, trainers = spec.rollout, spec.trainer.n_gpus_per_node
    theirs = rollout.server.replicas * rollout.tensor_model_parallel_size
    if torch.cuda.is_available() and trainers + theirs > (visible := torch.cuda.device_count()):
        raise UsageError(
            f"the trainer takes {trainers} GPUs and the servers {theirs}, {visible} can be seen here",
            where="rollout.server.replicas × rollout.tensor_model_parallel_size",
            fix="lower one of them or trainer.n_gpus_per_node; or set rollout.mode: colocated",
        )
    return ReplicaSettings(
        dtype=VLLM_DTYPES[_dtype(spec)],
        max_model_len=_longest(spec),
        max_num_seqs=rollout.max_num_seqs or 256,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        first_gpu=trainers if torch.cuda.is_available() else None,
        trust_remote_code=spec.model.trust_remote_code,
        max_lora_rank=_max_lora_rank(spec),
        start_timeout=rollout.server.start_timeout,
        max_restarts=rollout.server.max_restarts,
        more_arguments=tuple(as_arguments(rollout.engine_kwargs)),
    )


def _max_lora_rank(spec: RunSpec) -> int:
    """What an engine is built for: the smallest rank vLLM knows that holds the adapter's; 0: merged."""
    if not spec.syncs_adapter:
        return 0
    return min(rank for rank in VLLM_LORA_RANKS if rank >= spec.model.lora_rank)


def _longest(spec: RunSpec) -> int:
    return spec.data.max_prompt_length + spec.data.max_response_length


def _dtype(spec: RunSpec) -> Any:
    return spec.rollout.dtype or spec.engine.dtype
