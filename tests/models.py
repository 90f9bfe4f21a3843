"""Tiny random models, and random batches whose log-probs are close to a model's."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlctl.batch import ModelInputs, TokenBatch
from rlctl.run_spec.model_size import Shape

VOCABULARY = 23
_SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large, so that logits are not uniform and wrong positions have an effect
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def tiny_model(kind: str = "llama", *, tied: bool = False, seed: int = 0, vocabulary: int = VOCABULARY):
    """Returns a new random model; `gemma2` soft-caps its logits after the head."""
    model, random_state = _built(kind, tied, seed, vocabulary)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@cache
def _built(kind: str, tied: bool, seed: int, vocabulary: int):
    """Returns the model, which must not be changed, and torch's random state after its initialization."""
    torch.manual_seed(seed)
    shape = {**_SHAPE, "vocab_size": vocabulary, "tie_word_embeddings": tied}
    model = _drawn(kind, shape)
    return model, torch.get_rng_state()


def _drawn(kind: str, shape: dict[str, object]):
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
    assert kind == "gemma2"
    capped = {"final_logit_softcapping": 2.0, "head_dim": 8, "query_pre_attn_scalar": 8}
    return Gemma2ForCausalLM(Gemma2Config(**shape, **capped)).eval()


def config_of(family: str, shape: Shape, **options):
    """The config of an architecture with the dimensions of `shape`."""
    return AutoConfig.for_model(
        family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        **options,
    )


#: Settings of a vision tower with one layer, under all names that configs use.
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 16,
    "fullatt_block_indexes": [0],
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
_GEMMA3 = {"vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4}
#: Config class for text and images → its settings in addition to the dimensions.
_MULTIMODAL = {
    Gemma3Config: _GEMMA3 | {"text_config": {"model_type": "gemma3_text"}},
    Mistral3Config: {
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"model_type": "mistral", "head_dim": 8},
    },
    Qwen2_5_VLConfig: {
        "vision_config": {},
        "text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    },
}


def multimodal_config(config_class: type, shape: dict[str, Any]) -> Any:
    """Config with a text decoder of this shape and a tiny vision tower."""
    options = dict(_MULTIMODAL[config_class])
    vision, text = options.pop("vision_config"), options.pop("text_config")
    tied = shape.get("tie_word_embeddings", False)
    return config_class(
        vision_config=_VISION | vision, text_config=text | shape, tie_word_embeddings=tied, **options
    )


def naive_log_probs(
    model, batch: TokenBatch | ModelInputs, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy (M,) from the full logits of each sequence by itself, with a float64 softmax."""
    inputs = batch.inputs if isinstance(batch, TokenBatch) else batch
    lengths, found = inputs.lengths.tolist(), []
    for ids, scored in zip(inputs.token_ids.split(lengths), inputs.scored.split(lengths), strict=True):
        if not len(ids):
            continue
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        everything = (logits.double() / temperature).log_softmax(-1)
        chosen = everything.gather(-1, ids[1:, None]).squeeze(-1)
        entropy = -(everything.exp() * everything).sum(-1)
        found.append(torch.stack([chosen, entropy])[:, scored[1:]])
    log_probs, entropies = torch.cat(found, 1).unbind()
    return log_probs, entropies


#: What `naive_log_probs` found without gradients; most tests ask for the same batch of the same model.
_KNOWN: dict[bytes, Tensor] = {}


def _known_log_probs(model, inputs: ModelInputs, temperature: float) -> Tensor:
    """(M,) float32 of `naive_log_probs`; computed once for the same weights, configuration and inputs."""
    assert all(parameter.numel() for parameter in model.parameters()), "weights that are elsewhere"
    tensors = [*model.state_dict().values(), inputs.token_ids, inputs.scored, inputs.lengths]
    config = (model.config._attn_implementation, model.config.to_dict())
    digest = hashlib.sha256(repr((type(model), config, temperature)).encode())
    for tensor in tensors:
        digest.update(str((tensor.dtype, tensor.shape)).encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    key = digest.digest()
    if key not in _KNOWN:
        with torch.no_grad():
            _KNOWN[key] = naive_log_probs(model, inputs, temperature)[0].float()
    return _KNOWN[key].clone()


def tiny_batch(
    model,
    rows: int = 16,
    *,
    seed: int = 0,
    prompt: int = 5,
    horizon: int = 6,
    gap: float = 0.2,
    lengths: list[int] | None = None,
    temperature: float = 1.0,
) -> TokenBatch:
    """Random prompts and responses of various lengths; rollout log-probs are the model's plus N(0, gap²).

    One episode per row, of one sequence; group i is row i.
    """
    draw = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(1, prompt + 1, (rows,), generator=draw)
    chosen = torch.randint(1, horizon + 1, (rows,), generator=draw)
    response_lengths = chosen if lengths is None else torch.tensor(lengths)
    prompt_mask = torch.arange(prompt) >= prompt - prompt_lengths[:, None]
    mask = torch.arange(horizon) < response_lengths[:, None]
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(2, vocabulary, (rows, prompt + horizon), generator=draw)
    read = torch.cat([prompt_mask, mask], 1)
    sampled = torch.cat([torch.zeros_like(prompt_mask), mask], 1)[read]
    count = int(mask.sum())
    batch = TokenBatch(
        token_ids=ids[read],
        sampled=sampled,
        lengths=read.sum(1),
        owners=torch.arange(rows),
        group_ids=torch.arange(rows),
        members=torch.zeros(rows, dtype=torch.int64),
        prompt_weights=torch.ones(rows),
        rollout_log_probs=torch.zeros(count),
        versions=torch.zeros(count, dtype=torch.int64),
        turns=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
    )
    own = _known_log_probs(model, batch.inputs, temperature)
    noise = torch.randn(rows, horizon, generator=draw)[mask]
    old = own + 0.1 * torch.randn(rows, horizon, generator=draw)[mask]
    advantages = torch.randn(rows, 1, generator=draw).expand(rows, horizon)[mask]
    return replace(batch, rollout_log_probs=own + gap * noise, old_log_probs=old, advantages=advantages)
