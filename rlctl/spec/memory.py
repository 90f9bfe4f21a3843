"""A memory estimate per GPU: each part with the formula it comes from, so that it can be argued with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlctl.spec.model_size import ModelSize, model_size
from rlctl.spec.run import RunSpec

#: Values kept per token, layer and hidden unit for the backward pass, without recomputation: the usual
#: count of 34 bytes in 16-bit arithmetic.
ACTIVATION_VALUES = 17

#: Logits that the output head makes at once, in numbers (128 MiB in float32).
MAX_LOGITS = 1 << 25

#: Per logit: itself, its softmax and its gradient, float32, and what comes and goes between them; measured.
LOGIT_BYTES = 20

#: Gradients that ranks add up at once under ZeRO, in numbers. DeepSpeed allocates its buffers whole.
REDUCE_BUCKET = 50_000_000

#: The same without ZeRO (DeepSpeed's own choice).
PLAIN_BUCKET = 500_000_000

#: Weights that ZeRO-3 holds in full at once, in numbers (DeepSpeed's `stage3_max_live_parameters`).
LIVE_PARAMETERS = 1_000_000_000

Phase = Literal["always", "generation", "update", "step"]

_NEVER = 4  # a ZeRO stage there is not


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the estimate.

    Attributes:
        name: what takes the memory.
        num_bytes: per GPU; None where the model's dimensions are unknown.
        formula: in words.
        phase: `always` is held throughout; of `generation`, `update` (passes through the model) and
            `step` (the optimizer's) only the largest counts.
    """

    name: str
    num_bytes: float | None
    formula: str
    phase: Phase = "always"


