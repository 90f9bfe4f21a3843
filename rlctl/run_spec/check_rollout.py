"""Checks of sampling: truncated distributions, options that an engine does not support, and passed options.

`rollout.engine_kwargs` is merged into the arguments of vLLM's `LLM`, or of `vllm serve`; `engine.deepspeed`
into DeepSpeed's configuration. An option that rlctl sets is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.registry import ROLLOUT_ENGINES
from rlctl.run_spec.base import param_problems
from rlctl.run_spec.check import LEAVE_OUT, Problems, error, spec_check, warning
from rlctl.run_spec.keys import closest, flat
from rlctl.run_spec.machine import gpus, gpus_are_hidden
from rlctl.run_spec.rollout import VLLM_LORA_RANKS
from rlctl.run_spec.run_spec import RunSpec

_TABLES = tomllib.loads(Path(__file__).with_name("engine_options.toml").read_text(encoding="utf-8"))
#: Argument of vLLM's `LLM` → the spec key that sets it, or the reason why rlctl sets it; the same for options
#: of DeepSpeed's configuration, in which a name stands for all options below it too.
VLLM_OWNERS, DEEPSPEED_OWNERS = (
    {option: owner for owner, options in _TABLES[engine].items() for option in options.split()}
    for engine in ("vllm", "deepspeed")
)
#: Names at the top of DeepSpeed's configuration, which ignores all others.
DEEPSPEED_NAMES = (*DEEPSPEED_OWNERS, *_TABLES["deepspeed_names"]["names"].split())
#: Short names of `vllm serve` → names of `LLM`.
_VLLM_ALIASES = {f"{name[0]}p": f"{name}_parallel_size" for name in ("tensor", "pipeline", "data")}


@spec_check
def distribution_is_complete(spec: RunSpec) -> Problems:
    """Truncated sampling biases ρ, because the trainer's log-probs are over the full vocabulary.

    `exact_sampling` restricts them to the tokens that the engine kept, so the engine must report these.
    """
    rollout = spec.rollout
    can = spec.rollout_engine.reports_kept
    truncated = {
        "top_p": (rollout.top_p < 1.0, "1.0"),
        "top_k": (rollout.top_k > 0, "-1"),
        "min_p": (rollout.min_p > 0.0, "0.0"),
    }
    message = "samples come from a truncated distribution, the trainer's log-probs from the full one: "
    message += "every ratio ρ is biased by the removed probability mass"
    fix = "" if can == "never" else ", or set rollout.exact_sampling: true"
    if can == "top_k" and rollout.top_k < 1:
        fix += " and rollout.top_k"
    for name, (is_truncated, neutral) in truncated.items():
        if is_truncated and not rollout.exact_sampling:
            yield warning(f"rollout.{name}", message, f"set it to {neutral} for training{fix}")
    key = "rollout.exact_sampling"
    if not rollout.exact_sampling:
        return
    if not any(is_truncated for is_truncated, _ in truncated.values()):
        message = "has no effect: rollout.top_p, top_k and min_p remove no tokens"
        yield warning(key, message, LEAVE_OUT)
    elif can == "never":
        message = f"rollout.name: {rollout.name} does not report which tokens truncation kept"
        yield error(key, message, "set rollout.name: hf, or sample with top_p=1, top_k=-1 and min_p=0")
    elif can == "top_k" and rollout.top_k < 1:
        message = f"{rollout.name} lists a bounded number of tokens, and rollout.top_k: -1 bounds none"
        yield error(key, message, "set rollout.top_k, for example to 50; or rollout.name: hf")


@spec_check
def temperature_explores(spec: RunSpec) -> Problems:
    """Near-greedy responses to one prompt are almost the same: advantages and gradients are close to zero."""
    if spec.rollout.temperature < 0.1:
        message = (
            f"at temperature {spec.rollout.temperature:g} the responses to one prompt are nearly the same"
        )
        yield warning("rollout.temperature", message, "1.0 is usual for training")


@spec_check
def gpu_samples_fast(spec: RunSpec) -> Problems:
    """Hugging Face generation leaves a GPU idle most of the time."""
    if not gpus_are_hidden() and gpus():
        yield from slow_on_a_gpu(spec)


def slow_on_a_gpu(spec: RunSpec) -> Problems:
    """A warning if the rollout engine is slow on a GPU."""
    if spec.rollout_engine.slow_on_gpu and not spec.is_embedded:
        yield warning(
            "rollout.name", spec.rollout_engine.slow_on_gpu, 'rollout.name=vllm (pip install "rlctl[vllm]")'
        )


@spec_check
def top_k_is_possible(spec: RunSpec) -> Problems:
    """`top_k: 0` means "all" in some engines and "none" in others."""
    if spec.rollout.top_k == 0:
        yield error("rollout.top_k", "there are 0 tokens to sample from", "write -1 for all tokens")


@spec_check
def validation_samples_differ(spec: RunSpec) -> Problems:
    """Greedy responses to one prompt are all the same."""
    validation = spec.rollout.val_kwargs
    if validation.n > 1 and validation.temperature == 0.0:
        message = (
            f"all {validation.n} greedy responses to a validation prompt would be the same (temperature 0)"
        )
        fix = "use a temperature above 0, for example 1.0, or set rollout.val_kwargs.n: 1"
        yield error("rollout.val_kwargs.temperature", message, fix)


@spec_check
def engine_supports_it(spec: RunSpec) -> Problems:
    """Some options are supported only by some engines, or only by engines in separate processes."""
    rollout = spec.rollout
    urls = spec.rollout.server.urls
    engine = spec.rollout_engine
    has_servers = spec.has_rollout_servers
    if rollout.mode not in engine.modes:
        message = f"{rollout.name} has no mode {rollout.mode}, only {_listed(engine.modes)}"
        fix = "set mode: colocated, or rollout.name: vllm" if rollout.mode == "server" else "set mode: server"
        yield error("rollout.mode", message, fix)
    if rollout.dtype is not None and rollout.dtype not in engine.dtypes:
        message = f"{rollout.name} samples in {_listed(engine.dtypes)}"
        yield error("rollout.dtype", message, f"write {', '.join(sorted(engine.dtypes))} or null")
    shared = rollout.tensor_model_parallel_size
    ranks = spec.trainer.n_gpus_per_node
    if shared > 1 and not (engine.tensor_parallel or has_servers):
        message = f"an engine of {rollout.name} runs on one GPU"
        yield error("rollout.tensor_model_parallel_size", message, "use 1, or set rollout.name: vllm")
    elif ranks % shared and not has_servers:
        message = f"{ranks} ranks of a node cannot form groups of {shared}, which run one engine each"
        fix = "use a divisor of trainer.n_gpus_per_node, or set rollout.mode: server"
        yield error("rollout.tensor_model_parallel_size", message, fix)
    unclear = [url for url in urls if not url.startswith(("http://", "https://"))]
    if unclear:
        message = f"not an address of a server: {', '.join(unclear)}"
        yield error("rollout.server.urls", message, "write http://host:port")
    if rollout.temperature < engine.min_temperature:
        lowest = f"{engine.min_temperature:g}"
        message = (
            f"{rollout.name} raises lower temperatures to {lowest}; the trainer's log-probs would not match"
        )
        yield error("rollout.temperature", message, f"use {lowest} or more")
    transfer = rollout.server.weight_transfer
    if transfer == "broadcast" and has_servers and spec.syncs_adapter:
        message = "adapters are sent as files"
        yield error("rollout.server.weight_transfer", message, "write auto, or set rollout.merge_lora: true")
    if urls and rollout.server.weights_dir is None and transfer != "broadcast":
        message = "engines on other machines cannot read the shared memory of this machine"
        yield warning(
            "rollout.server.weights_dir", message, "a directory on a file system that all of them can access"
        )
    yield from param_problems(ROLLOUT_ENGINES, rollout.name, "rollout.engine_params", rollout.engine_params)


@spec_check
def sampling_ahead_is_possible(spec: RunSpec) -> Problems:
    """Sampling ahead needs an engine that can sample while the trainer trains."""
    rollout = spec.rollout
    engine = spec.rollout_engine
    if not rollout.max_staleness:
        return
    if rollout.staleness:
        message = "rollout.staleness sets the exact age of a batch, rollout.max_staleness the largest"
        yield error("rollout.staleness", message, "set one of them to 0")
    if rollout.mode not in engine.samples_while_training:
        has_servers = "server" in engine.samples_while_training
        message = f"{rollout.name} and the trainer run in turn: it cannot sample during training"
        servers = f"rollout.mode: server{'' if has_servers else ' and rollout.name: vllm'}"
        yield error("rollout.max_staleness", message, f"set it to 0, or {servers}")


@spec_check
def sampling_in_flight_is_possible(spec: RunSpec) -> Problems:
    """Only engines in separate processes, which report the version of each token, sample during a sync."""
    rollout = spec.rollout
    key = "rollout.in_flight"
    if rollout.paces and not rollout.in_flight:
        message = "only sampling in flight can be paced"
        yield error("rollout.beyond_max_age", message, "write drop, or set rollout.in_flight: true")
    if not rollout.in_flight:
        return
    if rollout.mode not in spec.rollout_engine.samples_in_flight:
        message = (
            f"{rollout.name} with rollout.mode: {rollout.mode} cannot sample while its weights are updated"
        )
        fix = "set rollout.name: vllm and rollout.mode: server; or leave it out"
        yield error(key, message, f"{fix}, and set rollout.max_staleness to sample ahead")
    if not rollout.max_staleness:
        message = "nothing is sampled during training: rollout.max_staleness is 0"
        yield error(key, message, "set rollout.max_staleness to 1 or more")
    if spec.syncs_adapter:
        message = (
            "a response keeps the adapter that it began with, and its tokens would have the wrong version"
        )
        yield error(key, message, "set rollout.merge_lora: true")
    if spec.environment.lockstep:
        message = "engines are used as soon as a turn is due"
        yield error("environment.lockstep", f"{key}: {message}", "set one of them to false")
    if rollout.paces and spec.batches_ahead < 0:
        message = f"the weights of the engine are up to {spec.updates_per_batch * (rollout.sync_every - 1)} "
        message += "updates old when a group begins (rollout.sync_every)"
        yield error("rollout.max_age_updates", message, "set it to this number or more, or sync_every: 1")


@spec_check
def passthrough_is_free(spec: RunSpec) -> Problems:
    """Options passed to an engine must not contradict what the spec sets."""
    given = spec.rollout.engine_kwargs
    key = "rollout.engine_kwargs"
    if given and not spec.rollout_engine.takes_engine_kwargs:
        message = f"has no effect: rollout.name is {spec.rollout.name}"
        yield error(key, message, f"{LEAVE_OUT}, or set rollout.name: vllm")
    elif given and spec.rollout.server.urls:
        message = "has no effect on servers that run already"
        yield error(key, message, "start them with these options, and leave it out")
    # Servers may choose how vLLM places its workers; in the trainer's processes the ranks are the workers.
    free = {"distributed_executor_backend"} if spec.has_rollout_servers else set()
    owners = {option: owner for option, owner in VLLM_OWNERS.items() if option not in free}
    yield from _owned(key, given, owners, "vLLM's", _vllm_name)
    yield from _owned("engine.deepspeed", spec.engine.deepspeed, DEEPSPEED_OWNERS, "DeepSpeed's")
    for name in spec.engine.deepspeed:
        if name in DEEPSPEED_NAMES:
            continue
        key = f"engine.deepspeed.{name}"
        meant = closest(name, DEEPSPEED_NAMES, cutoff=0.7)
        if meant:
            yield error(key, "DeepSpeed ignores unknown names", f"write {meant}")
        else:
            yield warning(key, "this name is not known here, and DeepSpeed ignores unknown names", LEAVE_OUT)


def _vllm_name(option: str) -> str:
    """The name in vLLM's `LLM` of an option, which `vllm serve` also takes with dashes, or shortened."""
    name = option.replace("-", "_")
    return _VLLM_ALIASES.get(name, name)


