"""A memory estimate per GPU: each part with the formula it comes from, so that it can be argued with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlctl.spec.activations import (
    Term,
    adapted,
    after_layers,
    kept_by_checkpoint,
    kept_by_layer,
    total,
    way_back,
)
from rlctl.spec.model import ModelSpec
from rlctl.spec.model_size import ModelSize, model_size
from rlctl.spec.run_spec import RunSpec

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

#: Moments of a step that do not meet: sampling; the policy's pass with its output head, and the way back
#: through its layers; the critic's pass and way back; the optimizers' steps.
Phase = Literal["generation", "head", "layers", "critic", "step", "critic's step"]

_NEVER = 4  # a ZeRO stage there is not


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One line of the estimate.

    Attributes:
        name: what takes the memory.
        num_bytes: per GPU; None where the model's dimensions are unknown.
        formula: in words.
        phases: when it is held; none named: throughout. Only the largest phase counts.
    """

    name: str
    num_bytes: float | None
    formula: str
    phases: tuple[Phase, ...] = ()


def memory_parts(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """What a rank holds, part by part."""
    adapters = _adapter_parameters(spec, size)
    parts = [*_trained(spec, size.num_parameters, adapters), *_sampling_copy(spec, size)]
    if spec.trains_critic:
        critic = _size_of(spec, spec.critic.path, size)
        parts += _trained(spec, critic.num_parameters, None, "critic's ")
        parts += _critic_pass(spec, critic)
    if spec.needs_reference and (spec.ref.path or not spec.model.lora_rank):
        reference = _size_of(spec, spec.ref.path, size)
        parts.append(
            _part(spec, "reference's weights", reference.num_parameters, _width(spec), sharded_from=3)
        )
    return [*parts, *_cache(spec, size), *_policy_pass(spec, size)]


def memory_total(parts: list[MemoryPart]) -> float:
    """The peak per GPU in bytes, of the parts that are known."""
    sums: dict[Phase, float] = {}
    for part in parts:
        for phase in part.phases:
            sums[phase] = sums.get(phase, 0.0) + (part.num_bytes or 0.0)
    return sum(part.num_bytes or 0.0 for part in parts if not part.phases) + max(sums.values(), default=0.0)


def _trained(
    spec: RunSpec, parameters: int | None, adapters: int | None, whose: str = ""
) -> list[MemoryPart]:
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
        _on_host(replace(step, phases=("critic's step" if whose else "step",)), on_host),
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
    return [replace(part, phases=("generation",)) if sleeps else part]


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
    """Of the matrices with usual names: rank × (inputs + outputs) each."""
    if not spec.model.lora_rank or size.shape is None:
        return None
    shapes = size.shape.matrices()
    each = sum(sum(shapes[name]) for name in adapted(spec.model, size.shape))
    return size.shape.layers * spec.model.lora_rank * each


def _cache(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """Keys and values of all that is sampled at once, where this process samples."""
    if _samples_elsewhere(spec):
        return []
    if size.shape is None:
        return [_unknown("key-value cache", ("generation",))]
    width, length = _width(spec), _row_length(spec)
    share = -(-spec.data.train_batch_size * spec.rollout.n // spec.world_size)
    at_once = min(spec.rollout.max_num_seqs or share, share)
    num_bytes = 2 * size.shape.layers * size.shape.keys * length * at_once * width
    words = f"2 × layers × kv heads × head size × {length} tokens × {at_once} sequences × {width} bytes"
    return [MemoryPart("key-value cache", num_bytes, words, ("generation",))]


def _policy_pass(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """The policy's largest pass with gradient: its layers, and its output head over the responses."""
    micro, budget = spec.actor.ppo_micro_batch_size_per_gpu, spec.actor.ppo_max_token_len_per_gpu
    parts = _layers_pass(spec, spec.model, size, (micro, budget), ("head", "layers"))
    if size.shape is None:
        return [*parts, _unknown("logits and their gradient", ("head",))]
    tokens, _ = _largest(spec, micro, budget)
    responses = budget or micro * spec.data.max_response_length  # of a budget at worst all
    logits = min(responses * size.shape.vocab, MAX_LOGITS) * LOGIT_BYTES
    words = f"{responses} response tokens × vocabulary (at most {MAX_LOGITS:,}) × {LOGIT_BYTES} bytes"
    after = after_layers(size.shape, _width(spec))
    parts += [
        MemoryPart(
            "last norm and states",
            tokens * total(after),
            f"{tokens} tokens × {_listed(after)} bytes",
            ("head",),
        ),
        MemoryPart("logits and their gradient", logits, words, ("head",)),
    ]
    if spec.model.lora_rank:
        return parts  # the head's weights are frozen
    words = f"vocabulary × hidden × {_width(spec)} bytes, before it is added up"
    gradient = size.shape.vocab * size.shape.hidden * _width(spec)
    return [*parts, MemoryPart("output head's gradient", gradient, words, ("head",))]


def _critic_pass(spec: RunSpec, size: ModelSize) -> list[MemoryPart]:
    """The critic's largest pass with gradient; it has no adapters and next to no output head."""
    whole = spec.model.model_copy(update={"lora_rank": 0})
    sizes = spec.critic_micro_batch_size, spec.critic_max_token_len
    return _layers_pass(spec, whole, size, sizes, ("critic",), "critic's ")


def _layers_pass(
    spec: RunSpec,
    model: ModelSpec,
    size: ModelSize,
    sizes: tuple[int, int | None],
    phases: tuple[Phase, ...],
    whose: str = "",
) -> list[MemoryPart]:
    """Activations, held in all `phases`, and in the last of them the way back through a layer."""
    names = f"{whose}activations", f"{whose}one layer backward"
    if size.shape is None:
        return [_unknown(names[0], phases)]
    tokens, words = _largest(spec, *sizes)
    width, length = _width(spec), _row_length(spec)
    kept = kept_by_layer(model, size.shape, length, width)
    back = way_back(model, size.shape, length, width)
    if model.enable_gradient_checkpointing:
        kept, back = kept_by_checkpoint(size.shape, width), kept + back
    return [
        MemoryPart(
            names[0],
            tokens * size.shape.layers * total(kept),
            f"{words} × layers × ({_listed(kept)}) bytes",
            phases,
        ),
        MemoryPart(names[1], tokens * total(back), f"{tokens} tokens × ({_listed(back)}) bytes", phases[-1:]),
    ]


def _largest(spec: RunSpec, micro: int, budget: int | None) -> tuple[int, str]:
    """Tokens of the largest micro-batch, also in words."""
    if budget:
        return budget, f"{budget} tokens"
    return micro * _row_length(spec), f"{micro} sequences × {_row_length(spec)} tokens"


def _row_length(spec: RunSpec) -> int:
    return spec.data.max_prompt_length + spec.data.max_response_length


def _listed(terms: list[Term]) -> str:
    """The terms in words, those of one dimension together."""
    factors: dict[str, int] = {}
    for term in terms:
        factors[term.dimension] = factors.get(term.dimension, 0) + term.factor
    return " + ".join(f"{factor} × {dimension}" for dimension, factor in factors.items() if factor)


def _unknown(name: str, phases: tuple[Phase, ...]) -> MemoryPart:
    return MemoryPart(name, None, "the model's dimensions are not known here", phases)


def _width(spec: RunSpec) -> int:
    """Bytes per number in the engine's arithmetic."""
    return 4 if spec.engine.dtype == "fp32" else 2


def _rollout_width(spec: RunSpec) -> int:
    """Bytes per weight of the sampling copy; int8 is computed, and held, in the engine's precision."""
    return {"fp32": 4, "bf16": 2}.get(spec.rollout.dtype or "", _width(spec))
