"""Checks for contradictions between the values of a spec: one function each; every problem has a fix.

Pydantic validates the type and range of each field. The checks here mostly compare several values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

from rlctl.capabilities.sections import sections
from rlctl.errors import Problem
from rlctl.metric_names import METRICS, OVERLONG, describe
from rlctl.registry import GRADERS
from rlctl.run_spec.base import Section, param_problems
from rlctl.run_spec.environment import environments_without_reward
from rlctl.run_spec.keys import did_you_mean, value_of
from rlctl.run_spec.memory import has_no_mask
from rlctl.run_spec.run_spec import EngineSpec, RunSpec, default_spec
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
    """A section as a check reads it: it has the same values, and notes in `read` the dotted key of each.

    `check_spec` gives one to every check instead of the spec, so that no check has to list its keys, and such
    a list cannot be wrong. The keys decide whether the problems of a check are reported.
    """

    def __init__(self, section: Section, read: set[str], prefix: str = "") -> None:
        self._section = section
        self._read = read
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        key = f"{self._prefix}{name}"
        if name not in type(self._section).model_fields:
            return self._derived(name)
        value = getattr(self._section, name)
        if isinstance(value, Section):
            return Recorded(value, self._read, prefix=f"{key}.")
        self._read.add(key)
        return value

    def _derived(self, name: str) -> Any:
        """A property's value, or a method: of this object, so that the values behind it are noted as well."""
        property_or_method = getattr(type(self._section), name)
        return property_or_method.__get__(self)


def error(key: str, what: str, fix: str) -> Problem:
    """A problem that stops the run."""
    return Problem("error", key, what, fix)


def warning(key: str, what: str, fix: str) -> Problem:
    """A problem that is reported and does not stop the run."""
    return Problem("warning", key, what, fix)


def is_changed(spec: RunSpec, key: str) -> bool:
    """Whether the value at `key` differs from its default."""
    return bool(value_of(spec, key) != value_of(default_spec(), key))


