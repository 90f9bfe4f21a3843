"""A memory estimate per GPU: each part with the formula it comes from, so that it can be argued with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlctl.spec.model_size import ModelSize
from rlctl.spec.run import RunSpec

#: Values kept per token, layer and hidden unit for the backward pass, without recomputation: the usual
#: count of 34 bytes in 16-bit arithmetic.
ACTIVATION_VALUES = 17

Phase = Literal["always", "generation", "update"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the estimate.

    Attributes:
        name: what takes the memory.
        num_bytes: per GPU; None where the model's dimensions are unknown.
        formula: in words.
        phase: `always` is held throughout; of `generation` and `update` only the larger one counts.
    """

    name: str
    num_bytes: float | None
    formula: str
    phase: Phase = "always"


def memory_parts(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """What a rank holds, part by part."""
    return [*_static_parts(spec, size.num_parameters), *_passing_parts(spec, size)]


def memory_total(parts: list[MemoryPart]) -> float:
    """The peak per GPU in bytes, of the parts that are known."""
    sums = {"always": 0.0, "generation": 0.0, "update": 0.0}
    for part in parts:
        sums[part.phase] += part.num_bytes or 0.0
    return sums["always"] + max(sums["generation"], sums["update"])


def _static_parts(spec: RunSpec, parameters: int | None) -> list[MemoryPart]:
    """Weights, gradients, optimizer and the rollout's copy, sharded as the ZeRO stage says."""
    stage, world, width = spec.engine.zero_stage, spec.world_size, _width(spec)
    optimizer = 8 if spec.engine.dtype == "fp32" else 12
    optimizer_words = "fp32 moments 4 + 4" if optimizer == 8 else "fp32 copy 4, moments 4 + 4"

    def part(name: str, width: int, words: str, sharded_from: int) -> MemoryPart:
        shards = world if stage >= sharded_from else 1
        sharding = f" ÷ {world} ranks (ZeRO {stage})" if shards > 1 else ""
        num_bytes = None if parameters is None else parameters * width / shards
        return MemoryPart(name, num_bytes, f"parameters × {words}{sharding}")

    never = 4
    return [
        part("weights", width, f"{width} bytes", 3),
        part("gradients", width, f"{width} bytes", 2),
        part("optimizer (AdamW)", optimizer, f"{optimizer} bytes ({optimizer_words})", 1),
        part("rollout's weights", width, f"{width} bytes, whole on every rank", never),
    ]


def _passing_parts(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """What comes and goes with every batch."""
    data, width = spec.data, _width(spec)
    length = data.max_prompt_length + data.max_response_length
    micro = spec.actor.ppo_micro_batch_size_per_gpu
    share = -(-data.train_batch_size * spec.rollout.n // spec.world_size)
    at_once = min(spec.rollout.max_num_seqs or share, share)
    cache = _product(2, size.layers, size.kv_heads, size.head_dim, length, at_once, width)
    activations = _product(micro, length, size.layers, size.hidden, ACTIVATION_VALUES, width)
    logits = _product(2, micro, data.max_response_length, size.vocab, width)
    return [
        MemoryPart(
            "key-value cache",
            cache,
            f"2 × layers × kv heads × head size × {length} tokens × {at_once} sequences × {width} bytes",
            "generation",
        ),
        MemoryPart(
            "activations",
            activations,
            f"{micro} sequences × {length} tokens × layers × hidden × {ACTIVATION_VALUES} × {width} bytes",
            "update",
        ),
        MemoryPart(
            "logits and their gradient",
            logits,
            f"2 × {micro} sequences × {data.max_response_length} tokens × vocabulary × {width} bytes",
            "update",
        ),
    ]


def _width(spec: RunSpec) -> int:
    """Bytes per number in the engine's arithmetic."""
    return 4 if spec.engine.dtype == "fp32" else 2


def _product(*factors: int | None) -> float | None:
    result = 1.0
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result
