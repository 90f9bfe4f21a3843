"""Size of a model and of its checkpoint, without loading or downloading the model.

The dimensions of published models are in `model_sizes.toml`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.files import cache_root
from rlctl.run_spec.model import EMBEDDED, NAMED_MODELS, RECIPE, VOCABULARY, ModelSpec
from rlctl.run_spec.run_spec import RunSpec

_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")
_TABLES = tomllib.loads(Path(__file__).with_name("model_sizes.toml").read_text(encoding="utf-8"))
#: Names of the number of experts in configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: Names of the number of experts that compute one token.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "top_k_experts")
#: Bytes per trained parameter with AdamW: two moments and the parameter, in float32.
_TRAINED = 12
#: Bytes of a checkpoint from which it is written during training, unless the spec says otherwise.
BACKGROUND_BYTES = 2**30
#: Free host memory that this needs, in sizes of a checkpoint: its copy, and what is copied at the moment.
COPY_FACTOR = 1.5
#: Maximum bytes of the header of a safetensors file, as its format says.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer with gated feed-forward layers."""

    layers: int
    hidden: int  # width of the residual stream
    inner: int  # width of the feed-forward layers (`intermediate_size`)
    heads: int  # query heads
    kv_heads: int  # key-value heads
    head_dim: int  # dimension of a head
    vocab: int
    norms_heads: bool = False  # whether queries and keys are normalised per head (Qwen3)
    #: the shortest sliding window in tokens; None: every layer attends to all tokens
    window: int | None = None
    #: whether its feed-forward layers are mixtures of experts, which LoRA does not adapt
    has_experts: bool = False
    experts_per_token: int = 0  # experts of a layer that a token chooses; 0: unknown, or it has none
    linear_layers: int = 0  # layers with linear attention, which keep one state and no keys and values

    @property
    def queries(self) -> int:
        """Dimension of the queries of all heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Dimension of the keys of all heads together; the same for the values."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Matrices of a layer by their usual names → (inputs, outputs)."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Figures of a model for memory estimates; None where they are unknown."""

    source: str  # source of the figures, in words
    num_parameters: int | None = None  # number of all parameters
    shape: Shape | None = None  # the transformer's dimensions
    #: for a model that also reads images, the number of parameters that text inputs use; the others are
    #: loaded but not trained. None: all parameters
    num_read_by_text: int | None = None
    num_idle: int = 0  # of a mixture of experts, number of the parameters that compute nothing for a token

    @property
    def num_trainable(self) -> int | None:
        """Number of parameters that are trained without LoRA."""
        return self.num_parameters if self.num_read_by_text is None else self.num_read_by_text


def model_size(spec: ModelSpec) -> ModelSize:
    """The size of the model at `spec.path`.

    Sources, in this order: the built-in model, a local directory or the hub's cache, the published
    dimensions, the number in the model's name.
    """
    if spec.path == EMBEDDED:
        return ModelSize("the built-in model", RECIPE.num_parameters, _EMBEDDED_SHAPE)
    directory = local_model(spec)
    if directory is not None:
        size = _from_config(_read_json(directory / "config.json"))
        shapes = _read_shapes(directory)
        if not shapes:
            return size
        read = None if size.num_read_by_text is None else _read_by_text(shapes, size.shape)
        counted = sum(map(math.prod, shapes.values()))
        return ModelSize(
            source="safetensors headers",
            num_parameters=counted,
            shape=size.shape,
            num_read_by_text=read,
            num_idle=size.num_idle,
        )
    published = PUBLISHED.get(spec.path)
    if published:
        return published
    match = _SIZE_IN_NAME.search(spec.path)
    if match:
        scale = 1e9 if match[2] in "Bb" else 1e6
        source = f"“{match[0]}” in the name; the model itself is not on this machine"
        return ModelSize(source, num_parameters=int(float(match[1]) * scale))
    return ModelSize("unknown: the model is not on this machine")


def size_at(spec: ModelSpec, path: str | None) -> ModelSize:
    """The size of the model at `path`, read with the options of `spec`; None: of the policy."""
    if path in {None, spec.path}:
        return model_size(spec)
    return model_size(spec.model_copy(update={"path": path, "revision": None}))


def checkpoint_bytes(spec: RunSpec) -> int | None:
    """Bytes of one checkpoint: the engine's state, the exported model, the critic's state.

    Batches sampled ahead are not included. None: a model's size is unknown.
    """
    size = model_size(spec.model)
    policy = size.num_parameters
    trained = size.num_trainable
    critic = size_at(spec.model, spec.critic.path).num_trainable if spec.trains_critic else 0
    if policy is None or trained is None or critic is None:
        return None
    width = spec.engine.width
    # In float32 the engine trains the parameters directly; in bf16 it also keeps a float32 copy of them.
    state = _TRAINED + (2 if width == 2 else 0)
    if spec.model.lora_rank:  # the base is stored twice: in the engine's state, and merged in the export
        return policy * 2 * width + critic * state
    frozen = policy - trained  # stored in the engine's state and in the export
    return trained * (state + width) + frozen * 2 * width + critic * state


def local_model(spec: ModelSpec) -> Path | None:
    """The model's directory, or its snapshot in the hub's cache; None: neither exists."""
    path = named_directory(spec.path) or Path(spec.path).expanduser()
    if path.is_dir():
        return path
    repository = hub_cache() / f"models--{spec.path.replace('/', '--')}"
    revision = spec.revision or "main"
    with contextlib.suppress(OSError):  # a commit hash has no ref: it is the name of its snapshot
        revision = (repository / "refs" / revision).read_text().strip()
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def named_directory(name: str, root: Path | None = None) -> Path | None:
    """The directory in the cache where a model with a short name is, or will be; None for other paths."""
    named = NAMED_MODELS.get(name)
    return (root or cache_root()) / "models" / f"{name}-{named.version}" if named else None


