"""A tiny random Qwen2 directory with a byte-level tokenizer, as a user would bring one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"


def save_tiny_qwen2(directory: Path, *, context: int = 256, extra_tokens: int = 0) -> Path:
    """`extra_tokens`: how many more the tokenizer knows than the model has embeddings for."""
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
    config = Qwen2Config(
        vocab_size=len(vocabulary) - extra_tokens,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
