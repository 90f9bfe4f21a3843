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
    "generation_config": "the sampling distribution is that of rollout.temperature, top_p, top_k, min_p",
    "logprobs_mode": "rollout_log_probs must be those of the distribution sampled from",
    "max_logprobs": "rollout.top_k, rollout.exact_sampling and score_centering",
    "weight_transfer_config": "rollout.server.weight_transfer",
    "served_model_name": "rlctl names the model of its servers",
    "host": "rlctl chooses the address of its servers",
    "port": "rlctl chooses the address of its servers",
}
#: The same for DeepSpeed's configuration; a key that ends in a dot matches all keys below it.
DEEPSPEED_OWNERS = {
    "train_batch_size": _OWN_BATCHES,
    "train_micro_batch_size_per_gpu": _OWN_BATCHES,
    "gradient_accumulation_steps": _OWN_BATCHES,
    "optimizer.": _OWN_OPTIMIZER,
    "scheduler.": "actor.lr_scheduler_type",
    "gradient_clipping": "actor.grad_clip",
    "zero_optimization.stage": "engine.zero_stage",
    "zero_optimization.offload_optimizer.device": "engine.offload",
    "zero_optimization.offload_param.device": "engine.offload",
    "bf16.enabled": "engine.dtype",
    "fp16.": "engine.dtype (fp32 or bf16)",
    "amp.": "engine.dtype (fp32 or bf16)",
    "zero_allow_untested_optimizer": _OWN_OPTIMIZER,
    "zero_force_ds_cpu_optimizer": _OWN_OPTIMIZER,
}


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
