"""Measures the savings of token-based micro-batches: one update with and without them.

    python benchmarks/packing.py [--json FILE] [--rounds 3] [--threads 1] [--rows 64] [--longest 256]

Runs the same update (forward, loss, backward, step; float32, a random Llama with three million parameters) on
the same rows, split by sequences and by tokens. Both limit a pass to the same number of computed tokens: 8
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

from rlctl.batch import TrainBatch
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.inputs import used_columns
from rlctl.engine.ranks import join_ranks, leave_ranks
from rlctl.spec.load import load_spec
from rlctl.train.micro_batches import micro_batches
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


def batch_of(lengths: torch.Tensor, longest: int) -> TrainBatch:
    """Random prompts and responses of these lengths, with random advantages."""
    draw, rows = torch.Generator().manual_seed(1), len(lengths)
    response_mask = torch.arange(longest) < lengths[:, None]
    attention_mask = torch.cat([torch.ones(rows, PROMPT, dtype=torch.bool), response_mask], 1)
    ids = torch.randint(2, VOCABULARY, (rows, PROMPT + longest), generator=draw) * attention_mask
    log_probs = torch.where(response_mask, -7.6, 0.0)
    advantages = torch.randn(rows, 1, generator=draw).expand(rows, longest)
    return TrainBatch(
        input_ids=ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        responses=ids[:, PROMPT:],
        response_mask=response_mask,
        sample_mask=torch.ones(rows, dtype=torch.bool),
        rollout_log_probs=log_probs,
        old_log_probs=log_probs,
        advantages=torch.where(response_mask, advantages, 0.0),
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
    return UpdateSettings.of(load_spec([], [], overrides).spec)


def measure(kind: str, options: argparse.Namespace, actor: DeepSpeedEngine) -> dict[str, Any]:
    """Per split: seconds of an update, numbers of passes and computed tokens; and number of real tokens."""
    batch = batch_of(lengths_of(kind, options.rows, options.longest), options.longest)
    cuts = {cut: settings_of(cut, options.rows, options.longest) for cut in ("sequences", "tokens")}
    seconds: dict[str, list[float]] = {cut: [] for cut in cuts}
    for _ in range(options.rounds):
        for cut, settings in cuts.items():
            start = time.process_time()
            update(batch, actor, actor.ranks, settings, lambda _: 1e-6, 0)
            seconds[cut].append(time.process_time() - start)
    found: dict[str, Any] = {"real_tokens": int(batch.attention_mask.sum())}
    for cut, settings in cuts.items():
        parts = micro_batches(batch.inputs, settings.micro_rows, settings.micro_tokens, actor.ranks)
        computed = [used_columns(batch.inputs.pick(rows)).input_ids.numel() for rows in parts]
        found[cut] = {
            "cpu_s": statistics.median(seconds[cut]),
            "passes": len(parts),
            "computed_tokens": sum(computed),
            "largest_pass": max(computed),
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
    names = ("CPU s", "passes", "computed", "largest")
    print(f"{'responses':>14}{'cut by':>12}" + "".join(f"{name:>10}" for name in names))
    for kind in ("all as long", "even", "long tail"):
        report[kind] = found = measure(kind, options, actor)
        for cut in ("sequences", "tokens"):
            x = found[cut]
            print(
                f"{kind:>14}{cut:>12}{x['cpu_s']:10.3f}{x['passes']:10}{x['computed_tokens']:10}"
                f"{x['largest_pass']:10}"
            )
        print(
            f"{'':>14}{'':>12} speed × {found['speed']:.2f}; real tokens {found['real_tokens']}", flush=True
        )
    leave_ranks()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
