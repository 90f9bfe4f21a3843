"""Measures a training step on a GPU: time per phase, memory, and the correction's share.

    python benchmarks/card.py [--sizes 0.5b 1.5b 7b] [--engines hf vllm] [--steps 5] [--json FILE]

Random weights with the dimensions of Qwen2.5: 32 prompts × 8 responses of up to 512 tokens, bf16, sequence IS
in decoupled mode, which scores every batch once before training; the 7B size trains LoRA adapters. Every case
runs in a separate process and prints rows of one Markdown table. One that does not fit into this GPU by the
estimate is skipped with the figures; one that fails is named, and the others run all the same. The rows: per
phase the measured median seconds, the dry run's estimate for this machine (the middle of the interval of
`rlctl/run_spec/placement.py`), and measured / estimated; the same for
tokens per second and peak GPU memory; and the correction's share of the step. A ratio far above the other
ratios indicates a fault, not just a slow phase. Engines that are not installed are omitted.

Without a CUDA GPU only `--sizes tiny` runs, which tests the script itself.
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
PRESET = "rloo-seq-is"
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 8, 128, 512
#: Row → phases of the run, and phases of the estimate, whose seconds are added.
PHASES = {
    "generate, s": (("gen",), ("generate",)),
    "score, s": (("old_log_prob", "ref", "values"), ("score",)),
    "update and step, s": (("update_actor", "update_critic"), ("update", "step")),
    "sync, s": (("sync_weights",), ("sync",)),
    "whole step, s": (("step",), ("whole step",)),
}
COLUMNS = ("size", "engine", "phase", "measured", "estimated", "measured / estimated")
Row = tuple[str, float | None, float | None]


def write_model(size: str, where: Path) -> None:
    """Writes config, random weights and a character-level tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlctl.run_spec.model import RECIPE
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
    """Writes prompts of random digits, one token per character; the ground truth does not matter."""
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
    """Spec overrides of a case."""
    write_prompts(where / "prompts.parquet", 16 if size == "tiny" else PROMPT_TOKENS)
    files = [f"model.path={where / 'model'}", f"data.train_files={where / 'prompts.parquet'}"]
    return [*files, *settings_of(size, engine)]