def _listed(names: frozenset[str]) -> str:
    return " or ".join(sorted(names))


def _owned(
    key: str,
    given: Mapping[str, Any],
    owners: Mapping[str, str],
    whose: str,
    name_of: Callable[[str], str] = str,
) -> Problems:
    for option, value in flat(given, keeps_empty=True).items():
        # A value instead of a section sets everything below it.
        name = name_of(option)
        section = "" if isinstance(value, Mapping) else f"{name_of(option)}."
        for owner, ours in owners.items():
            if f"{name}.".startswith(f"{owner}.") or (section and owner.startswith(section)):
                message = f"{whose} {option} ({value}) contradicts what sets it here: {ours}"
                yield error(f"{key}.{option}", message, LEAVE_OUT)
                break


@spec_check
def adapter_can_be_sampled_with(spec: RunSpec) -> Problems:
    """vLLM applies adapters up to a maximum rank; `merge_lora` has no effect where it would apply none."""
    largest = VLLM_LORA_RANKS[-1]
    if spec.syncs_adapter and spec.model.lora_rank > largest:
        message = f"vLLM applies adapters up to rank {largest}"
        yield error("model.lora_rank", message, f"use {largest} or less, or set rollout.merge_lora: true")
    elif spec.rollout.merge_lora and not (spec.rollout_engine.applies_adapters and spec.model.lora_rank):
        why = f"{spec.rollout.name} always merges" if spec.model.lora_rank else "model.lora_rank is 0"
        yield warning("rollout.merge_lora", f"has no effect: {why}", LEAVE_OUT)
