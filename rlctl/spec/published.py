"""Dimensions of models that presets name, so that a dry run knows them before they are downloaded.

From the `config.json` of each on the Hugging Face hub.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only transformer with gated feed-forward layers.

    Attributes:
        layers: decoder layers.
        hidden: width of the stream between them.
        inner: width of the feed-forward layers (`intermediate_size`).
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: numbers per head.
        vocab: tokens.
        norms_heads: queries and keys have norms of their own (Qwen3).
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norms_heads: bool = False

    @property
    def queries(self) -> int:
        """Numbers of all heads' queries per token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Numbers of all heads' keys per token; of values there are as many."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """A layer's matrices by their usual names: inputs and outputs."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }


_QWEN2_7B = 7_615_616_512, Shape(28, 3584, 18_944, heads=28, kv_heads=4, head_dim=128, vocab=152_064)
_LLAMA3_8B = 8_030_261_248, Shape(32, 4096, 14_336, heads=32, kv_heads=8, head_dim=128, vocab=128_256)
_MISTRAL_7B = 7_248_023_552, Shape(32, 4096, 14_336, heads=32, kv_heads=8, head_dim=128, vocab=32_768)
_GEMMA_7B = 8_537_680_896, Shape(28, 3072, 24_576, heads=16, kv_heads=16, head_dim=256, vocab=256_000)
_DEEPSEEK_7B = 6_910_365_696, Shape(30, 4096, 11_008, heads=32, kv_heads=32, head_dim=128, vocab=102_400)

#: Number of parameters, and dimensions, by hub id.
PUBLISHED: dict[str, tuple[int, Shape]] = {
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
