"""Estimates of a run's memory and of the duration of its phases on a given machine, before it starts.

GPU memory is that of `rlctl.run_spec.memory`. Times follow a roofline model: the larger of the computing
time (at `_EFFICIENCY` of the peak) and the transfer time. They are usually correct within a factor of two,
which is enough to distinguish a slow run from a broken one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rlctl.capabilities.sections import sections_on
from rlctl.errors import Problem
from rlctl.run_spec.explain import BatchArithmetic
from rlctl.run_spec.machine import GIB, MACHINES, Machine, gib
from rlctl.run_spec.memory import (
    MemoryPart,
    Phase,
    adapter_parameters,
    has_no_mask,
    memory_parts,
    memory_total,
    rollout_workspace,
)
from rlctl.run_spec.model_size import ModelSize, Shape
from rlctl.run_spec.run_spec import RunSpec

#: Fractions of the peak FLOP/s that matrix products reach, and of the memory bandwidth that decoding reaches.
_EFFICIENCY, _DECODING = 0.4, 0.7
#: Overhead of a decoding step in seconds: kernel launches, sampling, scheduling.
_STEP_S = 0.003
#: Overhead in seconds of an optimizer step, and per weight of a sync: launches, Python. Measured with a model
#: whose arithmetic takes no time.
_ENGINE_STEP_S, _SYNC_WEIGHT_S = 0.05, 0.001
#: Longest row of tokens for attention with a dense mask on a GPU.
_LONGEST_DENSE = 8192
#: Fraction of a GPU's memory that an estimate may take: the rest is for fragmentation.
_USED_AT_MOST = 0.95
#: Weights of a layer: projections, their biases, norms.
_WEIGHTS_PER_LAYER = 12
#: Assumed mean length of a response as a fraction of `max_response_length`, for times.
_MEAN_RESPONSE = 0.75
#: Host memory of a process for the libraries of torch, CUDA and vLLM, and for its CUDA context.
_PROCESS_BYTES = 4 * GIB
#: Memory that NCCL uses in `/dev/shm` per rank.
_NCCL_BYTES = 32 * 2**20
#: Number of elements in one host buffer of DeepSpeed's stage 3 (`sub_group_size`).
_SUB_GROUP = 1_000_000_000
#: Bytes per second for writing or reading a file in shared memory.
_FILES = 3e9
#: Seconds of a step above which the plan warns.
_SLOW_STEP_S = 600
#: Phases of host memory that is not held for the whole run.
_LOADING, _SAVING, _TRAINING = "load", "save", "train"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a run: peak memory and transfers."""

    name: str  # load, engine, partition, generate, score, update, step, sync
    gpu: float  # peak bytes per GPU
    host: float  # peak bytes per node, including pinned and shared memory
    moved: dict[str, float]  # link → bytes per GPU
    seconds: float | None = None  # per training step; None: the stage runs only once, or the time is unknown


