"""Liger's kernels on a CPU, by Triton's interpreter: run as a process of its own, with TRITON_INTERPRET=1.

The interpreter has no sound bf16.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from rlctl_triton_on_cpu.interpreter import fill_liger

from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.lora import add_lora
from rlctl.engine.model import run_liger
from rlctl.engine.ranks import join_ranks, leave_ranks
from tests.models import tiny_batch, tiny_model


def kernels_behind(tensor) -> set[str]:
    """Names of Liger's functions in the graph that `tensor` comes from."""
    found, seen, todo = set(), set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found |= {node.name()} if node.name().startswith("Liger") else set()
        todo += [parent for parent, _ in node.next_functions]
    return found


def two_steps(model, ranks, *, stage: int, again: bool):
    """Log-probs before and after an optimizer step, its gradient norm, and the kernels behind them."""
    engine = DeepSpeedEngine(
        model,
        ranks,
        temperature=0.7,
        zero_stage=stage,
        dtype=torch.float32,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
        gradient_checkpointing=again,
    )
    batch = tiny_batch(tiny_model(), rows=2, prompt=3, horizon=3)
    before = engine.policy(batch.inputs).log_probs
    kernels = kernels_behind(before)
    engine.backward(before.sum(), last=True)
    norm = engine.step(lr=1e-2).grad_norm
    return before.detach(), engine.policy(batch.inputs).log_probs.detach(), norm, kernels


def compare(ranks, kind: str, *, lora: int = 0, stage: int = 0, again: bool = False) -> dict[str, object]:
    """The same two steps by a plain model, and then by its copy with Liger's kernels."""
    plain = tiny_model(kind)
    fused = copy.deepcopy(plain)
    for model in (plain, fused) if lora else ():
        torch.manual_seed(1)
        add_lora(model, lora, 16.0, ["all-linear"])
    wanted = two_steps(plain, ranks, stage=stage, again=again)
    run_liger(fused)
    sample = copy.deepcopy(fused)  # as Hugging Face rollouts make theirs
    found = two_steps(fused, ranks, stage=stage, again=again)
    return {
        "kind": kind,
        "before": float((wanted[0] - found[0]).abs().max()),
        "after": float((wanted[1] - found[1]).abs().max()),
        "moved": float((wanted[1] - wanted[0]).abs().max()),
        "norms": [wanted[2], found[2]],
        "kernels": sorted(found[3]),
        "plain_kernels": sorted(wanted[3]),
        "copy_runs_its_own_norm": sample.model.norm.forward.__self__ is sample.model.norm,
        "later_models_norm": tiny_model(kind).model.norm._get_name(),
    }


def main(answer: Path) -> None:
    fill_liger()
    ranks = join_ranks()
    results = [
        compare(ranks, "llama"),
        compare(ranks, "qwen2", stage=2, lora=2, again=True),
        compare(ranks, "gemma2", stage=3, again=True),
    ]
    leave_ranks()
    answer.write_text(json.dumps({"compared": results}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
