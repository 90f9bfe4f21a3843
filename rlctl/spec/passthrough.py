"""Options that are passed to vLLM and DeepSpeed unchanged, and the reserved ones that rlctl sets.

`rollout.engine_kwargs` is merged into the arguments of vLLM's `LLM`, or of `vllm serve`; `engine.deepspeed`
into DeepSpeed's configuration. `check_rollout` refuses an option that rlctl sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_LENGTH = "data.max_prompt_length + data.max_response_length"
_LORA = "model.lora_rank and rollout.merge_lora"
_DISTRIBUTION = "the sampling distribution is that of rollout.temperature, top_p, top_k, min_p"
_WEIGHTS = "the weights are those of the trained policy"
_OWN_BATCHES = "rlctl forms mini-batches and micro-batches itself"
_OWN_OPTIMIZER = "rlctl brings its own AdamW: actor.lr, actor.betas, actor.weight_decay"

#: Argument of vLLM's `LLM` → the spec key that sets it, or the reason why rlctl sets it.
VLLM_OWNERS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "rollout.dtype",
    "max_model_len": _LENGTH,
    "max_num_seqs": "rollout.max_num_seqs",
    "seed": "trainer.seed",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "distributed_executor_backend": "rollout.mode",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "enable_lora": _LORA,
    "max_lora_rank": _LORA,
    "generation_config": _DISTRIBUTION,
    "logprobs_mode": "rollout_log_probs must be those of the distribution sampled from",
    "max_logprobs": "rollout.top_k, rollout.exact_sampling and score_centering",
    "weight_transfer_config": "rollout.server.weight_transfer",
    "tokenizer_revision": "model.revision",
    "code_revision": "model.revision",
    "hf_overrides": "model.path",
    "load_format": _WEIGHTS,
    "skip_tokenizer_init": "rlctl samples from token ids and returns texts",
    "runner": "rlctl generates",
    "worker_cls": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "override_generation_config": _DISTRIBUTION,
    "logits_processors": _DISTRIBUTION,
    "pipeline_parallel_size": "rollout.server.replicas and rollout.tensor_model_parallel_size",
    "data_parallel_size": "rollout.server.replicas",
    "served_model_name": "rlctl names the model of its servers",
    "host": "rlctl chooses the address of its servers",
    "port": "rlctl chooses the address of its servers",
    "uds": "rlctl chooses the address of its servers",
    "root_path": "rlctl chooses the address of its servers",
    "api_key": "only this run knows the address of its servers",
}
#: The same for DeepSpeed's configuration; a name stands for all options below it too.
DEEPSPEED_OWNERS = {
    "train_batch_size": _OWN_BATCHES,
    "train_micro_batch_size_per_gpu": _OWN_BATCHES,
    "gradient_accumulation_steps": _OWN_BATCHES,
    "optimizer": _OWN_OPTIMIZER,
    "scheduler": "actor.lr_scheduler_type",
    "gradient_clipping": "actor.grad_clip",
    "zero_optimization.stage": "engine.zero_stage",
    "zero_optimization.offload_optimizer.device": "engine.offload",
    "zero_optimization.offload_param.device": "engine.offload",
    "zero_optimization.cpu_offload": "engine.offload",
    "zero_optimization.cpu_offload_param": "engine.offload",
    "bf16.enabled": "engine.dtype",
    "bfloat16": "engine.dtype",
    "torch_autocast": "engine.dtype",
    "data_types": "engine.dtype",
    "fp16": "engine.dtype (fp32 or bf16)",
    "amp": "engine.dtype (fp32 or bf16)",
    "zero_allow_untested_optimizer": _OWN_OPTIMIZER,
    "zero_force_ds_cpu_optimizer": _OWN_OPTIMIZER,
    "sequence_parallel_size": "engine.sequence_parallel",
    "tensor_parallel": "rlctl trains whole layers",
    "elasticity": _OWN_BATCHES,
}
#: Names at the top of DeepSpeed's configuration, which ignores all others.
DEEPSPEED_NAMES = (
    *DEEPSPEED_OWNERS,
    *("bf16", "seq_parallel_communication_data_type", "autotuning", "hybrid_engine", "pipeline", "comet"),
    *("data_efficiency", "curriculum_learning", "compression_training", "weight_quantization", "log_level"),
    *("vocabulary_size", "dataloader_drop_last", "datastates", "disable_python_gc", "expert_parallel"),
    *("managed_gradient_accumulation", "use_data_before_expert_parallelism", "progressive_layer_drop"),
    *("sparse_gradients", "sparse_attention", "eigenvalue", "nebula", "monitor_config"),
    *("zero_optimization", "activation_checkpointing", "communication_data_type", "comms_logger", "aio"),
    *("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "prescale_gradients", "dump_state"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "flops_profiler", "tensorboard", "csv_monitor"),
    *("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "optimizer", "scheduler"),
    *("gradient_accumulation_steps", "checkpoint", "timers", "compile", "disable_allgather", "wandb"),
)

#: Short names of `vllm serve` → names of `LLM`.
_VLLM_ALIASES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
}


def vllm_name(option: str) -> str:
    """The name that vLLM's `LLM` gives an option, which `vllm serve` also takes with dashes, or shortened."""
    name = option.replace("-", "_")
    return _VLLM_ALIASES.get(name, name)


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` updated with `more`; nested mappings are merged recursively."""
    result = dict(base)
    for key, value in more.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Converts vLLM options to arguments of `vllm serve`: `--name value`, `--flag` and `--no-flag`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            arguments += [f"--{flag}", text]
    return arguments
