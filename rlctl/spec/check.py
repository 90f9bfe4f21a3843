"""Checks for contradictions between the values of a spec: one function each; every problem has a fix.

Pydantic validates the type and range of each field. The checks here mostly compare several values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from rlctl.errors import Problem
from rlctl.metric_names import OVERLONG
from rlctl.registry import GRADERS
from rlctl.spec.base import Section, param_problems
from rlctl.spec.environment import environments_without_reward
from rlctl.spec.keys import value_of
from rlctl.spec.memory import has_no_mask
from rlctl.spec.run_spec import EngineSpec, RunSpec
from rlctl.user_code import is_file_function

Problems = Iterator[Problem]
Check = Callable[[RunSpec], Problems]

CHECKS: list[Check] = []
LEAVE_OUT = "leave it out"
#: Start of a warning about a key that nothing reads.
NO_EFFECT = "has no effect"

#: Learning rates above this are unusual for a pretrained language model.
UNUSUAL_LR = 1e-4


def spec_check(check: Check) -> Check:
    """Registers a check."""
    CHECKS.append(check)
    return check


class Recorded:
    """A section with the same attributes, which adds the dotted key of every value that is read to `read`."""

    def __init__(self, section: Section, read: set[str], prefix: str = "") -> None:
        self._section, self._read, self._prefix = section, read, prefix

    def __getattr__(self, name: str) -> Any:
        kind, key = type(self._section), f"{self._prefix}{name}"
        if name not in kind.model_fields:  # a property or method, which reads values itself
            return getattr(kind, name).__get__(self)
        value = getattr(self._section, name)
        if isinstance(value, Section):
            return Recorded(value, self._read, f"{key}.")
        self._read.add(key)
        return value


def error(key: str, what: str, fix: str) -> Problem:
    """A problem that stops the run."""
    return Problem("error", key, what, fix)


def warning(key: str, what: str, fix: str) -> Problem:
    """A problem that is reported and does not stop the run."""
    return Problem("warning", key, what, fix)


def is_changed(spec: RunSpec, key: str) -> bool:
    """Whether the value at `key` differs from its default."""
    return bool(value_of(spec, key) != value_of(RunSpec(), key))


def fitting_batch(spec: RunSpec) -> tuple[int, int]:
    """Prompts per batch and per actor mini-batch that divide over the ranks, close to those of the spec."""
    batch, mini, world = spec.data.train_batch_size, spec.ppo_mini_batch_size, spec.world_size
    whole = -(-batch // world) * world
    if not spec.actor.ppo_mini_batch_size:
        return whole, whole
    if batch % world:
        return whole, world
    start = max(min(mini, batch) // world, 1) * world
    below = next(size for size in range(start, 0, -world) if batch % size == 0)
    above = (size for size in range(start + world, 2 * mini - below, world) if batch % size == 0)
    return batch, next(above, below)


def check_spec(
    spec: RunSpec, unset: frozenset[str], is_meant: Callable[[Problem, set[str]], bool]
) -> list[Problem]:
    """Returns the errors and warnings of all checks.

    Args:
        spec: a validated spec.
        unset: keys that are invalid or not set yet (`spec` has defaults). A check ends where it reads one.
        is_meant: returns whether to omit a warning as intended, given the keys that its check has read.
    """
    found = []
    for check in CHECKS:
        read: set[str] = set()
        for problem in check(cast(RunSpec, Recorded(spec, read))):
            if read & unset:
                break
            if problem.severity == "error" or not is_meant(problem, read):
                found.append(problem)
    return found


@spec_check
def prompts_are_given(spec: RunSpec) -> Problems:
    """Only the embedded model has a built-in task."""
    given = bool(spec.data.train_files)
    if spec.is_embedded and given:
        what = "the embedded model reads only the digits and signs of its own addition task"
        fix = "set model.path to a Hugging Face model, or leave train_files out"
        yield warning("data.train_files", what, fix)
    elif not spec.is_embedded and not given:
        fix = "data.train_files=…/train.parquet (`rlctl prepare-data parquet` writes one)"
        yield error("data.train_files", f"no training prompts for {spec.model.path}", fix)


@spec_check
def validation_is_possible(spec: RunSpec) -> Problems:
    """Validation needs prompts and a frequency."""
    wanted, given = spec.trainer.test_freq > 0, bool(spec.data.val_files)
    if wanted and not given and not spec.is_embedded:
        what = f"validation every {spec.trainer.test_freq} steps, but data.val_files is empty"
        yield error("trainer.test_freq", what, "set data.val_files, or test_freq: -1")


@spec_check
def rows_can_be_shared(spec: RunSpec) -> Problems:
    """A sequence-parallel group lies within one node; only policy and reference support it, not a critic."""
    size, key = spec.engine.sequence_parallel, "engine.sequence_parallel"
    if size == 1:
        return
    if spec.trainer.n_gpus_per_node % size:
        what = f"{spec.trainer.n_gpus_per_node} ranks of a node cannot form groups of {size}"
        yield error(key, what, "use a divisor of trainer.n_gpus_per_node")
    if spec.actor.router_aux_loss_coef:
        what = "the routing of rows that ranks share is not collected"
        yield error("actor.router_aux_loss_coef", what, f"write 0, or set {key}: 1")
    if spec.trains_critic:
        yield error(
            key, "a critic does not support sequence parallelism", "use an estimator without a critic, or 1"
        )
    if spec.model.attn_implementation == "eager":
        what = "eager attention does not work on parts of a sequence"
        yield error("model.attn_implementation", what, f"write sdpa or flash_attention_2, or set {key}: 1")


@spec_check
def batch_divides(spec: RunSpec) -> Problems:
    """A batch must divide into equal mini-batches, and each mini-batch equally over all ranks."""
    batch, mini, world = spec.data.train_batch_size, spec.ppo_mini_batch_size, spec.world_size
    key = "actor.ppo_mini_batch_size" if spec.actor.ppo_mini_batch_size else "data.train_batch_size"
    faults = []
    if mini > batch:
        faults.append(f"{mini} prompts per mini-batch, but a batch has only {batch} (data.train_batch_size)")
    elif batch % mini:
        left = batch % mini
        faults.append(f"{mini} does not divide data.train_batch_size: {batch}; {left} prompts are left over")
    if mini % world:
        faults.append(f"{mini} prompts cannot be shared equally by {world} ranks")
    if not faults:
        return
    fitting, near = fitting_batch(spec)  # meets all conditions, so that the fix causes no other fault
    if key == "data.train_batch_size":
        fix = f"use a multiple of {world}, for example {fitting}"
    elif fitting == batch:
        of_world = f" that is a multiple of {world}" if world > 1 else ""
        fix = f"use a divisor of {batch}{of_world}, for example {near}"
    else:
        fix = f"set data.train_batch_size: {fitting} and actor.ppo_mini_batch_size: {near}: no value fits "
        fix += f"{batch} prompts on {world} ranks"
    for what in faults:
        yield error(key, what, fix)


@spec_check
def attention_kernel_fits(spec: RunSpec) -> Problems:
    """Flash kernels are for half precision only."""
    if has_no_mask(spec.model.attn_implementation) and spec.engine.dtype != "bf16":
        what = f"{spec.model.attn_implementation} has no kernel for {spec.engine.dtype}"
        yield error("model.attn_implementation", what, "use sdpa, or engine.dtype: bf16")


@spec_check
def learning_rate_is_usual(spec: RunSpec) -> Problems:
    """Policy-gradient training of a pretrained model needs lower learning rates than supervised training."""
    lr = spec.actor.lr
    if lr == 0:
        yield warning("actor.lr", "at 0 the policy never changes", "5e-7 to 3e-6 is usual")
    elif lr > UNUSUAL_LR and not spec.is_embedded:
        what = f"{lr:g} is far above the rates at which policy gradients on pretrained models are stable"
        yield warning("actor.lr", what, "5e-7 to 3e-6 is usual")


@spec_check
def warmup_ends(spec: RunSpec) -> Problems:
    """A warm-up that is as long as the run never reaches the configured learning rate."""
    batches, actor, critic = spec.trainer.total_training_steps, spec.actor, spec.critic
    if batches is None:
        return
    updates = (batches - spec.trainer.critic_warmup) * spec.updates_per_batch
    rates = {"actor": (actor.lr_warmup_steps, actor.lr, updates)}
    if spec.trains_critic:
        rates["critic"] = (critic.lr_warmup_steps, critic.lr, batches * spec.critic_updates_per_batch)
    for name, (warmup, lr, total) in rates.items():
        if 0 < total <= warmup:
            what = f"{warmup} of the run's {total} optimizer steps are warm-up: {lr:g} is never reached"
            yield warning(f"{name}.lr_warmup_steps", what, "5 to 10 % of the steps is usual")


@spec_check
def adapters_have_layers(spec: RunSpec) -> Problems:
    """LoRA needs target modules."""
    if spec.model.lora_rank and not spec.model.target_modules:
        what = "LoRA without layers to adapt trains nothing"
        yield error("model.target_modules", what, "name layers, or write all-linear")
    if spec.model.lora_adapter_path and not spec.model.lora_rank:
        what = "training starts from an adapter, and model.lora_rank: 0 means that there is none"
        yield error("model.lora_rank", what, "write that of the adapter: `r` in its adapter_config.json")
    if spec.model.lora_adapter_path and spec.needs_reference and not spec.ref.path:
        what = "the reference of the KL is the base model without the adapter, not the model that training "
        what += "starts from"
        yield warning("ref.path", what, "name a directory with the merged model to compare with that one")


@spec_check
def own_engine_has_own_memory(spec: RunSpec) -> Problems:
    """ZeRO, offloading and sequence parallelism are DeepSpeed's."""
    if spec.engine.name != "deepspeed":
        for name in ("zero_stage", "offload", "offload_base", "sequence_parallel", "deepspeed"):
            if getattr(spec.engine, name) != EngineSpec.model_fields[name].default:
                what = f"engine.name: {spec.engine.name} does not read this option of DeepSpeed"
                yield error(f"engine.{name}", what, f"{LEAVE_OUT}, or set engine.name: deepspeed")