class Placement:
    """Memory and time estimates of a spec on a machine; `size` is that of the policy."""

    def __init__(self, spec: RunSpec, size: ModelSize, machine: Machine) -> None:
        self.spec, self.size, self.machine = spec, size, machine
        self.width, self.stage = spec.engine.width, spec.engine.effective_stage
        self.ranks = spec.trainer.n_gpus_per_node
        self.sampling_width = spec.rollout_width
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
        return [item for item in self._host_parts() if item.num_bytes is None or item.num_bytes > 0]

    def shared_peak(self) -> float:
        """Bytes in `/dev/shm` per node."""
        return sum(item.num_bytes or 0.0 for item in self.host_parts if item.is_shared)

    def _host_parts(self) -> Iterator[MemoryPart]:
        spec, ranks, parameters, whole = self.spec, self.ranks, self.size.num_parameters, self.whole
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
        spec, ranks = self.spec, self.ranks
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
        shape, parameters = self.size.shape, self.size.num_parameters or 0
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
        shape, parameters, width = self.size.shape, self.size.num_parameters or 0, num_bytes / shared
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
        spec, whole = self.spec, self.whole
        crossing = "network" if spec.trainer.nnodes > 1 else "GPU to GPU"
        copy, base = self.sampling * self.keeps_copy, whole * spec.engine.offload_base
        offload = 6.0 / self.width * whole / spec.world_size * (spec.engine.offload != "none")
        always, generation = self.gpu_peak(), self.gpu_peak("generation")
        # Without gradient, the activations of the policy's layers are not kept.
        scoring = [item for item in self.gpu_parts if item.phases != ("head", "layers")]
        started = self.sampling if base else generation
        partition = always + self._largest_weights if self.stage == 3 else max(whole, always)
        update = self.gpu_peak("head", "layers", "critic")
        synced = {crossing: whole if self._gathered else 0.0, "host to GPU": copy}
        synced |= {
            "broadcast to servers": whole * self.broadcasts_weights,
            "files": whole * self.writes_weights,
        }
        rows: list[tuple[str, float, str, dict[str, float]]] = [
            ("load", 0.0, _LOADING, {"disk": whole}),
            ("engine", started, _LOADING, {}),
            ("partition", partition, _LOADING, {"host to GPU": whole}),
            ("generate", generation, "", {"host to GPU": copy}),
            (
                "score",
                memory_total(scoring, ("head", "layers")),
                _TRAINING,
                {"host to GPU": base, crossing: self._scoring_passes * self._gathered},
            ),
            ("update", update, _TRAINING, {crossing: self._exchanged()}),
            ("step", self.gpu_peak("step", "critic's step"), _TRAINING, {"host to GPU": offload}),
            ("sync", generation, _SAVING, synced),
        ]
        seconds, parts = self.seconds(), []
        for name, gpu, phase, moved in rows:
            links = {link: num_bytes for link, num_bytes in moved.items() if num_bytes}
            host = memory_total(self.host_parts, (phase,))
            parts.append(Stage(name, gpu, host, links, seconds.get(name)))
        return parts

    def tokens(self) -> float:
        """Prompt and response tokens per step and rank, at the mean lengths that are assumed for times."""
        data = self.spec.data
        length = data.max_prompt_length / 2 + data.max_response_length * _MEAN_RESPONSE
        return length * self._responses()

    def _forward_flops(self, shape: Shape, parameters: int) -> float:
        """FLOPs of a forward pass over the rows of one step on one rank.

        Two per token and weight that it uses; for attention, two per element of a query, position and layer.
        Without a token budget, a micro-batch computes a prompt once for all of its responses there. The
        output head is computed for response tokens only.
        """
        actor, data, responses = self.spec.actor, self.spec.data, self._responses()
        rows = actor.ppo_micro_batch_size_per_gpu
        once = 1.0 if actor.ppo_max_token_len_per_gpu else -(-rows // self.spec.rollout.n) / rows
        sampled = responses * data.max_response_length * _MEAN_RESPONSE
        tokens = responses * once * data.max_prompt_length / 2 + sampled
        head = shape.vocab * shape.hidden
        attention = 2 * shape.layers * shape.queries * self.tokens() / responses
        return tokens * (2 * (parameters - head) + attention) + sampled * 2 * head

    def _responses(self) -> float:
        return self.spec.data.train_batch_size * self.spec.rollout.n / self.spec.world_size

    @property
    def _micro_batches(self) -> float:
        """Forward passes of one model over the batch, per rank."""
        batch, budget = BatchArithmetic(self.spec), self.spec.actor.ppo_max_token_len_per_gpu
        if budget:
            return max(float(batch.mini_batches), self.tokens() / budget)
        return float(batch.mini_batches * (batch.micro_batches_per_rank or 1))

    @property
    def _scoring_passes(self) -> int:
        """Models that score the batch before the updates."""
        algorithm = self.spec.algorithm
        measured = map(algorithm.estimator_needs, ("score_norms", "sequence_weights"))
        scores_policy = not algorithm.rollout_correction.bypass_mode or any(measured)
        others = self.spec.needs_reference, self.spec.trains_critic
        of_capabilities = sum(each.num_scoring_passes(self.spec) for each in sections_on(self.spec).values())
        return scores_policy + sum(others) + of_capabilities

    @property
    def _update_passes(self) -> int:
        """Forward passes over the batch that cost as much as all updates; a backward pass costs two."""
        each = 3 + self.spec.model.enable_gradient_checkpointing
        return self.spec.actor.ppo_epochs * each * (1 + self.spec.trains_critic)

    @property
    def _gathered(self) -> float:
        """Bytes of weights that a rank receives in one forward pass over the batch, under ZeRO-3."""
        return self._micro_batches * self.whole if self.stage == 3 and self.spec.world_size > 1 else 0.0

    @property
    def _reduced(self) -> float:
        """Bytes that a rank exchanges below ZeRO-3 to sum gradients and to collect the updated weights.

        Sums are in float32, at stages 0 and 1 at every optimizer step, at stage 2 after every backward pass.
        Stage 0 sums all gradients on all ranks, which moves them twice.
        """
        spec, steps = self.spec, self.spec.updates_per_batch
        if spec.world_size == 1 or self.stage == 3:
            return 0.0
        trained = self._trained * (1 + spec.trains_critic)
        sums = (8 * steps, 4 * steps, 4 * self._micro_batches * spec.actor.ppo_epochs)[self.stage]
        return trained * (sums + (self.width * steps if self.stage else 0.0))

    @property
    def _trained(self) -> int:
        """Number of parameters of the policy that are trained."""
        return adapter_parameters(self.spec, self.size) or self.size.num_trainable or 0

    def seconds(self) -> dict[str, float]:
        """Phase → seconds per step; empty if the model's dimensions or the GPU's speeds are unknown."""
        spec, shape, parameters = self.spec, self.size.shape, self.size.num_parameters
        if shape is None or parameters is None or not self.machine.knows_speed:
            return {}
        machine, whole, sampling = self.machine, self.whole, self.sampling
        speed = machine.flops * _EFFICIENCY / max(1, self.ranks // (machine.gpus or 1))
        read = self.size.num_trainable or parameters
        forward = self._forward_flops(shape, read - self.size.num_idle) / speed
        link = machine.network if spec.trainer.nnodes > 1 else machine.link
        once = max(forward, self._gathered / link)
        shard = self._trained / spec.world_size
        per_step = 40 * shard / machine.gpu_bandwidth
        if spec.engine.offload != "none" and machine.gpus:
            per_step = 28 * shard * self.ranks / machine.host_bandwidth + 6 * shard / machine.bus
        per_step += _ENGINE_STEP_S
        sync = 2 * sampling / machine.gpu_bandwidth + (whole / link if self._gathered else 0.0)
        if spec.syncs_adapter:
            sync = self._trained * self.width / machine.gpu_bandwidth
        elif self.broadcasts_weights:
            sync += whole / machine.link
        elif self.writes_weights:
            sync += 2 * whole / _FILES
        if self.keeps_copy and machine.gpus:
            sync += 2 * sampling / machine.bus
        sync += _WEIGHTS_PER_LAYER * shape.layers * _SYNC_WEIGHT_S
        figures = {
            "generate": self._generation(shape, parameters),
            "score": self._scoring_passes * once,
            "update": self._update_passes * once + self._reduced / link,
            "step": spec.updates_per_batch * per_step * (1 + spec.trains_critic),
            "sync": sync,
        }
        return figures | {"whole step": sum(figures.values())}

    def _generation(self, shape: Shape, parameters: int) -> float:
        """Seconds to sample the responses of one step.

        Every decoding step reads all weights, and the keys and values of the running sequences. With several
        GPUs per engine, each layer has two all-reduces of the residual stream.
        """
        spec, machine, data = self.spec, self.machine, self.spec.data
        cached = 2 * shape.layers * shape.keys * self.sampling_width  # bytes per token
        servers = spec.rollout.server.replicas if spec.has_rollout_servers else 0
        gpus = spec.rollout.tensor_model_parallel_size
        engines = servers or max(1, spec.world_size // gpus)
        responses = spec.data.train_batch_size * spec.rollout.n / engines
        mean = data.max_prompt_length / 2 + data.max_response_length * _MEAN_RESPONSE / 2
        weights = parameters * self.sampling_width
        share = spec.rollout.gpu_memory_utilization * machine.gpu_bytes
        share -= memory_total(rollout_workspace(spec, shape, machine.gpu_bytes))
        cache_bytes = share * gpus - weights
        fits = max(1.0, cache_bytes / (cached * mean)) if machine.gpus else responses
        at_once = min(responses, fits, spec.rollout.max_num_seqs or responses)
        read = weights + at_once * cached * mean
        active = parameters - self.size.num_idle
        computed = 2 * active * at_once / (machine.flops * gpus)
        slower = 1.0 if spec.rollout_engine.forms_batches or not machine.gpus else 5.0
        each = max(read / (machine.gpu_bandwidth * gpus * _DECODING), computed) + _STEP_S
        if gpus > 1:
            each += 2 * shape.layers * 2 * at_once * shape.hidden * self.sampling_width / machine.link
        prompts = responses / spec.rollout.n * data.max_prompt_length * 2 * active
        # The longest response of the first wave reaches the limit; further waves take the mean length.
        waves = 1 + max(0.0, responses / at_once - 1) * _MEAN_RESPONSE
        return slower * (
            waves * data.max_response_length * each + prompts / (machine.flops * _EFFICIENCY * gpus)
        )

    # --- memory that the run leaves unused ---------------------------------------------------------

    def suggestions(self) -> Iterator[str]:
        """Settings that use free memory of the GPUs, each with its reason; none if the run does not fit."""
        machine, stage, rollout = self.machine, self.stage, self.spec.rollout
        if not machine.gpus or not self._fits():
            return
        placed = self
        for lower in range(1, stage):
            changed = self._with("engine", zero_stage=lower)
            if (less := self._exchanged() - changed._exchanged()) > 0 and changed._fits():
                peak, placed = gib(memory_total(changed.gpu_parts)), changed
                yield (
                    f"engine.zero_stage={lower} fits, a peak of {peak}: passes do not gather the weights, "
                    f"{gib(less)} less to send per GPU and step"
                )
                break
        wanted, fitting = placed._responses() * self.shared, placed._sequences_at_once()
        shares = [share / 100 for share in range(95, round(100 * rollout.gpu_memory_utilization), -5)]
        for share in shares if fitting is not None and fitting < wanted else ():
            changed = placed._with("rollout", gpu_memory_utilization=share)
            if changed._fits():
                yield (
                    f"rollout.gpu_memory_utilization={share:g} fits: the cache holds "
                    f"{changed._sequences_at_once():.0f} instead of {fitting:.0f} sequences of full length, "
                    f"of {wanted:.0f} to sample"
                )
                break

    def _with(self, section: str, **values: object) -> Placement:
        changed = getattr(self.spec, section).model_copy(update=values)
        return Placement(self.spec.model_copy(update={section: changed}), self.size, self.machine)

    def _fits(self) -> bool:
        return memory_total(self.gpu_parts) <= _USED_AT_MOST * self.machine.gpu_bytes

    def _exchanged(self) -> float:
        """Bytes that a GPU sends to others in the updates of a step."""
        return self._update_passes * self._gathered + self._reduced

    def _sequences_at_once(self) -> float | None:
        """Sequences of full length that fit into an engine's cache; None: the cache has no fixed size."""
        if not self.spec.rollout_engine.forms_batches:
            return None
        both = (*self.gpu_parts, *memory_parts(self.spec, self.size))  # on an unknown GPU: of one sequence
        cache, one = [part.num_bytes for part in both if part.name == "key-value cache"] or [None, None]
        return cache / one if cache and one else None

    # --- resources that do not suffice ------------------------------------------------------------

    def problems(self) -> Iterator[Problem]:
        """A problem per resource of which the machine has too little; a warning if the run may still work."""
        spec, machine = self.spec, self.machine
        if spec.trainer.nnodes > machine.nodes and machine.name in MACHINES:
            message = f"the run takes {spec.trainer.nnodes} nodes, {machine.name} has {machine.nodes}"
            yield Problem("error", "trainer.nnodes", message, f"use {machine.nodes}")
        if machine.gpus:
            yield from self._gpu_problems()
            yield from self._slow_step()
        parts, shared = self.host_parts, self.shared_peak()
        key, fix = "engine.offload", "use more nodes or ranks, or offload less"
        if not machine.gpus:  # the ranks are in host memory
            key, fix = "model.path", "use a smaller model, lora_rank, shorter responses, or a GPU"
            sizes = [(item, self.ranks * (item.num_bytes or 0.0)) for item in self.gpu_parts]
            parts = [*parts, *(replace(part, num_bytes=size) for part, size in sizes)]
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
        """A warning if a step is estimated at more than `_SLOW_STEP_S`, with the changes that shorten it."""
        total = self.seconds().get("whole step", 0.0)
        if total <= _SLOW_STEP_S:
            return
        shorter = sorted(self._shorter_steps(), key=lambda change: change[1])
        listed = "; ".join(f"{setting}: about {seconds:,.0f} s" for setting, seconds in shorter)
        message = f"a step takes about {total / 60:,.0f} minutes on {self.machine.name} (an estimate)"
        fix = listed or "use a smaller model or more GPUs"
        yield Problem("warning", "data.train_batch_size", message, fix)

    def _shorter_steps(self) -> Iterator[tuple[str, float]]:
        """Setting and seconds of a step with it, for each change that shortens the step and still fits."""
        data, now, fitted = self.spec.data, self.seconds()["whole step"], self._fits()
        unit = math.lcm(self.spec.world_size, self.spec.actor.ppo_mini_batch_size or 1)
        fewer = max(unit, data.train_batch_size // 4 // unit * unit)
        changes = {"train_batch_size": fewer, "max_response_length": max(1, data.max_response_length // 2)}
        for name, value in changes.items():
            changed = self._with("data", **{name: value})
            seconds = changed.seconds()["whole step"]
            if seconds < now and (changed._fits() or not fitted):
                yield f"data.{name}={value}", seconds

    def _gpu_problems(self) -> Iterator[Problem]:
        spec, machine, rollout = self.spec, self.machine, self.spec.rollout
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
        length, kernel = spec.max_length, spec.model.attn_implementation
        if length > _LONGEST_DENSE and not has_no_mask(kernel):
            message = (
                f"{kernel} is slow for rows of {length} tokens: it reads a dense mask, {gib(length**2)} each"
            )
            fix = "write varlen, which packs sequences without a mask, if the model supports it"
            yield Problem("warning", "model.attn_implementation", message, fix)
        of_gpu = gib(machine.gpu_bytes)
        if any(item.name == "key-value cache" and item.num_bytes == 0.0 for item in self.gpu_parts):
            message = f"{rollout.gpu_memory_utilization:.0%} of a GPU of {of_gpu} does not hold the weights"
            yield Problem("error", "rollout.gpu_memory_utilization", message, "raise it, or use servers")
        always, peak = self.gpu_peak(), memory_total(self.gpu_parts)
        fix = "see “Less memory for a step” in docs/how-to/scale.md; or use more GPUs"
        if always > machine.gpu_bytes:
            message = f"{gib(always)} are always needed, a GPU of {machine.name} has {of_gpu}"
            yield Problem("error", "engine.zero_stage", message, fix)
        elif peak > machine.gpu_bytes:
            message = f"up to {gib(peak)} are needed at once, a GPU of {machine.name} has {of_gpu}"
            yield Problem("error", "actor.ppo_max_token_len_per_gpu", message, fix)


def _power_of_two(num_bytes: float) -> float:
    """Bytes that torch's pinned allocator reserves for a buffer of this size."""
    return float(1 << max(int(num_bytes) - 1, 0).bit_length()) if num_bytes >= 1 else 0.0
