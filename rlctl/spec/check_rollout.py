"""Contradictions of sampling: distributions the trainer does not know, and engines that cannot do it."""

from __future__ import annotations

from rlctl.errors import Problem
from rlctl.spec.check_algorithm import Check
from rlctl.spec.passthrough import passthrough_is_free
from rlctl.spec.rollout import VLLM_LORA_RANKS, ServerSpec
from rlctl.spec.run_spec import RunSpec

#: vLLM raises temperatures below this one to it, with a warning in its log.
VLLM_COLDEST = 0.01


def sampling_is_whole(spec: RunSpec) -> list[Problem]:
    """Trainer log-probs are over the full vocabulary; truncated samples differ by the mass cut."""
    rollout = spec.rollout
    truncated = {"top_p": rollout.top_p < 1.0, "top_k": rollout.top_k > 0, "min_p": rollout.min_p > 0.0}
    neutral = {"top_p": "1.0", "top_k": "-1", "min_p": "0.0"}
    return [
        Problem(
            "warning",
            f"rollout.{key}",
            "samples come from a truncated distribution, the trainer's log-probs from the full one: "
            "every ratio ρ is biased by the mass cut off",
            f"set it to {neutral[key]} for training",
        )
        for key, is_truncated in truncated.items()
        if is_truncated
    ]


def temperature_explores(spec: RunSpec) -> list[Problem]:
    """Near-greedy sampling answers a prompt n times alike: no spread, no advantage, nothing learned."""
    if spec.rollout.temperature >= 0.1:
        return []
    what = f"at temperature {spec.rollout.temperature:g} the responses to one prompt hardly differ"
    return [Problem("warning", "rollout.temperature", what, "1.0 is usual for training")]


def top_k_is_possible(spec: RunSpec) -> list[Problem]:
    """`top_k: 0` means "all" to some engines and "none" to others."""
    if spec.rollout.top_k != 0:
        return []
    return [Problem("error", "rollout.top_k", "0 tokens to sample from", "write -1 for all tokens")]


def validation_samples_differ(spec: RunSpec) -> list[Problem]:
    """Greedy responses to one prompt are all the same."""
    validation = spec.rollout.val_kwargs
    if validation.n == 1 or validation.temperature > 0.0:
        return []
    what = f"{validation.n} greedy responses to a validation prompt would be one (temperature 0)"
    fix = "sample at a temperature above 0, such as 1.0, or set rollout.val_kwargs.n=1"
    return [Problem("error", "rollout.val_kwargs.temperature", what, fix)]


def engine_is_whole(spec: RunSpec) -> list[Problem]:
    """What only vLLM knows, or only its servers."""
    rollout, problems = spec.rollout, []
    in_servers = rollout.name == "vllm" and rollout.mode == "server"
    if rollout.name == "hf" and rollout.mode == "server":
        what = "Hugging Face generation runs in the trainer's process only"
        problems.append(Problem("error", "rollout.mode", what, "set rollout.name: vllm, or mode: colocated"))
    if rollout.name == "vllm" and rollout.dtype == "int8":
        what = "vLLM samples in fp32 or bf16 here"
        problems.append(Problem("error", "rollout.dtype", what, "write fp32, bf16 or null"))
    if rollout.tensor_model_parallel_size > 1 and not in_servers:
        what = "an engine over several GPUs needs processes of its own"
        fix = "set rollout.name: vllm and rollout.mode: server, or 1"
        problems.append(Problem("error", "rollout.tensor_model_parallel_size", what, fix))
    if rollout.server != ServerSpec() and not in_servers:
        what = "has no effect: no engine runs in a process of its own"
        fix = "set rollout.name: vllm and rollout.mode: server, or leave it out"
        problems.append(Problem("warning", "rollout.server", what, fix))
    if unclear := [url for url in rollout.server.urls if not url.startswith(("http://", "https://"))]:
        what = f"no address of a server: {', '.join(unclear)}"
        problems.append(Problem("error", "rollout.server.urls", what, "write http://host:port"))
    if rollout.name == "vllm" and rollout.temperature < VLLM_COLDEST:
        what = f"vLLM samples at {VLLM_COLDEST} whatever lies below, the trainer's log-probs would not"
        problems.append(Problem("error", "rollout.temperature", what, f"use {VLLM_COLDEST} or more"))
    if rollout.server.urls and rollout.server.weights_dir is None:
        what = "shared memory of this machine is not seen by engines on others"
        fix = "a directory on a file system that all of them see"
        problems.append(Problem("warning", "rollout.server.weights_dir", what, fix))
    return problems


def ahead_is_possible(spec: RunSpec) -> list[Problem]:
    """Sampling ahead needs an engine that can work while the trainer does."""
    rollout = spec.rollout
    if not rollout.max_staleness:
        return []
    problems = []
    if rollout.staleness:
        what = "batches are either exactly so old (rollout.staleness) or at most (rollout.max_staleness)"
        problems.append(Problem("error", "rollout.staleness", what, "set one of them to 0"))
    if rollout.name == "vllm" and rollout.mode == "colocated":
        what = "a colocated vLLM engine takes turns with the trainer, it cannot sample meanwhile"
        problems.append(Problem("error", "rollout.max_staleness", what, "set rollout.mode: server, or 0"))
    return problems


def adapter_can_be_sampled_with(spec: RunSpec) -> list[Problem]:
    """vLLM applies adapters up to a rank; where there is none to apply, none can be merged."""
    largest = VLLM_LORA_RANKS[-1]
    if spec.syncs_adapter and spec.model.lora_rank > largest:
        what, fix = f"vLLM applies adapters up to rank {largest}", "use no more, or rollout.merge_lora: true"
        return [Problem("error", "model.lora_rank", what, fix)]
    if spec.rollout.merge_lora and (spec.rollout.name == "hf" or not spec.model.lora_rank):
        why = "Hugging Face rollouts always merge" if spec.model.lora_rank else "model.lora_rank is 0"
        return [Problem("warning", "rollout.merge_lora", f"has no effect: {why}", "leave it out")]
    return []


#: Every contradiction and the keys it reads.
ROLLOUT_CHECKS: dict[Check, tuple[str, ...]] = {
    sampling_is_whole: ("rollout.top_p", "rollout.top_k", "rollout.min_p"),
    temperature_explores: ("rollout.temperature",),
    top_k_is_possible: ("rollout.top_k",),
    validation_samples_differ: ("rollout.val_kwargs.n", "rollout.val_kwargs.temperature"),
    engine_is_whole: (
        "rollout.name",
        "rollout.mode",
        "rollout.dtype",
        "rollout.tensor_model_parallel_size",
        "rollout.temperature",
        "rollout.server.urls",
    ),
    ahead_is_possible: ("rollout.max_staleness", "rollout.staleness", "rollout.name", "rollout.mode"),
    passthrough_is_free: ("rollout.engine_kwargs", "engine.deepspeed", "rollout.name", "rollout.server.urls"),
    adapter_can_be_sampled_with: ("model.lora_rank", "rollout.name", "rollout.merge_lora"),
}