@spec_check
def base_can_be_offloaded(spec: RunSpec) -> Problems:
    """`offload_base` needs frozen weights, and a colocated engine that frees its own copy between calls."""
    if not spec.engine.offload_base:
        return
    if not (spec.syncs_adapter and not spec.has_rollout_servers and spec.rollout.free_cache_engine):
        what = "only frozen weights can be offloaded, while a colocated vLLM samples the adapter: this "
        what += "needs model.lora_rank, rollout.name: vllm, and merge_lora and free_cache_engine as they are"
        yield error("engine.offload_base", what, LEAVE_OUT)
    elif spec.engine.zero_stage == 3:
        what = "ZeRO-3 moves weights itself; engine.offload: all puts them on the host"
        can_be_lower = spec.engine.offload != "all"
        yield error("engine.offload_base", what, f"{LEAVE_OUT}{', or set zero_stage: 2' * can_be_lower}")


@spec_check
def offload_has_a_stage(spec: RunSpec) -> Problems:
    """DeepSpeed can offload only what a ZeRO stage shards."""
    needs = {"none": 0, "optimizer": 1, "all": 3}[spec.engine.offload]
    if spec.engine.zero_stage < needs:
        what = f"{spec.engine.offload} needs engine.zero_stage {needs} or above"
        what += f", this is {spec.engine.zero_stage}"
        fix = f"set engine.zero_stage: {max(needs, 2)}"
        if needs == 3 and spec.engine.offload_base:
            fix = "set engine.offload: optimizer and engine.zero_stage: 2, which offload_base needs"
        yield error("engine.offload", what, fix)


