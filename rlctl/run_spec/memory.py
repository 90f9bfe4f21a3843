"""Memory estimate per GPU; docs/how-to/scale.md explains its parts.

Activations are the sum of the tensors that PyTorch saves for the backward pass of a Llama-like layer, as
Transformers implements it; `benchmarks/memory.py` compares the sum with measurements. GPU and CPU save the
same tensors: autocast is not used, and the fused attention kernels save the same ones.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from rlctl.capabilities.sections import further_models, sections_on
from rlctl.run_spec.model import ALL_LINEAR, ModelSpec
from rlctl.run_spec.model_size import ModelSize, Shape, size_at
from rlctl.run_spec.run_spec import RunSpec

#: Number of logits that the output head computes at once on the host or a small GPU (128 MiB in float32).
MAX_LOGITS = 1 << 25
#: Fraction of a GPU's memory for the logits of a chunk and their gradient.
_LOGITS_SHARE = 1 / 32

#: Bytes per logit, measured: the logit, its softmax and its gradient in float32, and temporaries.
LOGIT_BYTES = 20

#: Number of gradient elements per reduction under ZeRO. DeepSpeed allocates the buffers at full size.
REDUCE_BUCKET = 50_000_000

#: Number of gradient elements per reduction without ZeRO (DeepSpeed's default).
PLAIN_BUCKET = 500_000_000

#: Bytes per logit of vLLM's sampler, and for its CUDA graphs and libraries: within 3 % of published logs.
_SAMPLER_BYTES, _GRAPH_BYTES = 16, 2**30
#: Bytes that each process takes of a GPU beside tensors, for CUDA's context and libraries; and with several
#: ranks for NCCL's buffers. Usual figures of others' runs; rlctl was not measured.
_CONTEXT_BYTES, _NCCL_BYTES = 3 * 2**28, 2**30
#: Name of the part with both.
CONTEXT = "CUDA and NCCL"
#: vLLM's defaults for GPUs of at least this many bytes, and for smaller ones: sequences and tokens at once.
_LARGE_GPU, _AT_ONCE, _AT_ONCE_SMALL_GPU = 70 * 2**30, (1024, 16_384), (256, 8192)

#: Number of parameters that ZeRO-3 holds unsharded at once (DeepSpeed's `stage3_max_live_parameters`).
LIVE_PARAMETERS = 1_000_000_000

#: Phases of a step that never overlap: sampling; the policy's pass with its output head; the backward pass
#: through its layers; the critic's pass; the optimizers' steps.
Phase = Literal["generation", "head", "layers", "critic", "step", "critic's step"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the estimate."""

    name: str  # what needs the memory
    #: per GPU, or per node for a part of host memory; None if the model's dimensions are unknown
    num_bytes: float | None
    #: phases in which it is allocated; empty: all. Only the largest phase counts for the peak
    phases: tuple[str, ...] = ()
    note: str = ""  # what else to know of it; of page-locked host memory: `pinned`
    is_shared: bool = False  # a file in `/dev/shm`


