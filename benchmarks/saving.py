"""Seconds for which a checkpoint stops training: written while training waits, and in the background.

    python benchmarks/saving.py [--rounds 8] [--layers 12] [--engine deepspeed|fsdp] [--directory DIR]

One process trains a Llama of 576 hidden units with random weights in float32, with the real engine, and saves
it in both ways, in random order within each round. Means over rounds have a 95 % interval (Student's t).
“Stopped” is the time until the next step can begin; “complete” the time until the checkpoint is published, in
the background to the end of the step in which it is. Steps during the writing take longer than those of the
same round when nothing is written, because the thread needs processor time, too: “lost” is the time until
“complete” without what these steps would have taken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.intervals import mean_interval
from rlctl.batch import ModelInputs
from rlctl.engine.checkpoint import CHECKPOINTS, bytes_of_newest
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.fsdp import FsdpEngine
from rlctl.engine.ranks import Ranks, join_ranks
from rlctl.run_spec.load import load_spec
from rlctl.train.background import BackgroundWriter
from rlctl.train.saving import save_checkpoint

_HIDDEN, _VOCABULARY, _ROWS, _LENGTH = 576, 49_152, 4, 64


def run_of(engine: str, layers: int, directory: Path, ranks: Ranks) -> Any:
    """What saving reads of a run, with a real engine."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    sizes = {"hidden_size": _HIDDEN, "intermediate_size": 1536, "num_hidden_layers": layers}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, tie_word_embeddings=True, **heads, **sizes))
    make: Any = FsdpEngine if engine == "fsdp" else DeepSpeedEngine
    settings = {"dtype": torch.float32, "weight_decay": 0.0, "betas": (0.9, 0.999), "grad_clip": 1.0}
    return SimpleNamespace(
        spec=load_spec([], [], ["trainer.max_ckpt_to_keep=1"]).spec,
        ranks=ranks,
        run_dir=directory,
        actor=make(model, ranks, temperature=1.0, zero_stage=2, **settings),
        critic=None,
        stream=SimpleNamespace(save=lambda *_: None),
        tokenizer=SimpleNamespace(save_pretrained=lambda _: None),
        draws=None,
        capabilities=(),
        rollout_writer=None,
        policy_version=0,
    )


def take_step(actor: Any) -> float:
    """Seconds of one optimizer step on random tokens."""
    began = time.perf_counter()
    scored = torch.ones(_ROWS, _LENGTH, dtype=torch.bool)
    scored[:, 0] = False
    inputs = ModelInputs(
        torch.randint(_VOCABULARY, (_ROWS * _LENGTH,)), scored.flatten(), torch.full((_ROWS,), _LENGTH)
    )
    actor.backward(-actor.policy(inputs).log_probs.mean(), last=True)
    actor.step(lr=1e-5)
    return time.perf_counter() - began


def save_waiting(run: Any, step: int) -> dict[str, float]:
    """Seconds of a save that training waits for."""
    began = time.perf_counter()
    save_checkpoint(run, step)
    seconds = time.perf_counter() - began
    return {"stopped": seconds, "complete": seconds, "lost": seconds}


def save_in_background(run: Any, step: int, writer: BackgroundWriter, alone: float) -> dict[str, float]:
    """Seconds of a save in the background, and of a step meanwhile; takes steps until it is complete.

    Args:
        alone: seconds of a step when nothing is written.
    """
    began = time.perf_counter()
    held = save_checkpoint(run, step, holds=True)
    assert held
    writer.start(held, run.ranks.world_size)
    stopped = time.perf_counter() - began
    steps: list[float] = []
    while writer.is_writing:
        steps.append(take_step(run.actor))
    complete = time.perf_counter() - began
    writer.finish(run.ranks)
    lost = complete - len(steps) * alone
    return {"stopped": stopped, "complete": complete, "lost": lost, "step": statistics.fmean(steps)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--engine", choices=["deepspeed", "fsdp"], default="deepspeed")
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        run, writer = run_of(given.engine, given.layers, Path(directory), join_ranks()), BackgroundWriter()
        take_step(run.actor)
        save_waiting(run, 0)
        num_bytes, number = bytes_of_newest(run.run_dir / CHECKPOINTS), 0
        for _ in range(given.rounds):
            step = statistics.fmean(take_step(run.actor) for _ in range(3))
            ways = ["waiting", "background"]
            random.shuffle(ways)
            for way in ways:
                number += 1
                values = (
                    save_waiting(run, number)
                    if way == "waiting"
                    else save_in_background(run, number, writer, step)
                )
                for name, value in values.items():
                    found.setdefault(f"{way}, {name}", []).append(value)
            found.setdefault("a step when nothing is written", []).append(step)
    for kind in ("stopped", "lost"):
        pairs = zip(found[f"background, {kind}"], found[f"waiting, {kind}"], strict=True)
        found[f"{kind} in the background, as a share of waiting"] = [one / other for one, other in pairs]
    print(f"{given.engine}, checkpoint of {num_bytes / 2**30:.2f} GiB, {given.rounds} rounds")
    for name, values in found.items():
        print("{}: {:.2f} [{:.2f}, {:.2f}]".format(name, *mean_interval(values)))


if __name__ == "__main__":
    main()
