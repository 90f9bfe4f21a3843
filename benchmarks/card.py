"""A training step on a GPU: where the time goes, how much memory, and what share the correction takes.

    python benchmarks/card.py [--sizes 0.5b 1.5b 7b] [--engines hf vllm] [--steps 5] [--json FILE]

Random weights in the shapes of Qwen2.5: 32 prompts × 8 responses of up to 512 tokens, bf16, sequence IS in
its decoupled form, which scores every batch once before it is trained on; the 7B shape trains LoRA adapters.
Every case runs in a process of its own and prints a row of Markdown: median seconds of generation, scoring,
update, weight sync and the whole step, tokens per second, peak memory allocated by torch, the correction's
share of the step. An engine that is not installed is left out.

Without a CUDA card only `--sizes tiny` runs, which tries the script itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

#: layers, hidden, intermediate, heads, key-value heads, vocabulary, tied
SHAPES = {
    "tiny": (2, 64, 128, 2, 2, 512, True),
    "0.5b": (24, 896, 4864, 14, 2, 151_936, True),
    "1.5b": (28, 1536, 8960, 12, 2, 151_936, True),
    "7b": (28, 3584, 18_944, 28, 4, 152_064, False),
}
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 128, 512
COLUMNS = (
    "size",
    "engine",
    "gen s",
    "score s",
    "update s",
    "sync s",
    "step s",
    "tokens/s",
    "peak GiB",
    "correction",
)


def write_model(size: str, where: Path) -> None:
    """Config, random weights and a character-level tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlctl.spec.embedded import RECIPE
    from rlctl.tiny.model import build_tokenizer

    layers, hidden, inner, heads, kv_heads, vocabulary, tied = SHAPES[size]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(where)
    build_tokenizer(RECIPE).save_pretrained(where)


def write_prompts(where: Path, tokens: int) -> None:
    """Rows of digits, a character a token; the right answer does not matter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    chance = random.Random(0)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": "".join(chance.choices("0123456789+", k=tokens))}],
            "reward_model": {"style": "rule", "ground_truth": "7"},
        }
        for _ in range(4 * PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), where)


def overrides_of(size: str, engine: str, where: Path) -> list[str]:
    """What the case trains."""
    small = size == "tiny"
    prompt, response = (16, 12) if small else (PROMPT_TOKENS, RESPONSE_TOKENS)
    write_prompts(where / "prompts.parquet", prompt)
    return [
        f"model.path={where / 'model'}",
        f"data.train_files={where / 'prompts.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"rollout.n={SAMPLES}",
        f"rollout.name={engine}",
        "actor.ppo_mini_batch_size=16",
        "actor.ppo_micro_batch_size_per_gpu=8",
        "actor.lr=1e-6",
        "algorithm.rollout_correction.bypass_mode=false",
        "algorithm.rollout_correction.loss_type=ppo_clip",
        "actor.lr_warmup_steps=0",
        "engine.dtype=bf16",
        f"model.lora_rank={32 if size == '7b' else 0}",
        "reward.name=exact",
        "trainer.rollouts_per_step=0",
    ]


def measure(size: str, engine: str, steps: int) -> dict[str, Any]:
    """In a process of its own: train, and say where the time went."""
    import torch

    from benchmarks.step import run_rlctl

    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        write_model(size, where / "model")
        found = run_rlctl(overrides_of(size, engine, where), steps, correction=True)
    phases = {key: statistics.median(seconds) for key, seconds in found["phases"].items()}
    prompt, response = (16, 12) if size == "tiny" else (PROMPT_TOKENS, RESPONSE_TOKENS)
    tokens = PROMPTS * SAMPLES * (min(found["mean_length"], response) + prompt)
    on_card = torch.cuda.is_available()
    return {
        "size": size,
        "engine": engine,
        "gen s": round(phases["gen"], 3),
        "score s": round(phases["old_log_prob"], 3),
        "update s": round(phases["update_actor"], 3),
        "sync s": round(phases["sync_weights"], 3),
        "step s": round(phases["step"], 3),
        "tokens/s": round(tokens / phases["step"]),
        "peak GiB": round(
            torch.cuda.max_memory_allocated() / 2**30 if on_card else found["peak_mib"] / 1024, 2
        ),
        "correction": f"{found['correction'] / phases['step']:.2%}",
    }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=5, help="measured, after three to warm up")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line each")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case, options.steps)))
        return
    if not torch.cuda.is_available() and set(options.sizes) != {"tiny"}:
        raise SystemExit("torch sees no CUDA card on this machine; only --sizes tiny runs here")
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", flush=True)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for size in options.sizes:
        for engine in options.engines:
            if engine == "vllm" and importlib.util.find_spec("vllm") is None:
                continue
            command = [sys.executable, __file__, "--case", size, engine, "--steps", str(options.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.splitlines()[-1])
            print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
