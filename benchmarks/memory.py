"""What `rlctl train --dry-run` says an update takes, beside what it takes: weights, gradients, optimizer.

    python benchmarks/memory.py [--json FILE]

Random Llamas of two sizes under DeepSpeed on one CPU rank, at every ZeRO stage, in float32 and bf16. Every
case runs in a process of its own. Measured is the peak of resident memory over an update after the
first, above what the process held before there was a model (Linux). Two short sequences are trained on,
so that next to nothing of it is activations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.step import memory
from rlctl.spec.load import load_spec
from rlctl.spec.memory import memory_parts
from rlctl.spec.model_size import ModelSize

#: Hidden size and layers: 17 and 65 million parameters.
SIZES = {"small": (512, 6), "large": (1024, 6)}
CASES = [(size, stage, dtype) for size in SIZES for dtype in ("fp32", "bf16") for stage in range(4)]
PARTS = (
    "weights",
    "gradients",
    "optimizer (AdamW)",
    "gradients of the step",
    "gathered weights",
    "reduction buffer",
)


def measured(size: str, stage: int, dtype: str) -> dict[str, float]:
    """Parameters, and MiB of an update's peak; in a process of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlctl.engine.deepspeed import DeepSpeedEngine
    from rlctl.engine.ranks import join_ranks, leave_ranks
    from tests.models import tiny_batch, tiny_model

    ranks = join_ranks()

    def engine(model: Any) -> DeepSpeedEngine:
        return DeepSpeedEngine(
            model,
            ranks,
            temperature=1.0,
            zero_stage=stage,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
            weight_decay=0.0,
            betas=(0.9, 0.999),
            grad_clip=1.0,
        )

    batch = tiny_batch(tiny_model(), rows=2)

    def update(actor: DeepSpeedEngine) -> None:
        actor.backward(actor.policy(batch).log_probs.sum(), last=True)
        actor.step(lr=1e-4)

    update(engine(tiny_model()))  # whatever is loaded at first use
    before = memory("VmRSS")
    hidden, layers = SIZES[size]
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
    )
    actor = engine(LlamaForCausalLM(config))
    update(actor)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    update(actor)
    parameters = sum(tensor.numel() for _, tensor in actor.weights())
    leave_ranks()
    return {"parameters": parameters, "mib": memory("VmHWM") - before}


def predicted(parameters: int, stage: int, dtype: str) -> float:
    """MiB of the parts that do not depend on the batch."""
    spec = load_spec([], [], [f"engine.zero_stage={stage}", f"engine.dtype={dtype}"]).spec
    size = ModelSize("counted", parameters)
    parts = {part.name: part.num_bytes or 0.0 for part in memory_parts(spec, size)}
    return sum(parts.get(name, 0.0) for name in PARTS) / 2**20


def in_a_process(case: tuple[str, int, str]) -> dict[str, float]:
    with tempfile.NamedTemporaryFile() as answer:
        arguments = [sys.executable, __file__, "--case", *map(str, case), "--answer", answer.name]
        # What is freed goes back to the system at once, or the peak would count it.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
        subprocess.run(arguments, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(Path(answer.name).read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        size, stage, dtype = options.case
        options.answer.write_text(json.dumps(measured(size, int(stage), dtype)))
        return
    report = []
    print("| parameters | dtype | ZeRO | predicted MiB | measured MiB | bytes each | predicted / measured |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        found = in_a_process(case)
        parameters, (_, stage, dtype) = int(found["parameters"]), case
        wanted, got = predicted(parameters, stage, dtype), found["mib"]
        print(
            f"| {parameters / 1e6:.0f} M | {dtype} | {stage} | {wanted:.0f} | {got:.0f} "
            f"| {got * 2**20 / parameters:.1f} | {wanted / got:.2f} |",
            flush=True,
        )
        report.append({"case": case, "parameters": parameters, "predicted_mib": wanted, "measured_mib": got})
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