def settings_of(size: str, engine: str) -> list[str]:
    """Spec overrides of a case besides its files."""
    prompt, response = (16, 12) if size == "tiny" else (PROMPT_TOKENS, RESPONSE_TOKENS)
    return [
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


def compared(phases: dict[str, float], estimated: dict[str, float]) -> list[Row]:
    """One row per phase: measured and estimated seconds; None if not run or not estimated."""
    rows: list[Row] = []
    for name, (ours, plans) in PHASES.items():
        measured = [phases[phase] for phase in ours if phase in phases]
        known = [estimated[phase] for phase in plans if phase in estimated]
        rows.append((name, sum(measured) if measured else None, sum(known) if known else None))
    return rows


def estimate(spec: Any, machine: Any) -> tuple[dict[str, float], float, float]:
    """Estimated seconds per phase, tokens per step, and peak memory of a GPU in GiB."""
    from rlctl.run_spec.memory import CONTEXT, Phase
    from rlctl.run_spec.model_size import model_size
    from rlctl.run_spec.placement import Placement

    plan = Placement(spec, model_size(spec.model), machine)
    sampling: list[Phase] = [] if spec.engine_sleeps else ["generation"]  # it is not in the measured peak
    # Measured are torch's tensors.
    other = sum(part.num_bytes or 0.0 for part in plan.gpu_parts if part.name == CONTEXT)
    peak = plan.gpu_peak(*sampling, "head", "layers", "step") - other if machine.gpus else 0.0
    return plan.seconds(), plan.tokens(), peak / 2**30


def cells(row: Row) -> list[str]:
    """Phase, measured, estimated, ratio."""
    name, measured, estimated = row
    both = bool(measured and estimated)
    ratio = f"{measured / estimated:.2f}" if both else "–"  # type: ignore[operator]
    return [name, *("–" if value is None else f"{value:,.3g}" for value in (measured, estimated)), ratio]


def planned_size(size: str) -> Any:
    """Dimensions and number of parameters of a case."""
    from rlctl.run_spec.model_size import ModelSize, Shape

    layers, hidden, inner, heads, kv_heads, vocabulary, tied = SHAPES[size]
    shape = Shape(layers, hidden, inner, heads, kv_heads, hidden // heads, vocabulary)
    layer = sum(inputs * outputs for inputs, outputs in shape.matrices().values())
    return ModelSize("the case", layers * layer + vocabulary * hidden * (1 if tied else 2), shape)


def too_large(size: str, engine: str, machine: Any, more: list[str]) -> str | None:
    """Why the case does not fit into a GPU of the machine; None: it fits, or there is no GPU."""
    from rlctl.run_spec.load import load_spec
    from rlctl.run_spec.memory import memory_total
    from rlctl.run_spec.placement import Placement

    if not machine.gpus:
        return None
    given = [*settings_of(size, engine), "model.path=org/case", "data.train_files=x", *more]
    plan = Placement(load_spec([PRESET], [], given).spec, planned_size(size), machine)
    needed = memory_total(plan.gpu_parts)
    if needed <= machine.gpu_bytes:
        return None
    return (
        f"needs {needed / 2**30:.0f} GiB by the estimate, {machine.gpu} has {machine.gpu_bytes / 2**30:.0f}"
    )


def measure(size: str, engine: str, steps: int, more: list[str]) -> list[Row]:
    """Trains in this process, with further overrides, and returns the rows of the table."""
    import torch

    from benchmarks.step import run_rlctl
    from rlctl.run_spec.load import load_spec
    from rlctl.run_spec.machine import machine_of

    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        write_model(size, where / "model")
        overrides = [*overrides_of(size, engine, where), *more]
        found = run_rlctl(PRESET, overrides, warm_up=3, steps=steps, correction=True)
        seconds, planned_tokens, planned_peak = estimate(
            load_spec([PRESET], [], overrides).spec, machine_of(None)
        )
    phases = {key: statistics.median(values) for key, values in found["phases"].items()}
    prompt, response = (16, 12) if size == "tiny" else (PROMPT_TOKENS, RESPONSE_TOKENS)
    tokens = PROMPTS * SAMPLES * (min(found["mean_length"], response) + prompt)
    whole = seconds.get("whole step")
    rows = compared(phases, seconds)
    rows.append(("tokens per second", tokens / phases["step"], planned_tokens / whole if whole else None))
    if torch.cuda.is_available():
        rows.append(("peak memory, GiB", found["peak_gib"], planned_peak))
    rows.append(("correction, share of the step", found["correction"] / phases["step"], None))
    return rows


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b", "7b"])
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=5, help="measured, after three to warm up")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line each")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="+", default=[], help="further overrides of the spec, with --case")
    options = parser.parse_args()
    if options.case:
        from rlctl.run_spec.machine import machine_of

        why = too_large(*options.case, machine_of(None), options.set)
        print(json.dumps({"skipped": why} if why else measure(*options.case, options.steps, options.set)))
        return
    if not torch.cuda.is_available() and set(options.sizes) != {"tiny"}:
        raise SystemExit("torch found no CUDA GPU on this machine; only --sizes tiny runs here")
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU", flush=True)
    failed = 0
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    for size in options.sizes:
        for engine in options.engines:
            if engine == "vllm" and importlib.util.find_spec("vllm") is None:
                continue
            command = [sys.executable, __file__, "--case", size, engine, "--steps", str(options.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
            if not isinstance(found, list):
                why = found["skipped"] if found else f"failed with exit code {done.returncode}"
                print(f"| {size} | {engine} | {'skipped: ' * bool(found)}{why} |  |  |  |", flush=True)
                failed += found is None
                continue
            for row in found:
                print("| " + " | ".join([size, engine, *cells(row)]) + " |", flush=True)
                if options.json:
                    names = ("phase", "measured", "estimated")
                    line = {"size": size, "engine": engine} | dict(zip(names, row, strict=True))
                    with options.json.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    if failed:
        raise SystemExit(f"{failed} cases failed")


if __name__ == "__main__":
    main()
