"""Writes a tiny random model directory with a byte-level tokenizer, like a user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tests.models import multimodal_config

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)


def save_tiny_qwen2(directory: Path, *, context: int = 256, extra_tokens: int = 0) -> Path:
    """Saves a Qwen2; see `save_tiny`."""
    shape = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    return save_tiny(directory, Qwen2Config, context=context, extra_tokens=extra_tokens, **shape)


def save_tiny(
    directory: Path, config_class: type, *, context: int = 256, extra_tokens: int = 0, **shape: Any
) -> Path:
    """Saves a tiny model; if its config has a vision part, with a tiny vision tower.

    `extra_tokens`: number of tokens in the tokenizer that have no embedding in the model.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {char: i + 1 for i, char in enumerate(alphabet)}
    vocabulary |= {f"<more{i}>": len(vocabulary) + i for i in range(extra_tokens)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(vocabulary) - extra_tokens,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": context,
        "bos_token_id": None,
        "eos_token_id": 0,
    } | shape
    if has_vision := "vision_config" in config_class.sub_configs:
        config = multimodal_config(config_class, shape)
    else:
        config = config_class(**shape)
    auto = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
