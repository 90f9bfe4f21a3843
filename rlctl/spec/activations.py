"""What a pass through a model holds for the way back, and what the way back through a layer holds.

The sum of what PyTorch keeps of a Llama-like layer as Transformers writes it, tensor by tensor;
`benchmarks/memory.py` compares it with what is measured. On a GPU the same tensors are kept: autocast
is not used, and the fused attention kernels keep what the CPU's does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.spec.model import ALL_LINEAR, ModelSpec
from rlctl.spec.model_size import Shape


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes per token, as a multiple of one of the model's or the batch's dimensions.

    Attributes:
        factor: bytes for each unit of `size`.
        dimension: its name.
        size: its value.
    """

    factor: int
    dimension: str
    size: int


def adapted(model: ModelSpec, shape: Shape) -> list[str]:
    """A layer's matrices that have adapters; none where all weights are trained."""
    if not model.lora_rank:
        return []
    names = list(shape.matrices())
    return names if ALL_LINEAR in model.target_modules else [n for n in names if n in model.target_modules]


def kept_by_layer(model: ModelSpec, shape: Shape, length: int, width: int) -> list[Term]:
    """What a layer keeps for its way back, per token.

    Args:
        model: attention kernel and adapters.
        shape: its dimensions.
        length: tokens of a row, prompt and response.
        width: bytes per number in the engine's arithmetic.
    """
    return [
        *_norms(model, shape, width),
        *_attention(model, shape, length, width),
        *_feed_forward(model, shape, width),
    ]


def kept_by_checkpoint(shape: Shape, width: int) -> list[Term]:
    """What is kept per token of a layer that runs again: its input."""
    return [Term(width, "hidden", shape.hidden)]


def way_back(model: ModelSpec, shape: Shape, length: int, width: int) -> list[Term]:
    """Gradients per token at the widest place of a layer, beside what it keeps: of the stream and of the
    norm before it, of the gate's activation and of up. With eager attention it may be the softmax, which
    goes back from float32 to float32; what the feed-forward layer kept, and the cast scores, are gone by
    then."""
    stream = Term(2 * width, "hidden", shape.hidden)
    widest = [Term(2 * width, "intermediate", shape.inner)]
    if model.attn_implementation == "eager":
        scores = Term(8 if width == 4 else 8 - width, "heads × length", shape.heads * length)
        gone = [replace(term, factor=-term.factor) for term in _feed_forward(model, shape, width)]
        widest = max(widest, [scores, *gone], key=total)
    return [stream, *widest]


def total(terms: list[Term]) -> int:
    """Bytes per token."""
    return sum(term.factor * term.size for term in terms)


def after_layers(shape: Shape, width: int) -> list[Term]:
    """Per token, after the last layer: what the last norm keeps (see `_norms`), the states that the output
    head reads, and their gradient."""
    return [Term(4 + 4 * width, "hidden", shape.hidden)]


def _norms(model: ModelSpec, shape: Shape, width: int) -> list[Term]:
    """Two norms: each keeps its input in float32, the scaled input for the gradient of its own weight, and
    its output, which the matrices that read it need for theirs. Liger's keep the input as it is."""
    names = adapted(model, shape)
    readers = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    outputs = sum(any(name in names for name in read) for read in readers) if model.lora_rank else 2
    each = width if model.use_liger else 4 + (0 if model.lora_rank else width)
    terms = [Term(2 * each + outputs * width, "hidden", shape.hidden)]
    if shape.norms_heads:  # their outputs are turned by their positions, for which nothing is kept
        terms.append(Term(each, "(heads + kv heads) × head size", shape.queries + shape.keys))
    return [*terms, Term(len(names) * width, "rank", model.lora_rank)] if names else terms


def _attention(model: ModelSpec, shape: Shape, length: int, width: int) -> list[Term]:
    """Queries, keys, values and the output, and of the softmax what the kernel keeps."""
    if model.attn_implementation == "flash_attention_2":  # shares keys and values, takes no mask
        return [
            Term(2 * width, "heads × head size", shape.queries),
            Term(2 * width, "kv heads × head size", shape.keys),
            Term(4, "heads", shape.heads),
        ]
    # Rows of unlike length need a mask, with which kernels want keys and values repeated for every head.
    four = Term(4 * width, "heads × head size", shape.queries)
    if model.attn_implementation == "eager":  # the softmax's result in float32, and cast for the values
        return [four, Term(4 if width == 4 else 4 + width, "heads × length", shape.heads * length)]
    # A sum per head and token, and the mask, which is cast from bool to `width` in every layer.
    return [four, Term(4, "heads", shape.heads), Term(width, "length", length)]


def _feed_forward(model: ModelSpec, shape: Shape, width: int) -> list[Term]:
    """Gate, its activation (Liger computes it again) and up, and for the gradient of the last matrix the
    product that it reads."""
    reads = not model.lora_rank or "down_proj" in adapted(model, shape)
    return [Term((3 - model.use_liger + reads) * width, "intermediate", shape.inner)]
