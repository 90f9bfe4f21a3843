"""Estimates of a run's memory and of the duration of its phases on a given machine, before it starts.

GPU memory is that of `rlctl.run_spec.memory`, times are those of `rlctl.run_spec.step_time`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rlctl.errors import Problem
from rlctl.run_spec.lengths import Lengths
from rlctl.run_spec.machine import GIB, THIS_MACHINE, Machine, gib
from rlctl.run_spec.memory import (
    MemoryPart,
    Phase,
    adapter_parameters,
    has_no_mask,
    memory_parts,
    memory_total,
)
from rlctl.run_spec.model_size import BACKGROUND_BYTES, COPY_FACTOR, ModelSize, checkpoint_bytes
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.step_time import CPU_RATES, GPU_RATES, Seconds, StepWork

#: Longest row of tokens for attention with a dense mask on a GPU.
_LONGEST_DENSE = 8192
#: Fraction of a GPU's memory that an estimate may take: the rest is for fragmentation.
_USED_AT_MOST = 0.95
#: Host memory of a process for the libraries of torch, CUDA and vLLM, and for its CUDA context.
_PROCESS_BYTES = 4 * GIB
#: Memory that NCCL uses in `/dev/shm` per rank.
_NCCL_BYTES = 32 * 2**20
#: Number of elements in one host buffer of DeepSpeed's stage 3 (`sub_group_size`).
_SUB_GROUP = 1_000_000_000
#: Share of a step's seconds that a suggestion saves at least.
_WORTH_SAYING = 0.02
_WHOLE = "whole step"
#: Seconds of a step above which the plan warns.
_SLOW_STEP_S = 600
#: Settings that shorten a slow step and are shown with the warning.
_SHOWN = 2
#: Phases of host memory that is not held for the whole run.
_LOADING, _SAVING, _TRAINING = "load", "save", "train"
#: What Liger's kernels are for, in a suggestion.
_LIGER = 'fused kernels store less (pip install "rlctl[liger]")'
#: Name of the link between GPUs of a node.
_IN_NODE = "GPU to GPU"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run: peak memory and transfers."""

    name: str  # load, engine, partition, generate, score, update, step, sync
    gpu: float  # peak bytes per GPU
    host: float  # peak bytes per node, including pinned and shared memory
    moved: dict[str, float]  # link → bytes per GPU
    seconds: Seconds | None = (
        None  # per training step; None: the stage runs only once, or the time is unknown
    )


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A setting that shortens a step and still fits, or with which a run fits at all."""

    setting: str  # KEY=VALUE
    seconds: Seconds  # of a step with it
    why: str


@dataclass(frozen=True, slots=True)
class OwnDesign:
    """Work of other software that rlctl leaves out; figures published by it include this work."""

    what: str
    seconds_with: Seconds  # of a step with this work


class Placement:
    """Memory and time estimates of a spec on a machine.

    Args:
        size: that of the policy.
        mean_response: mean tokens of a response, if known.
    """

    def __init__(
        self, spec: RunSpec, size: ModelSize, machine: Machine, mean_response: float | None = None
    ) -> None:
        self.spec = spec
        self.size = size
        self.machine = machine
        self.mean_response = mean_response
        data = spec.data
        self.lengths = Lengths.of(data.max_prompt_length, data.max_response_length, mean_response)
        self.work = StepWork(spec, size, machine, self.lengths)
        self.width = spec.engine.width
        self.stage = spec.engine.effective_stage
        self.ranks = spec.trainer.n_gpus_per_node
        self.sampling_width = spec.sampled_width
        #: GPUs of one rollout engine in the trainer's processes.
        self.shared = 1 if spec.has_rollout_servers else spec.rollout.tensor_model_parallel_size
        parameters = size.num_parameters or 0
        #: Bytes of all weights in the engine's dtype, and of a GPU's weights of a rollout engine.
        self.whole, self.sampling = parameters * self.width, parameters * self.sampling_width / self.shared
        #: Whether a sleeping rollout engine keeps its weights in host memory.
        self.keeps_copy = spec.engine_sleeps and not spec.drops_weights_asleep

    @cached_property
    def gpu_parts(self) -> list[MemoryPart]:
        """GPU memory parts of one rank, with the key-value cache that fits into the machine's GPU."""
        return memory_parts(self.spec, self.size, self.machine.gpu_bytes if self.machine.gpus else None)

    def gpu_peak(self, *phases: Phase) -> float:
        """Peak bytes: the parts that are always held, and the largest of `phases`."""
        return memory_total(self.gpu_parts, phases)

    @cached_property
    def host_parts(self) -> list[MemoryPart]:
        """Host memory parts of one node; without GPUs, excluding the parts that `gpu_parts` contains."""
        copy = MemoryPart(
            "copy of a checkpoint", self._checkpoint_share(), note="while it is written to disk"
        )
        return [*self._parts_besides_copy, *[copy] * self._copies_checkpoint]

    @cached_property
    def _parts_besides_copy(self) -> list[MemoryPart]:
        return [item for item in self._host_parts() if item.num_bytes is None or item.num_bytes > 0]

    @property
    def _copies_checkpoint(self) -> bool:
        """Whether checkpoints are written from a copy in memory: it is wanted, and the memory is enough."""
        if not self._copy_is_wanted:
            return False
        held = memory_total(self._on_this_host(self._parts_besides_copy))
        return held + COPY_FACTOR * self._checkpoint_share() <= self.machine.host_bytes

    @property
    def _copy_is_wanted(self) -> bool:
        """Whether checkpoints are written during training, if the host's memory is enough."""
        wish = self.spec.trainer.save_in_background
        size = self._checkpoint_bytes
        return size > 0 and (size >= BACKGROUND_BYTES if wish is None else wish)

    @cached_property
    def _checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.spec) or 0

    def _checkpoint_share(self) -> float:
        """Bytes of a checkpoint that the ranks of one node write."""
        return self._checkpoint_bytes / self.spec.trainer.nnodes

    def _on_this_host(self, parts: list[MemoryPart]) -> list[MemoryPart]:
        """`parts`, and those of the ranks if these compute on the CPU."""
        if self.machine.gpus:
            return parts
        sizes = [(item, self.ranks * (item.num_bytes or 0.0)) for item in self.gpu_parts]
        return [*parts, *(replace(part, num_bytes=size) for part, size in sizes)]

    def shared_peak(self) -> float:
        """Bytes in `/dev/shm` per node."""
        return sum(item.num_bytes or 0.0 for item in self.host_parts if item.is_shared)

    def _host_parts(self) -> Iterator[MemoryPart]:
        spec = self.spec
        ranks = self.ranks
        parameters = self.size.num_parameters
        whole = self.whole
        on_gpu = self.machine.gpus > 0
        if on_gpu:
            yield MemoryPart("processes", ranks * _PROCESS_BYTES)
        if parameters is None:
            yield MemoryPart("weights in transfer", None, (_LOADING,), "the model's size is not known here")
            return

        if on_gpu:
            at_once = whole if self._reads_whole else self._largest_weights
            yield MemoryPart("weights in transfer", ranks * at_once, (_LOADING,))
        # The ranks together hold all weights.
        yield MemoryPart("export of a checkpoint", whole / spec.trainer.nnodes, (_SAVING,))
        if on_gpu and spec.engine.offload != "none":
            read = self.size.num_trainable or parameters
            yield from self._offloaded(parameters, adapter_parameters(spec, self.size) or read, "")
            if spec.trains_critic:
                yield from self._offloaded(read, read, "critic's ")
        if on_gpu and spec.engine.offload_base:
            yield MemoryPart("frozen weights", ranks * self._pinned_copy(self.width), note="pinned")
        if on_gpu and self.keeps_copy:
            copy = ranks * self._pinned_copy(self.sampling_width, self.shared)
            yield MemoryPart("sleeping vLLM's weights", copy, (_TRAINING,), note="pinned")
        if self.writes_weights and spec.rollout.server.weights_dir is None:
            versions = 1 if spec.syncs_adapter else 2
            yield MemoryPart("weights for the servers", versions * whole, is_shared=True)
        if on_gpu and spec.world_size > 1:
            yield MemoryPart("NCCL", ranks * _NCCL_BYTES, is_shared=True)

    def _offloaded(self, parameters: int, trained: int, whose: str) -> Iterator[MemoryPart]:
        """Host memory of DeepSpeed's offloading; see its `offload_optimizer`."""
        spec = self.spec
        ranks = self.ranks
        of_a_rank = trained / spec.world_size
        config = spec.engine.deepspeed.get("zero_optimization", {})
        pins = bool(config.get("offload_optimizer", {}).get("pin_memory", True))
        group = of_a_rank if self.stage < 3 else min(of_a_rank, _SUB_GROUP)
        held, note = (_power_of_two, "pinned") if pins else (float, "")
        per_group = held(group * 4) / max(group, 1)
        for name in ("fp32 weights", "gradients of the step"):
            yield MemoryPart(f"{whose}{name}", ranks * of_a_rank * per_group, note=note)
        yield MemoryPart(f"{whose}moments", ranks * of_a_rank * 8)
        if self.stage == 3 or self.width == 4:  # in bf16, stage 2 accumulates them on the GPU
            sums = ranks * held(of_a_rank * 4)
            yield MemoryPart(f"{whose}sums of gradients", sums, note=note)
        if spec.engine.offload == "all":
            weights = ranks * held(parameters * self.width / spec.world_size)
            yield MemoryPart(f"{whose}weights", weights, note=note)

    @property
    def _reads_whole(self) -> bool:
        """Whether every rank has a whole model in its own memory: the rollout engine copies it.

        Else files of weights are mapped: ranks share what they read, and the system may drop it. Experts that
        transformers joins as it reads them are copies, unless ZeRO-3 partitions each.
        """
        shape = self.size.shape
        joins = self.spec.engine.zero_stage < 3 and (shape is None or shape.has_experts)
        return joins or self.spec.rollout_engine.starts_with_policy

    @property
    def _largest_weights(self) -> float:
        """Additional bytes of a rank while it loads a model under ZeRO-3: the largest weights, twice.

        These are the embeddings or one layer (of a mixture of experts), as read and as partitioned.
        """
        shape = self.size.shape
        parameters = self.size.num_parameters or 0
        if shape is None:
            return 2.0 * parameters * self.width
        embeddings = shape.vocab * shape.hidden
        return 2.0 * max(embeddings, (parameters - embeddings) / shape.layers) * self.width

    @property
    def writes_weights(self) -> bool:
        """Whether servers receive new weights as files."""
        return self.spec.has_rollout_servers and not self.broadcasts_weights

    @property
    def broadcasts_weights(self) -> bool:
        """Whether servers receive new weights by broadcast."""
        return self.spec.broadcasts_weights(on_gpus=self.machine.gpus > 0)

    def _pinned_copy(self, num_bytes: float, shared: int = 1) -> float:
        """Bytes of a rank's weights in pinned buffers, one per matrix of vLLM, each over `shared` ranks.

        `num_bytes` are those of one number.
        """
        shape = self.size.shape
        parameters = self.size.num_parameters or 0
        width = num_bytes / shared
        if shape is None:
            return _power_of_two(parameters * width)
        outputs = shape.queries + 2 * shape.keys, shape.queries, 2 * shape.inner, shape.inner
        sizes = [shape.hidden * each for each in outputs]
        embedding = shape.vocab * shape.hidden
        layers = shape.layers * sum(_power_of_two(size * width) for size in sizes)
        rest = max(parameters - shape.layers * sum(sizes) - embedding, 0)
        return layers + _power_of_two(embedding * width) + _power_of_two(rest * width)

    # --- stages and times -------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        """Load, engine, partition, generate, score, update, step and sync, in this order."""
        spec = self.spec
        whole = self.whole
        crossing = "network" if spec.trainer.nnodes > 1 else _IN_NODE
        inside = _IN_NODE if self.work.gathers_in_node else crossing  # among ranks that share the weights
        copy = self.sampling * self.keeps_copy
        base = whole * spec.engine.offload_base
        offload = 6.0 / self.width * whole / spec.world_size * (spec.engine.offload != "none")
        always = self.gpu_peak()
        generation = self.gpu_peak("generation")
        # Without gradient, the activations of the policy's layers are not kept.
        scoring = [item for item in self.gpu_parts if item.phases != ("head", "layers")]
        started = self.sampling if base else generation
        partition = always + self._largest_weights if self.stage == 3 else max(whole, always)
        update = self.gpu_peak("head", "layers", "critic")
        synced = {crossing: whole if self.work.gathered else 0.0, "host to GPU": copy}
        synced |= {
            "broadcast to servers": whole * self.broadcasts_weights,
            "files": whole * self.writes_weights,
        }
        updated = {crossing: self.work.exchanged_beyond_group}
        updated[inside] = updated.get(inside, 0.0) + self.work.exchanged_in_group
        rows: list[tuple[str, float, str, dict[str, float]]] = [
            ("load", 0.0, _LOADING, {"disk": whole}),
            ("engine", started, _LOADING, {}),
            ("partition", partition, _LOADING, {"host to GPU": whole}),
            ("generate", generation, "", {"host to GPU": copy}),
            (
                "score",
                memory_total(scoring, ("head", "layers")),
                _TRAINING,
                {"host to GPU": base, inside: self.work.scoring_passes * self.work.gathered},
            ),
            ("update", update, _TRAINING, updated),
            ("step", self.gpu_peak("step", "critic's step"), _TRAINING, {"host to GPU": offload}),
            ("sync", generation, _SAVING, synced),
        ]
        seconds = self.intervals
        parts = []
        for name, gpu, phase, moved in rows:
            links = {link: num_bytes for link, num_bytes in moved.items() if num_bytes}
            host = memory_total(self.host_parts, (phase,))
            parts.append(
                Stage(
                    name=name,
                    gpu=gpu,
                    host=host,
                    moved=links,
                    seconds=seconds.get(name),
                )
            )
        return parts

    def tokens(self) -> float:
        """Prompt and response tokens per step and rank, at the mean lengths that are assumed for times."""
        return self.work.tokens()

    @cached_property
    def intervals(self) -> dict[str, Seconds]:
        """Stage → the two ends of its seconds per step; empty if unknown, or if nothing can be sampled."""
        return {} if self._lacks_cache else _intervals(self.work)

    def seconds(self) -> dict[str, float]:
        """Stage → the middle of its interval, and their sum; empty if the seconds are unknown."""
        stages = {name: ends.middle for name, ends in self.intervals.items() if name != _WHOLE}
        return stages | {_WHOLE: sum(stages.values())} if stages else {}

    @property
    def at_the_limit(self) -> Seconds | None:
        """Seconds of a step if every response has the greatest length; None: unknown."""
        data = self.spec.data
        lengths = Lengths.of(data.max_prompt_length, data.max_response_length, data.max_response_length)
        return _intervals(StepWork(self.spec, self.size, self.machine, lengths)).get(_WHOLE)

    def own_design(self) -> Iterator[OwnDesign]:
        """Work that this estimate does not contain and that of most other software would."""
        if not self.intervals:
            return
        others = StepWork(self.spec, self.size, self.machine, self.lengths, as_others=True)
        what = []
        if self.work.shares_prompts < 1:
            what.append("prompts are computed once for the responses that share a pass")
        if others.scores_policy > self.work.scores_policy:
            what.append("the policy is not scored before the updates (bypass mode)")
        if what:
            yield OwnDesign("; ".join(what), _intervals(others)[_WHOLE])

    def not_known(self) -> Iterator[str]:
        """What the seconds assume because nothing says it, or do not count."""
        spec = self.spec
        machine = self.machine
        if self.size.shape is None or self.size.num_parameters is None:
            yield "the model's dimensions: no seconds"
            return
        if not machine.knows_speed:
            yield f"the speed of {machine.gpu}: no seconds"
            return
        if self._lacks_cache:
            yield "seconds: vLLM's share of a GPU does not hold the weights"
            return
        if self.mean_response is None:
            limit = "" if self.at_the_limit is None else f"; if all have the most, {self.at_the_limit} s"
            yield (
                f"the mean length of responses: {self.lengths.response:,.0f} of {self.lengths.limit:,} "
                f"tokens are assumed (--mean-response){limit}"
            )
        yield f"the mean length of prompts: {self.lengths.prompt:,.0f} tokens are assumed"
        yield "how lengths are distributed: log-normal, cut at the limit, is assumed"
        if spec.environment.name != "single_turn":
            yield "the time of the environment's turns and tools: not counted"
        yield "the time of grading: not counted"
        if spec.rollout.max_staleness:
            yield "how much of sampling is beside training (rollout.max_staleness): stages are added up"
        if not machine.gpus:
            yield "the speed of this CPU: a usual one per core is assumed"

    # --- faster settings --------------------------------------------------------------------------

    def suggestions(self) -> list[Suggestion]:
        """Single settings that shorten the step and fit, or with which the run fits; the fastest first."""
        if not self.machine.gpus or not _intervals(self.work):
            return []
        at_most = (1 - _WORTH_SAYING) * self.intervals[_WHOLE].middle if self.fits() else math.inf
        found = []
        for setting, changed, why in self._changes() if self.fits() else self._smaller():
            seconds = changed.intervals.get(_WHOLE)
            if seconds and seconds.middle < at_most and changed.fits():
                found.append(Suggestion(setting, seconds, why))
        best: dict[str, Suggestion] = {}
        for each in sorted(found, key=lambda each: each.seconds.middle):
            best.setdefault(each.setting.partition("=")[0], each)
        return list(best.values())

    def _change(self, section: str, why: str, **values: object) -> tuple[str, Placement, str]:
        named = " ".join(f"{section}.{name}={_word(value)}" for name, value in values.items())
        return named, self._with(section, **values), why

    def _smaller(self) -> Iterator[tuple[str, Placement, str]]:
        """Settings that take less of a GPU's memory, the plan with each, and why."""
        engine = self.spec.engine
        actor = self.spec.actor
        rollout = self.spec.rollout
        change = self._change
        if engine.name == "deepspeed":
            for higher in range(self.stage + 1, 4):
                yield change("engine", "ranks share more of the state", zero_stage=higher)
            if engine.offload == "none" and engine.zero_stage:
                yield change("engine", "the optimizer is in the host's memory", offload="optimizer")
        if not self.spec.model.enable_gradient_checkpointing:
            yield change("model", "activations are computed again", enable_gradient_checkpointing=True)
        if not self.spec.model.use_liger:
            yield change("model", _LIGER, use_liger=True)
        budget = (actor.ppo_max_token_len_per_gpu or 0) // 2
        while budget * engine.sequence_parallel >= self.spec.max_length:
            yield change("actor", "smaller passes", ppo_max_token_len_per_gpu=budget)
            budget //= 2
        yield from self._fp8()
        share_now = round(100 * rollout.gpu_memory_utilization)
        if self._lacks_cache:
            if gpus := self._gpus_that_hold_the_weights():
                yield change("rollout", "GPUs share an engine's weights", tensor_model_parallel_size=gpus)
            for share in range(95, share_now, -5):
                yield change("rollout", "vLLM's weights and a cache", gpu_memory_utilization=share / 100)
        elif self.spec.rollout_engine.forms_batches:
            for share in range(share_now - 5, 10, -5):
                yield change("rollout", "a smaller cache", gpu_memory_utilization=share / 100)

    def _changes(self) -> Iterator[tuple[str, Placement, str]]:
        """Settings, the plan with each, and why it may be faster."""
        spec = self.spec
        engine = spec.engine
        actor = spec.actor
        model = spec.model
        rollout = spec.rollout
        change = self._change
        if engine.name == "deepspeed" and engine.offload == "none":
            for lower in range(1, self.stage):
                yield change("engine", "passes do not gather the weights", zero_stage=lower)
        if self.work.gathered and engine.shard_size is None and spec.trainer.nnodes > 1 and self.ranks > 1:
            yield change("engine", "weights are gathered within a node", shard_size=self.ranks)
        if not has_no_mask(model.attn_implementation):
            yield change(
                "model", "attention without a mask, over each sequence alone", attn_implementation="varlen"
            )
        if model.enable_gradient_checkpointing:
            stored = change("model", "layers are not computed again", enable_gradient_checkpointing=False)
            yield stored
            if not (model.use_liger or stored[1].fits()):
                why = f"layers are not computed again; {_LIGER}"
                yield change("model", why, use_liger=True, enable_gradient_checkpointing=False)
        budget = actor.ppo_max_token_len_per_gpu
        if budget:
            yield change("actor", "fewer passes", ppo_max_token_len_per_gpu=2 * budget)
        if spec.rollout_engine.forms_batches:
            for share in range(95, round(100 * rollout.gpu_memory_utilization), -5):
                yield change("rollout", "more sequences at once", gpu_memory_utilization=share / 100)
        elif rollout.name == "hf":
            yield change("rollout", "vLLM's kernels", name="vllm")
        yield from self._fp8()
        if rollout.engine_kwargs.get("enforce_eager"):
            kept = {name: value for name, value in rollout.engine_kwargs.items() if name != "enforce_eager"}
            changed = self._with("rollout", engine_kwargs=kept)
            yield "rollout.engine_kwargs.enforce_eager=false", changed, "kernels are launched as CUDA graphs"

    def _fp8(self) -> Iterator[tuple[str, Placement, str]]:
        """Sampling in fp8, the plan with it, and why: every token reads weights, keys and values."""
        given = self.spec.rollout.engine_kwargs
        can = self.spec.rollout.name == "vllm" and self.machine.has_fp8
        for option, what in {"quantization": "weights", "kv_cache_dtype": "keys and values"}.items():
            if can and option not in given:
                changed = self._with("rollout", engine_kwargs={**given, option: "fp8"})
                why = f"{what} of 8 bits, so that samples differ more from the policy; not tried with rlctl"
                yield f"rollout.engine_kwargs.{option}=fp8", changed, why

    def _with(self, section: str, **values: object) -> Placement:
        changed = getattr(self.spec, section).model_copy(update=values)
        spec = self.spec.model_copy(update={section: changed})
        return Placement(spec, self.size, self.machine, self.mean_response)

    @cached_property
    def _lacks_cache(self) -> bool:
        """Whether vLLM's share of a GPU is too small for the weights, or just holds them."""
        return any(part.name == "key-value cache" and part.num_bytes == 0.0 for part in self.gpu_parts)

    def fits(self) -> bool:
        """Whether a GPU holds the peak, and vLLM's share of it the weights."""
        if self._lacks_cache:
            return False
        return memory_total(self.gpu_parts) <= _USED_AT_MOST * self.machine.gpu_bytes

    # --- resources that do not suffice ------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """A problem per resource of which the machine has too little; a warning if the run may still work."""
        spec = self.spec
        machine = self.machine
        if spec.trainer.nnodes > machine.nodes and machine.name != THIS_MACHINE:
            message = f"the run takes {spec.trainer.nnodes} nodes, {machine.name} has {machine.nodes}"
            yield Problem("error", "trainer.nnodes", message, f"use {machine.nodes}")
        if machine.gpus:
            yield from self._gpu_problems()
            yield from self._slow_step()
        parts = self._on_this_host(self.host_parts)
        shared = self.shared_peak()
        key = "engine.offload"
        fix = "use more nodes or ranks, or offload less"
        if not machine.gpus:  # the ranks are in host memory
            key = "model.path"
            fix = "use a smaller model, lora_rank, shorter responses, or a GPU"
        if spec.trainer.save_in_background and self._copy_is_wanted and not self._copies_checkpoint:
            message = f"a copy of {gib(self._checkpoint_share())} does not fit into a node's memory"
            message += ", so training waits while checkpoints are written"
            yield Problem("warning", "trainer.save_in_background", message, "use more nodes, or set it false")
        host = memory_total(parts)
        if host > machine.host_bytes:
            largest = sorted(parts, key=lambda part: -(part.num_bytes or 0.0))[:3]
            listed = ", ".join(f"{part.name} {gib(part.num_bytes or 0.0)}" for part in largest)
            has = f"{machine.name} has {gib(machine.host_bytes)}"
            message = f"a node's host memory must hold {gib(host)} ({listed}), {has}"
            # On a CPU, shorter responses may fit, and the dry run may be for another machine.
            yield Problem("error" if machine.gpus else "warning", key, message, fix)
        if shared > machine.shm_bytes:
            message = f"/dev/shm must hold {gib(shared)}, {machine.name} has {gib(machine.shm_bytes)}"
            holds_weights = self.writes_weights and spec.rollout.server.weights_dir is None
            fix = "docker run --shm-size (or --ipc=host); or rollout.server.weights_dir on a disk"
            yield Problem("error" if holds_weights else "warning", "rollout.server.weights_dir", message, fix)

    def _slow_step(self) -> Iterator[Problem]:
        """A warning if a step takes more than about `_SLOW_STEP_S`, with settings that shorten it."""
        total = self.intervals.get(_WHOLE)
        if total is None or total.middle <= _SLOW_STEP_S or not self.fits():
            return
        faster = [(each.setting, each.seconds) for each in self.suggestions()[:_SHOWN]]
        ways = ("", faster), ("less in a step: ", list(self._smaller_steps()))
        listed = "; or ".join(
            words + "; ".join(f"{setting}: {seconds} s" for setting, seconds in changes)
            for words, changes in ways
            if changes
        )
        minutes = Seconds(total.low / 60, total.high / 60)
        message = f"a step takes {minutes} minutes on {self.machine.name} (an estimate)"
        fix = listed or "use a smaller model or more GPUs"
        yield Problem("warning", "data.train_batch_size", message, fix)

    def _smaller_steps(self) -> Iterator[tuple[str, Seconds]]:
        """Setting and seconds of a step with it, for fewer prompts and shorter responses; fastest first."""
        data = self.spec.data
        unit = math.lcm(self.spec.world_size, self.spec.actor.ppo_mini_batch_size or 1)
        fewer = max(unit, data.train_batch_size // 4 // unit * unit)
        values = {"train_batch_size": fewer, "max_response_length": max(1, data.max_response_length // 2)}
        changed = {
            f"data.{name}={value}": self._with("data", **{name: value}) for name, value in values.items()
        }
        found = {setting: plan.intervals[_WHOLE] for setting, plan in changed.items() if plan.fits()}
        for setting, seconds in sorted(found.items(), key=lambda change: change[1].middle):
            if seconds.middle < self.intervals[_WHOLE].middle:
                yield setting, seconds

    def _gpus_that_hold_the_weights(self) -> int | None:
        """The fewest GPUs of one engine that hold its weights and a cache; None: no number does."""
        heads = self.size.shape.heads if self.size.shape else 0
        own = self.spec.rollout.tensor_model_parallel_size
        for gpus in range(own + 1, self.spec.trainer.n_gpus_per_node + 1):
            if heads % gpus or self.spec.trainer.n_gpus_per_node % gpus:
                continue
            changed = self._with("rollout", tensor_model_parallel_size=gpus)
            caches = [part for part in changed.gpu_parts if part.name == "key-value cache"]
            if any((part.num_bytes or 0.0) > 0 for part in caches):
                return gpus
        return None

    def _gpu_problems(self) -> Iterator[Problem]:
        spec = self.spec
        machine = self.machine
        rollout = self.spec.rollout
        own = spec.has_rollout_servers and not (rollout.server.urls or rollout.server.is_placed_by_ray)
        needed = self.ranks + (rollout.server.replicas * rollout.tensor_model_parallel_size if own else 0)
        if needed > machine.gpus:
            message = f"the run takes {needed} GPUs of each node, {machine.name} has {machine.gpus}"
            yield Problem("error", "trainer.n_gpus_per_node", message, f"use {machine.gpus} or fewer in all")
        heads = self.size.shape.heads if self.size.shape else 0
        if heads % rollout.tensor_model_parallel_size:
            message = f"{heads} attention heads cannot be spread evenly over the GPUs of an engine"
            fix = "use a divisor of the number of heads"
            yield Problem("error", "rollout.tensor_model_parallel_size", message, fix)
        length = spec.max_length
        kernel = spec.model.attn_implementation
        if length > _LONGEST_DENSE and not has_no_mask(kernel):
            message = (
                f"{kernel} is slow for rows of {length} tokens: it reads a dense mask, {gib(length**2)} each"
            )
            fix = "write varlen, which packs sequences without a mask, if the model supports it"
            yield Problem("warning", "model.attn_implementation", message, fix)
        of_gpu = gib(machine.gpu_bytes)
        if self._lacks_cache:
            message = f"{rollout.gpu_memory_utilization:.0%} of a GPU of {of_gpu} does not hold the weights"
            shared = self._gpus_that_hold_the_weights()
            fix = "raise it, or use servers"
            if shared:
                fix = f"write rollout.tensor_model_parallel_size={shared}, which holds them; or {fix}"
            yield Problem("error", "rollout.gpu_memory_utilization", message, fix)
        always = self.gpu_peak()
        peak = memory_total(self.gpu_parts)
        fix = "see “Less memory for a step” in docs/how-to/scale.md; or use more GPUs"
        for each in [] if self.fits() else self.suggestions()[:1]:
            fix = f"write {each.setting}, with which it fits in {each.seconds} s per step; or {fix}"
        if always > machine.gpu_bytes:
            message = f"{gib(always)} are always needed, a GPU of {machine.name} has {of_gpu}"
            yield Problem("error", "engine.zero_stage", message, fix)
        elif peak > machine.gpu_bytes:
            message = f"up to {gib(peak)} are needed at once, a GPU of {machine.name} has {of_gpu}"
            yield Problem("error", "actor.ppo_max_token_len_per_gpu", message, fix)
        elif peak > _USED_AT_MOST * machine.gpu_bytes:
            message = f"up to {gib(peak)} of {of_gpu} are needed at once: little is left for fragments"
            yield Problem("warning", "actor.ppo_max_token_len_per_gpu", message, fix)


def _intervals(work: StepWork) -> dict[str, Seconds]:
    fast, slow = GPU_RATES if work.machine.gpus else CPU_RATES
    highs = work.seconds(slow)
    return {name: Seconds(low, highs[name]) for name, low in work.seconds(fast).items()}


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _power_of_two(num_bytes: float) -> float:
    """Bytes that torch's pinned allocator reserves for a buffer of this size."""
    return float(1 << max(int(num_bytes) - 1, 0).bit_length()) if num_bytes >= 1 else 0.0