_BUDGETS = ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")


@spec_check
def budget_holds_a_row(spec: RunSpec) -> Problems:
    """A token budget must be at least the longest prompt plus the longest response."""
    longest = spec.max_length
    budgets = (spec.pass_tokens, spec.critic.ppo_max_token_len_per_gpu)
    for key, budget, ranks in zip(_BUDGETS, budgets, (spec.engine.sequence_parallel, 1), strict=True):
        is_read = key == _BUDGETS[0] or spec.trains_critic
        if is_read and budget is not None and budget < longest:
            what = f"{budget} tokens, but one prompt and its response may have {longest}"
            limits = "data.max_prompt_length or data.max_response_length"
            yield error(key, what, f"use {-(-longest // ranks)} or more, or lower {limits}")


@spec_check
def rewards_are_complete(spec: RunSpec) -> Problems:
    """Every reward needs a unique name, a non-zero weight and, if it is a reward model, a path."""
    reward = spec.reward
    if reward.terms == [] and (silent := environments_without_reward(spec.environment)):
        what = f"no reward at all: the list is empty, and {' and '.join(silent)} gives none"
        yield error("reward.terms", what, "list terms, write null to use reward.name, or define get_reward")
    names = {term.name for term in reward.terms or []} or {reward.name}
    labels = [term.label for term in reward.all_terms]
    if doubled := sorted({label for label in labels if labels.count(label) > 1} | ({OVERLONG} & set(labels))):
        what = f"{', '.join(doubled)} would name two rewards in the metrics"
        fix = "add the weights up in one term, or give a function another name"
        yield error("reward.terms" if reward.terms else "reward.name", what, fix)
    if any(term.weight == 0 for term in reward.all_terms):
        what = "a weight of 0: the reward is computed and not used"
        yield warning("reward.terms", what, "leave the term out, or give it a weight")
    for term in reward.all_terms:
        if not is_file_function(term.name):  # those of a user's file are checked where it is imported
            key = "reward.terms" if reward.terms else "reward.params"
            yield from param_problems(GRADERS, term.name, key, term.params)
    if "model" in names and reward.model.path is None:
        fix = "reward.model.path=… (a sequence classifier with one output)"
        yield error("reward.model.path", "the reward model has no path", fix)


@spec_check
def overlong_fits(spec: RunSpec) -> Problems:
    """The length penalty must begin within the response."""
    buffer, longest = spec.reward.overlong.buffer_length, spec.data.max_response_length
    if buffer > longest:
        what = f"{buffer} tokens, but responses end at {longest} (data.max_response_length)"
        yield error("reward.overlong.buffer_length", what, f"use {longest} or less")