def fitting_batch(spec: RunSpec) -> tuple[int, int]:
    """Prompts per batch and per actor mini-batch that divide over the ranks, close to those of the spec."""
    batch = spec.data.train_batch_size
    mini = spec.ppo_mini_batch_size
    world = spec.world_size
    whole = -(-batch // world) * world
    if not spec.actor.ppo_mini_batch_size:
        return whole, whole
    if batch % world:
        return whole, world
    sizes = [world * divisor for divisor in _divisors(batch // world) if world * divisor <= max(mini, world)]
    larger = [world * divisor for divisor in _divisors(batch // world) if world * divisor > max(mini, world)]
    return batch, min([max(sizes), *larger[:1]], key=lambda size: abs(size - mini))


#: Trial divisors of a number; the work must not grow with a number of the spec.
_MOST_TRIALS = 100_000


def _divisors(number: int) -> list[int]:
    """Divisors in ascending order: those up to `_MOST_TRIALS`, and those that they belong to."""
    trials = range(1, min(math.isqrt(number), _MOST_TRIALS) + 1)
    low = [divisor for divisor in trials if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def check_spec(
    spec: RunSpec, unset: frozenset[str], is_meant: Callable[[Problem, set[str]], bool]
) -> list[Problem]:
    """Returns the errors and warnings of all checks.

    The keys that a check has read up to a problem are the values that led to it. So a problem is left out if
    one of them is no value of the user's, and a warning if the values are meant.

    Args:
        spec: a validated spec.
        unset: keys that are invalid or not set yet (`spec` has defaults).
        is_meant: whether a warning that these keys led to is intended.
    """
    checks = [*CHECKS, *(section.problems for section in sections().values())]
    problems = []
    for check in checks:
        read: set[str] = set()
        recorded = cast(RunSpec, Recorded(spec, read))
        for problem in check(recorded):  # a generator: `read` grows from problem to problem
            if read & unset:
                break
            if problem.severity == "error" or not is_meant(problem, read):
                problems.append(problem)
    return problems


@spec_check
def prompts_are_given(spec: RunSpec) -> Problems:
    """Only the embedded model has a built-in task."""
    given = bool(spec.data.train_files)
    if spec.is_embedded and given:
        message = "the embedded model reads only the digits and signs of its own addition task"
        fix = "set model.path to a Hugging Face model, or leave train_files out"
        yield warning("data.train_files", message, fix)
    elif not spec.is_embedded and not given:
        fix = "data.train_files=…/train.parquet (`rlctl prepare-data parquet` writes one)"
        yield error("data.train_files", f"no training prompts for {spec.model.path}", fix)


@spec_check
def early_stop_has_a_metric(spec: RunSpec) -> Problems:
    """Early stopping needs a metric that is logged."""
    stop = spec.trainer.early_stop
    key = "trainer.early_stop.metric"
    if stop.patience is None:
        return
    if stop.metric is not None and describe(stop.metric) is None:
        fix = did_you_mean(stop.metric, METRICS) or "`rlctl explain WORD` finds metrics"
        yield error(key, f"no such metric: {stop.metric}", fix)
    elif spec.trainer.test_freq < 1 and (stop.metric or "val/").startswith("val/"):
        yield error(key, "there is no validation whose reward could improve", "set trainer.test_freq")


@spec_check
def tables_have_rows(spec: RunSpec) -> Problems:
    """Tables of responses show the episodes that are kept."""
    if spec.trainer.log_samples > 0 and spec.trainer.rollouts_per_step == 0:
        message = "no episodes are kept for the tables: trainer.rollouts_per_step is 0"
        yield error("trainer.log_samples", message, "set trainer.rollouts_per_step, or log_samples: -1")


@spec_check
def validation_is_possible(spec: RunSpec) -> Problems:
    """Validation needs prompts and a frequency."""
    wanted = spec.trainer.test_freq > 0
    given = bool(spec.data.val_files)
    if wanted and not given and not spec.is_embedded:
        message = f"validation every {spec.trainer.test_freq} steps, but data.val_files is empty"
        yield error("trainer.test_freq", message, "set data.val_files, or test_freq: -1")


@spec_check
def rows_can_be_shared(spec: RunSpec) -> Problems:
    """A sequence-parallel group lies within one node; only policy and reference support it, not a critic."""
    size = spec.engine.sequence_parallel
    key = "engine.sequence_parallel"
    if size == 1:
        return
    if spec.trainer.n_gpus_per_node % size:
        message = f"{spec.trainer.n_gpus_per_node} ranks of a node cannot form groups of {size}"
        yield error(key, message, "use a divisor of trainer.n_gpus_per_node")
    if spec.trains_critic:
        yield error(
            key, "a critic does not support sequence parallelism", "use an estimator without a critic, or 1"
        )
    if spec.model.attn_implementation == "eager":
        message = "eager attention does not work on parts of a sequence"
        yield error("model.attn_implementation", message, f"write sdpa or flash_attention_2, or set {key}: 1")


@spec_check
def batch_divides(spec: RunSpec) -> Problems:
    """A batch must divide into equal mini-batches, and each mini-batch equally over all ranks."""
    batch = spec.data.train_batch_size
    mini = spec.ppo_mini_batch_size
    world = spec.world_size
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
    for message in faults:
        yield error(key, message, fix)


@spec_check
def attention_kernel_fits(spec: RunSpec) -> Problems:
    """Flash kernels are for half precision only."""
    if has_no_mask(spec.model.attn_implementation) and spec.engine.dtype != "bf16":
        message = f"{spec.model.attn_implementation} has no kernel for {spec.engine.dtype}"
        yield error("model.attn_implementation", message, "use sdpa, or engine.dtype: bf16")


@spec_check
def layers_can_be_compiled(spec: RunSpec) -> Problems:
    """`compile_layers` needs layers that run alone: without hooks or collectives inside."""
    engine = spec.engine
    if not spec.model.compile_layers:
        return
    key = "model.compile_layers"
    needs_stage_3 = engine.offload == "all" or engine.shard_size is not None
    if engine.name == "deepspeed" and (engine.zero_stage == 3 or needs_stage_3):
        message = "ZeRO-3 gathers weights within each layer, so that it cannot be compiled"
        yield error(key, message, LEAVE_OUT if needs_stage_3 else f"{LEAVE_OUT}, or set engine.zero_stage: 2")
    if engine.sequence_parallel > 1:
        message = "with engine.sequence_parallel ranks exchange tokens within each layer"
        yield error(key, message, f"{LEAVE_OUT}, or set engine.sequence_parallel: 1")


@spec_check
def learning_rate_is_usual(spec: RunSpec) -> Problems:
    """Policy-gradient training of a pretrained model needs lower learning rates than supervised training."""
    lr = spec.actor.lr
    if lr == 0:
        yield warning("actor.lr", "at 0 the policy never changes", "5e-7 to 3e-6 is usual")
    elif lr > UNUSUAL_LR and not spec.is_embedded:
        message = f"{lr:g} is far above the rates at which policy gradients on pretrained models are stable"
        yield warning("actor.lr", message, "5e-7 to 3e-6 is usual")


@spec_check
def warmup_ends(spec: RunSpec) -> Problems:
    """A warm-up that is as long as the run never reaches the configured learning rate."""
    batches = spec.trainer.total_training_steps
    actor = spec.actor
    critic = spec.critic
    if batches is None:
        return
    updates = (batches - spec.trainer.critic_warmup) * spec.updates_per_batch
    rates = {"actor": (actor.lr_warmup_steps, actor.lr, updates)}
    if spec.trains_critic:
        rates["critic"] = (critic.lr_warmup_steps, critic.lr, batches * spec.critic_updates_per_batch)
    for name, (warmup, lr, total) in rates.items():
        if 0 < total <= warmup:
            message = f"{warmup} of the run's {total} optimizer steps are warm-up: {lr:g} is never reached"
            yield warning(f"{name}.lr_warmup_steps", message, "5 to 10 % of the steps is usual")


@spec_check
def adapters_have_layers(spec: RunSpec) -> Problems:
    """LoRA needs target modules."""
    if spec.model.lora_rank and not spec.model.target_modules:
        message = "LoRA without layers to adapt trains nothing"
        yield error("model.target_modules", message, "name layers, or write all-linear")
    if spec.model.lora_adapter_path and not spec.model.lora_rank:
        message = "training starts from an adapter, and model.lora_rank: 0 means that there is none"
        yield error("model.lora_rank", message, "write that of the adapter: `r` in its adapter_config.json")
    if spec.model.lora_adapter_path and spec.needs_reference and not spec.ref.path:
        message = (
            "the reference of the KL is the base model without the adapter, not the model that training "
        )
        message += "starts from"
        yield warning("ref.path", message, "name a directory with the merged model to compare with that one")


@spec_check
def own_engine_has_own_memory(spec: RunSpec) -> Problems:
    """ZeRO, offloading and sequence parallelism are DeepSpeed's."""
    if spec.engine.name != "deepspeed":
        for name in ("zero_stage", "offload", "offload_base", "sequence_parallel", "deepspeed"):
            unset = EngineSpec.model_fields[name].default
            if getattr(spec.engine, name) != unset:
                message = f"engine.name: {spec.engine.name} does not read this option of DeepSpeed"
                if name == "zero_stage" and spec.engine.name == "fsdp":
                    message += "; it always shards weights, gradients and optimizer, as stage 3 does"
                value = str(unset).lower() if isinstance(unset, bool) else unset
                fix = (
                    f"write engine.{name}={value} after a preset that sets it, or set engine.name: deepspeed"
                )
                yield error(f"engine.{name}", message, fix)


@spec_check
def shards_fit_the_ranks(spec: RunSpec) -> Problems:
    """`shard_size` needs sharded weights, and groups of equal size."""
    size = spec.engine.shard_size
    engine = spec.engine
    if size is None:
        return
    if not (engine.name == "fsdp" or (engine.name == "deepspeed" and engine.zero_stage == 3)):
        message = "only ZeRO-3 and FSDP2 shard the weights, of which this is an option"
        yield error("engine.shard_size", message, f"{LEAVE_OUT}, or set engine.zero_stage: 3")
    elif spec.world_size % size:
        message = f"{spec.world_size} ranks cannot be divided into groups of {size}"
        yield error(
            "engine.shard_size", message, f"write {spec.trainer.n_gpus_per_node}, the ranks of a node"
        )


@spec_check
def base_can_be_offloaded(spec: RunSpec) -> Problems:
    """`offload_base` needs frozen weights, and a colocated engine that frees its own copy between calls."""
    if not spec.engine.offload_base:
        return
    if not (spec.syncs_adapter and not spec.has_rollout_servers and spec.rollout.free_cache_engine):
        message = "only frozen weights can be offloaded, while a colocated vLLM samples the adapter: this "
        message += (
            "needs model.lora_rank, rollout.name: vllm, and merge_lora and free_cache_engine as they are"
        )
        yield error("engine.offload_base", message, LEAVE_OUT)
    elif spec.engine.zero_stage == 3:
        message = "ZeRO-3 moves weights itself; engine.offload: all puts them on the host"
        can_be_lower = spec.engine.offload != "all"
        yield error("engine.offload_base", message, f"{LEAVE_OUT}{', or set zero_stage: 2' * can_be_lower}")


@spec_check
def offload_has_a_stage(spec: RunSpec) -> Problems:
    """DeepSpeed can offload only what a ZeRO stage shards."""
    needs = {"none": 0, "optimizer": 1, "all": 3}[spec.engine.offload]
    if spec.engine.zero_stage < needs:
        message = f"{spec.engine.offload} needs engine.zero_stage {needs} or above"
        message += f", this is {spec.engine.zero_stage}"
        fix = f"set engine.zero_stage: {max(needs, 2)}"
        if needs == 3 and spec.engine.offload_base:
            fix = "set engine.offload: optimizer and engine.zero_stage: 2, which offload_base needs"
        yield error("engine.offload", message, fix)


_BUDGETS = ("actor.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu")


@spec_check
def budget_holds_a_row(spec: RunSpec) -> Problems:
    """A token budget must be at least the longest prompt plus the longest response."""
    longest = spec.max_length
    budgets = (spec.pass_tokens, spec.critic.ppo_max_token_len_per_gpu)
    for key, budget, ranks in zip(_BUDGETS, budgets, (spec.engine.sequence_parallel, 1), strict=True):
        is_read = key == _BUDGETS[0] or spec.trains_critic
        if is_read and budget is not None and budget < longest:
            message = f"{budget} tokens, but one prompt and its response may have {longest}"
            limits = "data.max_prompt_length or data.max_response_length"
            yield error(key, message, f"use {-(-longest // ranks)} or more, or lower {limits}")


@spec_check
def rewards_are_complete(spec: RunSpec) -> Problems:
    """Every reward needs a unique name, a non-zero weight and, if it is a reward model, a path."""
    reward = spec.reward
    if reward.terms == [] and (silent := environments_without_reward(spec.environment)):
        message = f"no reward at all: the list is empty, and {' and '.join(silent)} gives none"
        yield error(
            "reward.terms", message, "list terms, write null to use reward.name, or define get_reward"
        )
    names = {term.name for term in reward.terms or []} or {reward.name}
    labels = [term.label for term in reward.all_terms]
    doubled = sorted({label for label in labels if labels.count(label) > 1} | ({OVERLONG} & set(labels)))
    if doubled:
        message = f"{', '.join(doubled)} would name two rewards in the metrics"
        fix = "add the weights up in one term, or give a function another name"
        yield error("reward.terms" if reward.terms else "reward.name", message, fix)
    if any(term.weight == 0 for term in reward.all_terms):
        message = "a weight of 0: the reward is computed and not used"
        yield warning("reward.terms", message, "leave the term out, or give it a weight")
    for term in reward.all_terms:
        if not is_file_function(term.name):  # those of a user's file are checked where it is imported
            key = "reward.terms" if reward.terms else "reward.params"
            yield from param_problems(GRADERS, term.name, key, term.params)
    if "model" in names and reward.model.path is None:
        fix = "reward.model.path=… (a sequence classifier with one output)"
        yield error("reward.model.path", "the reward model has no path", fix)
    for key in ("url", "model"):
        if names & {"judge", "judge_group"} and getattr(reward.judge, key) is None:
            fix = "reward.judge.url=http://127.0.0.1:8000/v1 reward.judge.model=NAME"
            yield error(f"reward.judge.{key}", f"the judge has no {key}", fix)


@spec_check
def overlong_fits(spec: RunSpec) -> Problems:
    """The length penalty must begin within the response."""
    buffer = spec.reward.overlong.buffer_length
    longest = spec.data.max_response_length
    if buffer > longest:
        message = f"{buffer} tokens, but responses end at {longest} (data.max_response_length)"
        yield error("reward.overlong.buffer_length", message, f"use {longest} or less")