def hub_cache() -> Path:
    """The directory of downloads from the Hugging Face hub."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    home = Path(os.environ.get("HF_HOME", caches / "huggingface")).expanduser()
    older = os.environ.get("HUGGINGFACE_HUB_CACHE", home / "hub")
    return Path(os.environ.get("HF_HUB_CACHE", older)).expanduser()


def _read_shapes(directory: Path) -> dict[str, list[int]]:
    """Name → shape of all tensors, read from the files' headers; empty if a header cannot be read."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            shapes |= _shapes_in(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # the loader reports a broken file, the estimate does not
    return shapes


def _shapes_in(path: Path) -> dict[str, list[int]]:
    """Name → shape of the tensors of a file, which begins with the length of its header and the header."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(num_bytes))
    header.pop("__metadata__", None)
    return {name: list(map(int, tensor["shape"])) for name, tensor in header.items()}


def _read_by_text(shapes: dict[str, list[int]], shape: Shape | None) -> int | None:
    """Number of parameters of the text decoder and its output head; None if no tensor is its embedding.

    The token embedding is a direct child of the decoder's module; all tensors of that module are counted.
    """
    if shape is None:
        return None
    of_tokens = {name for name, found in shapes.items() if found == [shape.vocab, shape.hidden]}
    modules = (name.removesuffix(".weight").rpartition(".")[0] for name in of_tokens)
    decoder = max(modules, key=len, default="")
    if not decoder:
        return None
    own = of_tokens | {name for name in shapes if name.startswith(f"{decoder}.")}
    return sum(math.prod(shapes[name]) for name in own)


def _from_config(whole: dict[str, Any]) -> ModelSize:
    """Reads dimensions under the names that nearly all causal language models use."""
    reads_more = isinstance(whole.get("text_config"), dict)
    config: dict[str, Any] = whole["text_config"] if reads_more else whole
    config = _TABLES["left_out"].get(str(config.get("model_type")), {}) | config
    layers = _count(config, "num_hidden_layers")
    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    vocab = _count(config, "vocab_size")
    if not (layers and hidden and heads and vocab):
        return ModelSize("unknown: config.json names no dimensions")
    experts, used = (
        next(filter(None, (_count(config, name) for name in names)), 0)
        for names in (_EXPERTS, _EXPERTS_PER_TOKEN)
    )
    shape = Shape(
        layers,
        hidden,
        _count(config, "intermediate_size") or 4 * hidden,
        heads,
        kv_heads=_count(config, "num_key_value_heads") or heads,
        head_dim=_count(config, "head_dim") or hidden // heads,
        vocab=vocab,
        norms_heads=config.get("model_type") in {"qwen3", "qwen3_moe"},
        window=_window(config),
        has_experts=experts > 0,
        experts_per_token=(used or experts) if experts else 0,
        linear_layers=list(config.get("layer_types") or []).count("linear_attention"),
    )
    tied = whole.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    embeddings = vocab * hidden * (1 if tied else 2)
    layer = sum(inputs * outputs for inputs, outputs in shape.matrices().values())
    idle = 0
    if experts:  # in every layer, in place of its feed-forward layer
        expert = 3 * hidden * (_count(config, "moe_intermediate_size") or shape.inner)
        layer += experts * expert - 3 * hidden * shape.inner
        idle = layers * max(0, experts - (used or experts)) * expert
    read = embeddings + layers * layer
    others = [part for name, part in whole.items() if name != "text_config" and name.endswith("_config")]
    towers = sum(_tower(other) for other in others if isinstance(other, dict)) if reads_more else 0
    return ModelSize(
        source="config.json",
        num_parameters=read + towers,
        shape=shape,
        num_read_by_text=read if reads_more else None,
        num_idle=idle,
    )


def _window(config: dict[str, Any]) -> int | None:
    sliding = _count(config, "sliding_window") if config.get("use_sliding_window", True) else None
    return min(filter(None, (sliding, _count(config, "attention_chunk_size"))), default=None)


def _tower(config: dict[str, Any]) -> int:
    """Approximate number of parameters of an image or audio encoder: attention and feed-forward layers."""
    layers = _count(config, "num_hidden_layers") or _count(config, "depth") or 0
    hidden = _count(config, "hidden_size") or _count(config, "embed_dim") or 0
    return layers * 2 * hidden * (2 * hidden + (_count(config, "intermediate_size") or 4 * hidden))


def _count(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


_EMBEDDED_SHAPE = Shape(
    RECIPE.num_layers,
    RECIPE.hidden_size,
    RECIPE.intermediate_size,
    heads=RECIPE.num_heads,
    kv_heads=RECIPE.num_heads,
    head_dim=RECIPE.hidden_size // RECIPE.num_heads,
    vocab=len(VOCABULARY),
)


def _read_published() -> Iterator[tuple[str, ModelSize]]:
    source = "as published; the model itself is not on this machine"
    for words in map(str.split, _TABLES["published"].strip().splitlines()):
        numbers = [int(word) for word in words if word.isdecimal()]
        num_parameters, layers, hidden, inner, heads, kv_heads, head_dim, vocab, *others = numbers
        norms, window, read_by_text, idle, experts_per_token = [*others, 0, 0, 0, 0, 0][:5]
        shape = Shape(
            layers=layers,
            hidden=hidden,
            inner=inner,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=vocab,
            norms_heads=bool(norms),
            window=window or None,
            has_experts=idle > 0,
            experts_per_token=experts_per_token,
        )
        size = ModelSize(source, num_parameters, shape, read_by_text or None, idle)
        yield from ((word, size) for word in words if not word.isdecimal())


#: Hub id or short name → size.
PUBLISHED = dict(_read_published())
