"""Dimensions of models that presets name, so that a dry run knows them before they are downloaded.

From the `config.json` of each on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer with gated feed-forward layers.

    Attributes:
        num_parameters: all of them.
        layers, hidden, kv_heads, head_dim, vocab: as in `ModelSize`.
    """

    num_parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocab: int


_QWEN2_7B = Shape(7_615_616_512, layers=28, hidden=3584, kv_heads=4, head_dim=128, vocab=152_064)
_LLAMA3_8B = Shape(8_030_261_248, layers=32, hidden=4096, kv_heads=8, head_dim=128, vocab=128_256)
_MISTRAL_7B = Shape(7_248_023_552, layers=32, hidden=4096, kv_heads=8, head_dim=128, vocab=32_768)
_GEMMA_7B = Shape(8_537_680_896, layers=28, hidden=3072, kv_heads=16, head_dim=256, vocab=256_000)
_DEEPSEEK_7B = Shape(6_910_365_696, layers=30, hidden=4096, kv_heads=32, head_dim=128, vocab=102_400)

#: By hub id.
PUBLISHED = {
    "Qwen/Qwen2.5-7B": _QWEN2_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2-7B": _QWEN2_7B,
    "Qwen/Qwen2-7B-Instruct": _QWEN2_7B,
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3_8B,
    "mistralai/Mistral-7B-v0.3": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL_7B,
    "google/gemma-7b": _GEMMA_7B,
    "google/gemma-7b-it": _GEMMA_7B,
    "deepseek-ai/deepseek-llm-7b-base": _DEEPSEEK_7B,
    "deepseek-ai/deepseek-llm-7b-chat": _DEEPSEEK_7B,
}