def packed_width(hidden: int) -> int:
    """Tokens per packed row, such that attention over the row costs about a tenth of the linear layers."""
    return max(64, hidden // 2)


def has_no_mask(attention: str) -> bool:
    """Whether an attention implementation separates the sequences of a packed row without a mask."""
    return "flash" in attention or "varlen" in attention  # also in names of kernels from the hub


def logits_at_once(gpu_bytes: float | None) -> int:
    """Number of logits per chunk of the output head on a GPU with this memory; None: on the host.

    Each chunk reads the head's weights and accumulates their gradient, so few large chunks are faster.
    """
    return max(MAX_LOGITS, int((gpu_bytes or 0.0) * _LOGITS_SHARE / LOGIT_BYTES))


def sequences_at_once(gpu_bytes: float | None) -> int:
    """Most sequences that vLLM samples at once on a GPU with this memory, by its defaults."""
    return (_AT_ONCE if (gpu_bytes or 0.0) >= _LARGE_GPU else _AT_ONCE_SMALL_GPU)[0]


def memory_parts(spec: RunSpec, size: ModelSize, gpu_bytes: float | None = None) -> list[MemoryPart]:
    """Parts of one rank's memory; `gpu_bytes`: memory of its GPU, None: unknown."""
    return _Estimate(spec, size, gpu_bytes).parts()


def adapter_parameters(spec: RunSpec, size: ModelSize) -> int | None:
    """Number of parameters that LoRA trains; None: all weights are trained, or the dimensions are unknown."""
    if not (spec.model.lora_rank and size.shape):
        return None
    ends = _adapted(spec.model, size.shape).values()
    return size.shape.layers * spec.model.lora_rank * sum(inputs + outputs for inputs, outputs in ends)


def _adapted(model: ModelSpec, shape: Shape) -> dict[str, tuple[int, int]]:
    """Matrices of a layer that have adapters → (inputs, outputs); empty without LoRA."""
    names = model.target_modules if model.lora_rank else []
    matrices = shape.matrices()
    of_experts = {"gate_proj", "up_proj", "down_proj"} if shape.has_experts else set()
    wanted = matrices.keys() - of_experts if ALL_LINEAR in names else matrices.keys() & names
    return {name: matrices[name] for name in matrices if name in wanted}


def memory_total(parts: Sequence[MemoryPart], phases: Container[str] | None = None) -> float:
    """The peak in bytes: the parts that are always held, and the largest of `phases` (None: of all).

    Parts of unknown size are not counted.
    """
    sums: dict[str, float] = {}
    for part in parts:
        for phase in part.phases:
            if phases is None or phase in phases:
                sums[phase] = sums.get(phase, 0.0) + (part.num_bytes or 0.0)
    return sum(part.num_bytes or 0.0 for part in parts if not part.phases) + max(sums.values(), default=0.0)


def rollout_workspace(spec: RunSpec, shape: Shape | None, gpu_bytes: float | None) -> list[MemoryPart]:
    """What vLLM reserves besides weights and cache: the peak of its profiling pass, and CUDA graphs.

    The pass runs the most tokens of a step through the layers, and the most sequences through the sampler.
    """
    if not (spec.rollout_engine.forms_batches and shape and gpu_bytes):
        return []
    sequences = spec.rollout.max_num_seqs or sequences_at_once(gpu_bytes)
    width = spec.rollout_width
    tokens = (_AT_ONCE if gpu_bytes >= _LARGE_GPU else _AT_ONCE_SMALL_GPU)[1]
    largest = max(
        tokens * 3 * (shape.hidden + shape.inner) * width,
        sequences * shape.vocab * _SAMPLER_BYTES,
    )
    return [MemoryPart("rollout's workspace", largest + _GRAPH_BYTES, ("generation",))]


@dataclass(frozen=True)
class _Layer:
    """Activations of one decoder layer, in bytes per token."""

    model: ModelSpec  # attention kernel and adapters
    shape: Shape  # dimensions of the model
    length: int  # tokens of a row, prompts and responses
    width: int  # bytes per number in the engine's dtype

    def kept(self) -> int:
        """Tensors that the forward pass saves for the backward pass."""
        return self._norms() + self._attention() + self.mask + self._feed_forward()

    def backward(self) -> int:
        """Gradients at the peak of the layer's backward pass.

        These are the gradients of the residual stream, of the norm before it, of the activated gate and of
        the up projection. With eager attention the peak may be at the softmax, whose gradient is float32; the
        tensors saved by the feed-forward layer, and the cast scores, are freed by then.
        """
        shape = self.shape
        width = self.width
        widest = 2 * width * shape.inner
        if self.model.attn_implementation == "eager":
            scores = (8 if width == 4 else 8 - width) * shape.heads * self.length
            widest = max(widest, scores - self._feed_forward())
        return 2 * width * shape.hidden + widest

    def _norms(self) -> int:
        """Tensors that the two norms save, and the adapters' low-rank activations.

        Each norm saves its input in float32, the scaled input if its weight is trained, and its output if a
        trained matrix reads it. Instead of the first two, Liger's norms save the input in the engine's dtype.
        """
        lora = self.model.lora_rank
        width = self.width
        adapted = _adapted(self.model, self.shape)
        readers = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}
        outputs = sum(bool(read.intersection(adapted)) for read in readers) if lora else 2
        each = width if self.model.use_liger else 4 + (0 if lora else width)
        # The rotary embedding of the outputs of norms per head saves nothing.
        per_head = each * (self.shape.queries + self.shape.keys) * self.shape.norms_heads
        return (2 * each + outputs * width) * self.shape.hidden + per_head + len(adapted) * width * lora

    def _attention(self) -> int:
        """Queries, keys, values, the output, and what the kernel saves of the softmax."""
        shape = self.shape
        width = self.width
        kernel = self.model.attn_implementation
        if kernel == "eager":  # the softmax in float32, and cast to the dtype of the values
            return 4 * width * shape.queries + (4 if width == 4 else 4 + width) * shape.heads * self.length
        # With a mask, kernels need keys and values repeated per head. All save a log-sum-exp per head.
        own = shape.keys if has_no_mask(kernel) else shape.queries
        return 2 * width * (shape.queries + own) + 4 * shape.heads

    @property
    def mask(self) -> int:
        """The mask, which rows of unequal length need, and which every layer casts from bool to `width`."""
        kernel = self.model.attn_implementation
        return 0 if kernel == "eager" or has_no_mask(kernel) else self.width * self.length

    def _feed_forward(self) -> int:
        """Gate, activated gate (not with Liger), up projection; their product if `down_proj` is trained."""
        reads = not self.model.lora_rank or "down_proj" in _adapted(self.model, self.shape)
        return (3 - self.model.use_liger + reads) * self.width * self.shape.inner


