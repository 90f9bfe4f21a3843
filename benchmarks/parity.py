"""Compares log-probs of trainer and rollout engines, one tiny random model per architecture.

    python benchmarks/parity.py [--families Qwen3 …] [--columns hf/fp32 vllm/fp32 …] [--out TABLE.md]

Each engine samples responses of up to 48 tokens to prompts of different lengths, several per prompt. The
trainer scores the same tokens in packed and in padded rows. The table shows the largest |log π_train −
log π_engine| over all tokens, in nats, with both in float32, and with both in bf16, there also the mean. For
mixtures of experts in bf16 it also shows both with the engine's experts replayed in the trainer. Each vLLM
engine runs in a process of its own, with a small cache. Weights are random; the last column is the mean
log-prob (uniform: −5.5). The table is also written to `parity_results.md`, which the documentation includes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from rlctl.batch import Episode, Task, TokenBatch, TokenSequence, Turn
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.model import load_policy
from rlctl.errors import one_line
from rlctl.prefix import reads_more_than_text
from rlctl.rollout.completions import VLLMDtype, vllm_options
from rlctl.rollout.hf import HFRollout, into_precision
from rlctl.rollout.protocol import Request, ResponseSampler, Sampling
from tests.own_model import save_tiny

#: Large enough for vLLM's kernels; a window that responses exceed.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.15,
}
WINDOW, TIED = {"sliding_window": 32}, {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2}
#: Architecture → transformers' model type, and what of its shape is its own.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", TIED),
    "Llama": ("llama", {}),
    "Llama, tied": ("llama", TIED),
    "Mistral": ("mistral", WINDOW),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 1, 0], "pad_token_id": 0} | TIED),
    "Gemma": ("gemma", TIED),
    "Gemma 3": ("gemma3_text", WINDOW | TIED),
    "Gemma 3 with images": ("gemma3", WINDOW | TIED),
    "Qwen3-MoE": (
        "qwen3_moe",
        EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "Mixtral": ("mixtral", EXPERTS | {"num_local_experts": 8}),
}
#: Engine and precision → head of the column.
COLUMNS = {
    "hf/fp32": "`hf`, fp32",
    "vllm/fp32": "vLLM, fp32",
    "hf/bf16": "`hf`, bf16: largest; mean",
    "vllm/bf16": "vLLM, bf16: largest; mean",
}
RESULTS = Path(__file__).parent / "parity_results.md"
LIMIT_FP32 = 1e-5
TEMPERATURE, LENGTH, PER_PROMPT = 1.0, 48, 4
PROMPTS = [[(7 * place + 3) % 250 + 2 for place in range(count)] for count in (1, 4, 19, 40)]


@dataclass(frozen=True)
class Gap:
    """Differences between trainer and engine over the sampled tokens, in nats."""

    largest: float
    mean: float
    mean_log_prob: float
    replayed_largest: float | None = None
    replayed_mean: float | None = None


def save(family: str, directory: Path) -> Path:
    """Writes the tiny model of a family, with a tokenizer."""
    from transformers import CONFIG_MAPPING

    kind, own = FAMILIES[family]
    save_tiny(directory, CONFIG_MAPPING[kind], **SHAPE | own)
    if kind == "gemma3":
        (directory / "preprocessor_config.json").write_text("{}")
    return directory


def requests() -> list[Request]:
    """Siblings are adjacent."""
    return [
        Request(prompt, 100 * number + member)
        for number, prompt in enumerate(PROMPTS)
        for member in range(PER_PROMPT)
    ]


def gap_of(path: Path, turns: list[Turn], dtype: str) -> Gap:
    """Scores what an engine sampled; in padded and packed rows."""
    episodes = [
        Episode(Task(asked.token_ids, ""), 0, (TokenSequence.of_turn(asked.token_ids, turn),), "")
        for asked, turn in zip(requests(), turns, strict=True)
    ]
    batch = TokenBatch.of(episodes)
    loading = {"revision": None, "trust_remote_code": False, "attn_implementation": "sdpa"}
    model, _ = load_policy(str(path), dtype=torch.float32, **loading)  # type: ignore[misc]
    into_precision(model, dtype)  # type: ignore[arg-type]
    module = PolicyModule(model.eval(), TEMPERATURE)

    def gaps(inputs: Any) -> Iterator[torch.Tensor]:
        for module.reader.layout in ("packed", "padded"):
            with torch.no_grad():
                yield (module(inputs)[0] - batch.rollout_log_probs).abs()

    live = torch.stack(list(gaps(replace(batch.inputs, experts=None))))
    found = float(live.max()), float(live.mean()), float(batch.rollout_log_probs.mean())
    if "experts" not in batch.columns:
        return Gap(*found)
    replayed = torch.stack(list(gaps(batch.inputs)))
    return Gap(*found, float(replayed.max()), float(replayed.mean()))


def hf_gap(path: Path, dtype: str, *, replays: bool = False) -> Gap:
    """The gap of Hugging Face generation."""
    loading = {"revision": None, "trust_remote_code": False, "attn_implementation": "sdpa"}
    model, tokenizer = load_policy(str(path), dtype=torch.float32, **loading)  # type: ignore[misc]
    engine = HFRollout(model, tokenizer, "cpu", dtype=dtype)  # type: ignore[arg-type]
    return gap_of(path, sampled(engine, replays=replays), dtype)


def sampled(engine: ResponseSampler, *, replays: bool = False) -> list[Turn]:
    """One turn per request."""
    return engine.sample(requests(), Sampling(LENGTH, temperature=TEMPERATURE, with_experts=replays))


def vllm_gap(path: Path, dtype: VLLMDtype) -> Gap:
    """The gap of vLLM, in this process."""
    from transformers import AutoConfig, AutoTokenizer

    from rlctl.rollout.vllm import VLLMRollout

    options = vllm_options(dtype, 256, max_num_seqs=16)
    if reads_more_than_text(AutoConfig.from_pretrained(path)):
        options["language_model_only"] = True
    engine = VLLMRollout(str(path), AutoTokenizer.from_pretrained(path), options)
    turns = sampled(engine)
    engine.close()
    return gap_of(path, turns, dtype)


def vllm_gap_apart(path: Path, dtype: VLLMDtype) -> Gap | str:
    """The gap of vLLM in a process of its own, or why there is none."""
    context = multiprocessing.get_context("forkserver")  # it imports vLLM once
    context.set_forkserver_preload(["vllm", "rlctl.rollout.vllm", "rlctl.engine.log_probs"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(vllm_gap, path, dtype).result()
        except Exception as error:  # shown in place of the figure
            return one_line(error)


def row_of(family: str, columns: list[str]) -> list[str]:
    """One line of the table."""
    cells, log_prob = [family], float("nan")
    with tempfile.TemporaryDirectory() as directory:
        path = save(family, Path(directory) / "model")
        for column in columns:
            engine, dtype = column.split("/")
            if engine == "vllm":
                found = vllm_gap_apart(path, dtype)
            else:
                found = hf_gap(path, dtype, replays="num_experts_per_tok" in FAMILIES[family][1])
            if isinstance(found, str):
                print(f"{family}, {column}: {found}", file=sys.stderr)
            else:
                log_prob = found.mean_log_prob
            cells.append("—" if isinstance(found, str) else in_words(found, dtype))
    return [*cells, f"{log_prob:.1f}"]


def in_words(gap: Gap, dtype: str) -> str:
    """A cell of the table."""
    if dtype == "fp32":
        return f"{gap.largest:.1e}" + (" **above the limit**" if gap.largest > LIMIT_FP32 else "")
    words = f"{gap.largest:.2g}; {gap.mean:.2g}"
    if gap.replayed_largest is not None:
        words += f" (replayed {gap.replayed_largest:.2g}; {gap.replayed_mean:.2g})"
    return words


def main() -> None:
    """Prints the table, and writes it to a file line by line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    heads = ["architecture", *(COLUMNS[column] for column in asked.columns), "mean log-prob"]
    lines = [heads, ["---"] * len(heads)]
    for family in asked.families:
        lines.append(row_of(family, asked.columns))
        print(" | ".join(lines[-1]), flush=True)
        asked.out.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


if __name__ == "__main__":
    main()