def memory_parts(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """What a rank holds, part by part."""
    adapters = _adapter_parameters(spec, size)
    parts = [*_trained(spec, size.num_parameters, adapters, ""), *_sampling_copy(spec, size)]
    if spec.trains_critic:
        critic = _size_of(spec, spec.critic.path, size)
        parts += _trained(spec, critic.num_parameters, None, "critic's ")
    if spec.needs_reference and (spec.ref.path or not spec.model.lora_rank):
        reference = _size_of(spec, spec.ref.path, size)
        parts.append(
            _part(spec, "reference's weights", reference.num_parameters, _width(spec), sharded_from=3)
        )
    return [*parts, *_passing_parts(spec, size)]


def memory_total(parts: list[MemoryPart]) -> float:
    """The peak per GPU in bytes, of the parts that are known."""
    sums: dict[Phase, float] = {"always": 0.0, "generation": 0.0, "update": 0.0, "step": 0.0}
    for part in parts:
        sums[part.phase] += part.num_bytes or 0.0
    return sums.pop("always") + max(sums.values())


def _trained(spec: RunSpec, parameters: int | None, adapters: int | None, whose: str) -> list[MemoryPart]:
    """What an engine holds; `adapters` are its trained parameters, None: all of them are."""
    width, stage, offload = _width(spec), _stage(spec), spec.engine.offload
    trained, of = (parameters, "parameters") if adapters is None else (adapters, "adapters' (about)")
    on_host = offload != "none"
    moments, words = (12, "fp32 copy 4, moments 4 + 4") if stage else (8, "fp32 moments 4 + 4")
    flat, kinds = (width + 4, f"flat {width}, in fp32 4") if width == 2 and stage < 3 else (4, "flat")
    optimizer = _part(
        spec, f"{whose}optimizer (AdamW)", trained, moments, sharded_from=1, of=of, detail=words
    )
    at_once = trained if stage or trained is None else min(trained, PLAIN_BUCKET)
    step = _part(spec, f"{whose}gradients of the step", at_once, flat, sharded_from=1, of=of, detail=kinds)
    parts = [
        _on_host(_part(spec, f"{whose}weights", parameters, width, sharded_from=3), offload == "all"),
        _on_host(
            _part(spec, f"{whose}gradients", trained, width, sharded_from=2, of=of), on_host and stage > 1
        ),
        _on_host(optimizer, on_host),
        _on_host(replace(step, phase="step"), on_host),
    ]
    return parts + (_gathered(parameters, width, whose) if stage == 3 else [])


def _gathered(parameters: int | None, width: int, whose: str) -> list[MemoryPart]:
    """ZeRO-3 collects the weights that it needs at once, and the gradients that it sends off at once."""
    return [
        MemoryPart(
            f"{whose}{name}",
            None if parameters is None else min(parameters, most) * width,
            f"at most {most:,} numbers × {width} bytes",
        )
        for name, most in (("gathered weights", LIVE_PARAMETERS), ("reduction buffer", REDUCE_BUCKET))
    ]


def _on_host(part: MemoryPart, moved: bool) -> MemoryPart:
    """The part as it is, or as nothing that a GPU holds."""
    return replace(part, num_bytes=0.0, formula="in the host's memory") if moved else part


def _stage(spec: RunSpec) -> int:
    """The ZeRO stage in effect: in bf16 the engine keeps float32 copies as stage 1 does."""
    return max(spec.engine.zero_stage, 1) if spec.engine.dtype == "bf16" else spec.engine.zero_stage


def _samples_elsewhere(spec: RunSpec) -> bool:
    """Servers have GPUs of their own."""
    return spec.rollout.name == "vllm" and spec.rollout.mode == "server"


def _sampling_copy(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """The rollout engine's weights; vLLM's sleep while the trainer trains."""
    if _samples_elsewhere(spec):
        return []
    width = _rollout_width(spec)
    part = _part(spec, "rollout's weights", size.num_parameters, width, sharded_from=_NEVER)
    sleeps = spec.rollout.name == "vllm" and spec.rollout.free_cache_engine
    return [replace(part, phase="generation") if sleeps else part]


def _part(
    spec: RunSpec,
    name: str,
    parameters: int | None,
    width: int,
    *,
    sharded_from: int,
    of: str = "parameters",
    detail: str = "",
) -> MemoryPart:
    """`width` bytes per parameter, cut up among the ranks from a ZeRO stage on."""
    stage, world = _stage(spec), spec.world_size
    shards = world if stage >= sharded_from else 1
    sharding = f" ÷ {world} ranks (ZeRO {stage})" if shards > 1 else ""
    whole = ", whole on every rank" if sharded_from == _NEVER else ""
    words = f"{width} bytes" + (f" ({detail})" if detail else "") + whole
    num_bytes = None if parameters is None else parameters * width / shards
    return MemoryPart(name, num_bytes, f"{of} × {words}{sharding}")


def _size_of(spec: RunSpec, path: str | None, policy: ModelSize) -> ModelSize:
    """Size of a model of its own path, or of the policy's."""
    return (
        policy if path is None else model_size(spec.model.model_copy(update={"path": path, "revision": None}))
    )


def _adapter_parameters(spec: RunSpec, size: ModelSize) -> int | None:
    """Roughly, for adapters on every linear layer: seven per block, of hidden size on both sides."""
    if not spec.model.lora_rank or size.layers is None or size.hidden is None:
        return None
    return size.layers * 7 * 2 * size.hidden * spec.model.lora_rank


def _passing_parts(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """What comes and goes with every batch."""
    data, width = spec.data, _width(spec)
    length = data.max_prompt_length + data.max_response_length
    tokens, responses, words = _largest_pass(spec)
    share = -(-data.train_batch_size * spec.rollout.n // spec.world_size)
    at_once = min(spec.rollout.max_num_seqs or share, share)
    cache = _product(2, size.layers, size.kv_heads, size.head_dim, length, at_once, width)
    kept, kept_words = _activations(spec, size)
    activations = _product(tokens, size.hidden, kept, width)
    logits = None if size.vocab is None else min(responses * size.vocab, MAX_LOGITS) * LOGIT_BYTES
    held = "2 × layers × kv heads × head size"
    generation = (
        []
        if _samples_elsewhere(spec)
        else [
            MemoryPart(
                "key-value cache",
                cache,
                f"{held} × {length} tokens × {at_once} sequences × {width} bytes",
                "generation",
            )
        ]
    )
    return [
        *generation,
        MemoryPart(
            "activations",
            activations,
            f"{words} × hidden × {kept_words} × {width} bytes",
            "update",
        ),
        MemoryPart(
            "logits and their gradient",
            logits,
            f"{responses} response tokens × vocabulary (at most {MAX_LOGITS:,}) × {LOGIT_BYTES} bytes",
            "update",
        ),
    ]


def _activations(spec: RunSpec, size: ModelSize) -> tuple[int | None, str]:
    """Values kept per token and hidden unit, and how many those are in words."""
    if spec.model.enable_gradient_checkpointing:
        kept = None if size.layers is None else size.layers + ACTIVATION_VALUES
        return kept, f"(layers + one layer's {ACTIVATION_VALUES})"
    kept = None if size.layers is None else size.layers * ACTIVATION_VALUES
    return kept, f"layers × {ACTIVATION_VALUES}"


def _largest_pass(spec: RunSpec) -> tuple[int, int, str]:
    """Tokens and response tokens of the largest micro-batch, and the former in words."""
    response = spec.data.max_response_length
    length = spec.data.max_prompt_length + response
    if budget := spec.actor.ppo_max_token_len_per_gpu:
        return budget, budget, f"{budget} tokens"  # at worst prompts are short
    micro = spec.actor.ppo_micro_batch_size_per_gpu
    return micro * length, micro * response, f"{micro} sequences × {length} tokens"


def _width(spec: RunSpec) -> int:
    """Bytes per number in the engine's arithmetic."""
    return 4 if spec.engine.dtype == "fp32" else 2


def _rollout_width(spec: RunSpec) -> int:
    """Bytes per weight of the sampling copy; int8 is computed, and held, in the engine's precision."""
    return {"fp32": 4, "bf16": 2}.get(spec.rollout.dtype or "", _width(spec))


def _product(*factors: int | None) -> float | None:
    result = 1.0
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result