@dataclass(frozen=True, slots=True)
class _Rows:
    """Input of the layers for one micro-batch: total tokens, and tokens per row."""

    tokens: int
    length: int


class _Estimate:
    """Computes the parts of the estimate for one spec."""

    def __init__(self, spec: RunSpec, size: ModelSize, gpu_bytes: float | None) -> None:
        self.spec = spec
        self.policy = size
        self.gpu_bytes = gpu_bytes
        self.width = spec.engine.width
        self.stage = spec.engine.effective_stage
        self.length = spec.max_length

    def parts(self) -> list[MemoryPart]:
        spec = self.spec
        policy = self.policy
        parts = self._trained(policy, adapter_parameters(spec, policy))
        if spec.engine.offload_base:
            parts[0] = replace(
                parts[0], phases=tuple(phase for phase in get_args(Phase) if phase != "generation")
            )
        if not spec.has_rollout_servers:  # servers use separate GPUs
            parts.append(self._sampling_copy())
        if spec.trains_critic:
            critic = size_at(spec.model, spec.critic.path) if spec.critic.path else policy
            read = replace(critic, num_parameters=critic.num_trainable)  # a critic has only the text decoder
            parts += self._trained(read, None, "critic's ")
            model = spec.model.model_copy(update={"lora_rank": 0})  # a critic has no adapters
            sizes = spec.critic_micro_batch_size, spec.critic_max_token_len
            parts += self._layers_pass(model, critic.shape, sizes, ("critic",), "critic's ")
        if spec.needs_reference and (spec.ref.path or not spec.model.lora_rank):
            reference = size_at(spec.model, spec.ref.path) if spec.ref.path else policy
            parts.append(self._part("reference's weights", reference.num_parameters, self.width, 3))
            parts += self._copy_of_group("reference's weights of a group", reference.num_parameters)
        for further in further_models(spec):
            parameters = size_at(spec.model, further.path).num_parameters
            parts.append(self._part(f"{further.role}'s weights", parameters, self.width, 3))
        reward = spec.reward.model
        terms = spec.reward.all_terms
        if reward.path and reward.device is None and any(term.name == "model" for term in terms):
            size = size_at(spec.model, reward.path)
            width = {"fp32": 4, "bf16": 2}[reward.dtype]
            parts.append(self._part("reward model's weights", size.num_parameters, width, 4))  # not sharded
        if not spec.has_rollout_servers:
            parts += [*rollout_workspace(spec, policy.shape, self.gpu_bytes), self._cache()]
        if self.gpu_bytes is not None:
            parts.append(MemoryPart(CONTEXT, _CONTEXT_BYTES + _NCCL_BYTES * (spec.world_size > 1)))
        for section in sections_on(spec).values():
            count, waiting = section.num_listed_tokens(spec)
            if count:
                parts.append(self._listed_tokens(count, waiting))
        return [*parts, *self._policy_pass()]

    def _trained(self, size: ModelSize, adapters: int | None, whose: str = "") -> list[MemoryPart]:
        """Weights, gradients and optimizer of one engine; `whose` is the prefix of the parts' names.

        `adapters` is the number of LoRA parameters; None: all parameters that text uses are trained.
        """
        width = self.width
        stage = self.stage
        offload = self.spec.engine.offload
        parameters = size.num_parameters
        trained = size.num_trainable if adapters is None else adapters
        at_once = trained if stage or trained is None else min(trained, PLAIN_BUCKET)
        on_host = offload != "none"
        weights = self._part(f"{whose}weights", parameters, width, 3)
        gradients = self._part(f"{whose}gradients", trained, 4, 2)
        # Two moments in float32, and under ZeRO a copy of the weights.
        optimizer = self._part(f"{whose}optimizer (AdamW)", trained, 12 if stage else 8, 1)
        are_offloaded = [
            (weights, offload == "all"),
            # In bf16, stage 2 accumulates gradients on the GPU even if the optimizer is offloaded.
            (gradients, on_host and (stage == 3 or (stage == 2 and width == 4))),
            (optimizer, on_host),
        ]
        # Gradients of micro-batches are accumulated in float32; in bf16, stage 1 uses this sum for the step.
        if width == 4 or stage > 1:
            step = self._part(f"{whose}gradients of the step", at_once, 4, 1)
            are_offloaded.append((replace(step, phases=("critic's step" if whose else "step",)), on_host))
        parts = [
            replace(part, num_bytes=0.0, note="in the host's memory") if is_offloaded else part
            for part, is_offloaded in are_offloaded
        ]
        if stage < 3:
            return parts
        # ZeRO-3 gathers the weights that it currently needs, and buffers gradients for their reduction.
        held = (("gathered weights", LIVE_PARAMETERS, width), ("reduction buffer", REDUCE_BUCKET, 4))
        for name, most, each in held:
            num_bytes = None if parameters is None else min(parameters, most) * each
            parts.append(MemoryPart(f"{whose}{name}", num_bytes))
        return [*parts, *self._copy_of_group(f"{whose}weights of a group", parameters)]

    def _copy_of_group(self, name: str, parameters: int | None) -> list[MemoryPart]:
        """The second copy of the weights with `zero_hpz_partition_size`, in the engine's dtype."""
        size = self.spec.engine.shard_size
        if not size or self.spec.engine.name == "fsdp":
            return []
        return [MemoryPart(name, None if parameters is None else parameters * self.width / size)]

    def _part(self, name: str, parameters: int | None, width: int, sharded_from: int) -> MemoryPart:
        """A part of `width` bytes per parameter, sharded over the ranks from ZeRO stage `sharded_from` on."""
        shards = self.spec.engine.shards(self.spec.world_size) if self.stage >= sharded_from else 1
        return MemoryPart(name, None if parameters is None else parameters * width / shards)

    def _rows(self, model: ModelSpec, shape: Shape, micro: int) -> _Rows:
        """Rows of a micro-batch of sequences of full length, packed as the engine packs them.

        Responses of one prompt share it, as many as fit into a row.
        """
        length = self.length
        n = self.spec.rollout.n
        siblings = min(n, micro)
        apart = _Rows(micro * length, length)
        if has_no_mask(model.attn_implementation) or (shape.window or length) < length:
            return apart
        # The last token of a response is not an input: no scored token follows it.
        prompt = self.spec.data.max_prompt_length
        response = max(self.spec.data.max_response_length - 1, 1)
        width = max(prompt + response, packed_width(shape.hidden))
        together = min(siblings, (width - prompt) // response)
        if together < 2:
            return apart
        # If a group is split over two micro-batches, its prompt is in both.
        groups = -(-micro // siblings) + bool(micro % n and n % micro)
        units = groups * -(-siblings // together)
        unit = prompt + together * response
        in_one_row = min(units, width // unit)
        tokens = -(-units // in_one_row) * in_one_row * unit
        return min(_Rows(tokens, in_one_row * unit), apart, key=lambda rows: rows.tokens)

    def _sampling_copy(self) -> MemoryPart:
        """The rollout engine's weights; an engine that sleeps frees them during training."""
        width = self.spec.sampled_width
        shared = self.spec.rollout.tensor_model_parallel_size
        parameters = self.policy.num_parameters
        num_bytes = None if parameters is None else parameters * width / shared
        phases = ("generation",) if self.spec.engine_sleeps else ()
        return MemoryPart("rollout's weights", num_bytes, phases)

    def _listed_tokens(self, count: int, waiting: int) -> MemoryPart:
        """Lists of the most likely tokens, of the batch in training and of those that wait."""
        spec = self.spec
        batches = 1 + waiting
        rows = -(-spec.data.train_batch_size * spec.rollout.n // spec.data_ranks)
        length = spec.data.max_response_length
        num_bytes = 8.0 * count * batches * rows * length
        return MemoryPart("listed tokens", num_bytes)

    def _cache(self) -> MemoryPart:
        """Key-value cache of all sequences that are sampled at once."""
        spec = self.spec
        shape = self.policy.shape
        width = self.spec.cached_width
        if shape is None:
            return _unknown("key-value cache", ("generation",))
        share = -(-spec.data.train_batch_size * spec.rollout.n // spec.world_size)
        at_once = min(spec.rollout.max_num_seqs or share, share)
        shared = spec.rollout.tensor_model_parallel_size
        # Key-value heads are sharded over an engine's GPUs, and replicated if there are fewer than GPUs.
        keys = max(shape.keys // shared, shape.head_dim)
        one = 2 * (shape.layers - shape.linear_layers) * keys * self.length * width
        if spec.rollout_engine.forms_batches:  # its share of the GPU sets the size of the cache
            utilization = spec.rollout.gpu_memory_utilization
            weights = self._sampling_copy().num_bytes
            if self.gpu_bytes is None or weights is None:
                note = f"of one sequence; vLLM has {utilization:.0%} of the GPU in all"
                return MemoryPart("key-value cache", one, ("generation",), note)
            taken = weights + memory_total(rollout_workspace(spec, shape, self.gpu_bytes))
            left = max(0.0, utilization * self.gpu_bytes - taken)
            note = f"for {left / one:.0f} sequences of {self.length} tokens"
            return MemoryPart("key-value cache", left, ("generation",), note)
        return MemoryPart("key-value cache", one * at_once, ("generation",))

    def _policy_pass(self) -> list[MemoryPart]:
        """The policy's largest forward and backward pass: layers, and output head on the responses."""
        spec = self.spec
        shape = self.policy.shape
        width = self.width
        micro = spec.actor.ppo_micro_batch_size_per_gpu
        budget = spec.actor.ppo_max_token_len_per_gpu
        parts = self._layers_pass(spec.model, shape, (micro, budget), ("head", "layers"))
        if shape is None:
            return [*parts, _unknown("logits and their gradient", ("head",))]
        shared = spec.engine.sequence_parallel
        tokens = budget or -(-self._rows(spec.model, shape, micro).tokens // shared)
        # With a token budget, in the worst case all tokens are response tokens.
        responses = budget or -(-micro * spec.data.max_response_length // shared)
        # The last norm saves its input, scaled input and output (see `_norms`); the head reads the states.
        num_bytes = tokens * (4 + 4 * width) * shape.hidden
        parts.append(MemoryPart("last norm and states", num_bytes, ("head",)))
        most = logits_at_once(self.gpu_bytes)
        logits = min(responses * shape.vocab, most) * LOGIT_BYTES
        parts.append(MemoryPart("logits and their gradient", logits, ("head",)))
        if spec.model.lora_rank:
            return parts  # the head's weights are frozen
        gradient = shape.vocab * shape.hidden * width
        return [*parts, MemoryPart("output head's gradient", gradient, ("head",))]

    def _layers_pass(
        self,
        model: ModelSpec,
        shape: Shape | None,
        sizes: tuple[int, int | None],
        phases: tuple[Phase, ...],
        whose: str = "",
    ) -> list[MemoryPart]:
        """Activations, held in all `phases`, and the backward pass of one layer, held in the last of them.

        `sizes` are the sequences per micro-batch, and its token budget (None: no budget).
        """
        name = f"{whose}activations"
        if shape is None:
            return [_unknown(name, phases)]
        micro, budget = sizes
        rows = self._rows(model, shape, micro)
        tokens = budget or rows.tokens
        layer = _Layer(model, shape, self.length if budget else rows.length, self.width)
        kept = layer.kept()
        back = layer.backward()
        shared = self.spec.engine.sequence_parallel
        if shared > 1:
            tokens = budget or -(-tokens // shared)
            kept += (shared - 1) * layer.mask  # each rank has all of it
        if model.enable_gradient_checkpointing:  # only the layer's input is saved; the rest is recomputed
            kept, back = self.width * shape.hidden, kept + back
        return [
            MemoryPart(name, tokens * shape.layers * kept, phases),
            MemoryPart(f"{whose}one layer backward", tokens * back, phases[-1:]),
        ]


def _unknown(name: str, phases: tuple[Phase, ...]) -> MemoryPart:
    return MemoryPart(name, None, phases, "the model's dimensions are not known here")
