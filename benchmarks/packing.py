"""Measures the savings of token-based micro-batches and of packed rows: one update with and without them.

    python benchmarks/packing.py [--json FILE] [--rounds 3] [--threads 1] [--rows 64] [--longest 256]

Runs the same update (forward, loss, backward, step; float32, a random Llama with three million parameters) on
the same sequences, split by number and by tokens, in the layout that costs less (`engine/layout.py`) and in
padded rows. Both limit a pass to the same number of computed tokens: 8
sequences of the maximum length, or a budget of as many tokens. The distributions of response lengths are: all
of maximum length, uniform, and mostly short with a long tail. Sides alternate; the results are medians. All
prompts are different, so the savings of shared prompts are not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlctl.batch import TokenBatch
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.ranks import join_ranks, leave_ranks
from rlctl.run_spec.load import load_spec
from rlctl.train.deal import micro_batches
from rlctl.train.settings import UpdateSettings
from rlctl.train.update import update

PROMPT, AT_ONCE, VOCABULARY = 16, 8, 2048


def lengths_of(kind: str, rows: int, longest: int) -> torch.Tensor:
    """(rows,) response lengths in tokens, in random order."""
    draw = torch.Generator().manual_seed(0)
    if kind == "all as long":
        return torch.full((rows,), longest)
    even = torch.rand(rows, generator=draw)
    share = even if kind == "even" else even**4
    return (share * longest).ceil().long().clamp(min=1)


def batch_of(lengths: torch.Tensor) -> TokenBatch:
    """Random prompts and responses of these lengths, with random advantages."""
    draw, rows, count = torch.Generator().manual_seed(1), len(lengths), int(lengths.sum())
    whole = lengths + PROMPT
    sampled = torch.cat([torch.arange(length) >= PROMPT for length in whole.tolist()])
    advantages = torch.randn(rows, generator=draw)
    return TokenBatch(
        token_ids=torch.randint(2, VOCABULARY, (len(sampled),), generator=draw),
        sampled=sampled,
        lengths=whole,
        owners=torch.arange(rows),
        group_ids=torch.arange(rows) // 8,
        members=torch.arange(rows) % 8,
        prompt_weights=torch.ones(rows),
        rollout_log_probs=torch.full((count,), -7.6),
        versions=torch.zeros(count, dtype=torch.int64),
        turns=torch.zeros(count, dtype=torch.int64),
        rewards=torch.zeros(count),
        old_log_probs=torch.full((count,), -7.6),
        advantages=advantages.repeat_interleave(lengths),
    )


def engine_of(longest: int, ranks: Any) -> DeepSpeedEngine:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=PROMPT + longest,
    )
    return DeepSpeedEngine(
        LlamaForCausalLM(config),
        ranks,
        temperature=1.0,
        zero_stage=0,
        dtype=torch.float32,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
    )


def settings_of(cut: str, rows: int, longest: int) -> UpdateSettings:
    overrides = [
        f"data.train_batch_size={rows // 8}",
        "data.max_prompt_length=16",
        f"data.max_response_length={longest}",
        "rollout.n=8",
        f"actor.ppo_mini_batch_size={rows // 8}",
        f"actor.ppo_micro_batch_size_per_gpu={AT_ONCE}",
        "algorithm.rollout_correction.bypass_mode=false",  # no pass except the update's own
    ]
    if cut == "tokens":
        overrides.append(f"actor.ppo_max_token_len_per_gpu={AT_ONCE * (PROMPT + longest)}")
    return UpdateSettings.of(load_spec([], [], overrides).spec, ())


def measure(kind: str, options: argparse.Namespace, actor: DeepSpeedEngine) -> dict[str, Any]:
    """Per split: seconds of an update, also in padded rows, and number of passes; and number of tokens."""
    batch = batch_of(lengths_of(kind, options.rows, options.longest))
    cuts = {cut: settings_of(cut, options.rows, options.longest) for cut in ("sequences", "tokens")}
    reader = actor._module.reader
    supported = reader.packs
    seconds: dict[tuple[str, bool], list[float]] = {
        (cut, padded): [] for cut in cuts for padded in (False, True)
    }
    layouts: dict[str, str] = {}
    for _ in range(options.rounds):
        for (cut, padded), times in seconds.items():
            reader.packs = supported and not padded
            start = time.process_time()
            updated = update(batch, actor, actor.ranks, cuts[cut], lambda _: 1e-6, 0)
            times.append(time.process_time() - start)
            layouts[cut] = layouts[cut] if padded else updated.layout
    reader.packs = supported
    found: dict[str, Any] = {"num_tokens": len(batch.token_ids)}
    for cut, settings in cuts.items():
        found[cut] = {
            "cpu_s": statistics.median(seconds[cut, False]),
            "padded_cpu_s": statistics.median(seconds[cut, True]),
            "passes": len(
                micro_batches(batch, settings.actor.ppo_micro_batch_size_per_gpu, settings.spec.pass_tokens)
            ),
            "layout": layouts[cut],
        }
    found["speed"] = found["sequences"]["cpu_s"] / found["tokens"]["cpu_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for name, default in (("rounds", 3), ("threads", 1), ("rows", 64), ("longest", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ranks = join_ranks()
    actor, report = engine_of(options.longest, ranks), {}
    names = ("CPU s", "padded", "passes")
    print(f"{'responses':>14}{'cut by':>12}" + "".join(f"{name:>10}" for name in names))
    for kind in ("all as long", "even", "long tail"):
        report[kind] = found = measure(kind, options, actor)
        for cut in ("sequences", "tokens"):
            x = found[cut]
            figures = f"{x['cpu_s']:10.3f}{x['padded_cpu_s']:10.3f}{x['passes']:10}"
            print(f"{kind:>14}{cut:>12}{figures}  {x['layout']}")
        print(f"{'':>14}{'':>12} speed × {found['speed']:.2f}; tokens {found['num_tokens']}", flush=True)
    leave_ranks()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
