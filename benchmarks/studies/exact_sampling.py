"""Measures exact sampling and score centering on a pretrained model: sizes of token lists, seconds, gaps.

    python benchmarks/studies/exact_sampling.py [--model smollm2-135m] [--threads 1] [--json FILE]

Samples 16 responses of up to 24 tokens to four prompts with Hugging Face generation in float32, at
temperature 1 and with several truncations. Seconds are CPU time, the minimum of two alternating rounds. For
score centering: without truncation, with the 128 most likely tokens of each position.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlctl.algos.rules import WeightRule
from rlctl.algos.score_centering import expected_score
from rlctl.batch import Episode, Task, TokenBatch, TokenSequence
from rlctl.engine.log_probs import PolicyModule
from rlctl.model_files import model_directory
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.seeds import turn_seed

TEXTS = ("Once upon a time", "The number seven is", "My favourite recipe starts with", "In physics, energy")
TOKENS, SIBLINGS, ROUNDS, LISTED = 24, 4, 2, 128
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
}


def sampled(engine: HFRollout, tokenizer: Any, sampling: Sampling) -> TokenBatch:
    """Samples the responses to all prompts."""
    prompts = tokenizer(list(TEXTS))["input_ids"]
    places = [(group, member) for group in range(len(prompts)) for member in range(SIBLINGS)]
    requests = [Request(prompts[group], turn_seed(1, group, member)) for group, member in places]
    turns = engine.sample(requests, sampling)
    episodes = [
        Episode(
            Task(prompts[group], TEXTS[group], group),
            member,
            (TokenSequence.of_turn(prompts[group], turn),),
            "",
        )
        for (group, member), turn in zip(places, turns, strict=True)
    ]
    return TokenBatch.of(episodes)


def seconds_of(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def show(name: str, values: dict[str, float]) -> None:
    print(f"\n{name}", flush=True)
    for what, value in values.items():
        print(f"  {what:<28}{value:.4g}")


def measure(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, float]:
    engine = HFRollout(model, tokenizer, "cpu")

    def sample(*, with_kept: bool) -> TokenBatch:
        return sampled(engine, tokenizer, Sampling(TOKENS, with_kept=with_kept, **options))

    batch = sample(with_kept=True)
    kept = batch.column("kept")
    policy, plain = PolicyModule(model, 1.0), replace(batch.inputs, kept=None)

    def train(inputs: Any) -> None:
        policy.zero_grad()
        torch.autograd.backward(policy(inputs).log_probs.sum())

    sides = {
        "sampling": lambda: sample(with_kept=False),
        "sampling, kept sets": lambda: sample(with_kept=True),
        "training pass": lambda: train(plain),
        "training pass, kept sets": lambda: train(batch.inputs),
    }
    rounds = [{name: seconds_of(work) for name, work in sides.items()} for _ in range(ROUNDS)]
    counts = kept.counts.double()
    gaps = {}
    with torch.no_grad():
        for name, inputs in (("gap without", plain), ("gap", batch.inputs)):
            found = policy(inputs).log_probs - batch.rollout_log_probs
            gaps[name] = float(found.abs().mean())
            gaps[f"largest {name}"] = float(found.abs().max())
    return {
        "mean set": float(counts.mean()),
        "median set": float(counts.median()),
        "largest set": float(counts.max()),
        "bytes per token": 4.0 * (float(counts.mean()) + 1.0),
        **{name: min(found[name] for found in rounds) for name in sides},
        **gaps,
    }


def measure_centering(model: Any, tokenizer: Any) -> dict[str, float]:
    engine, policy = HFRollout(model, tokenizer, "cpu"), PolicyModule(model, 1.0)

    def sample(listed: int) -> TokenBatch:
        return sampled(engine, tokenizer, Sampling(TOKENS, num_most_likely=listed))

    batch = sample(LISTED)
    plain, (_, sampler) = replace(batch.inputs, most_likely=None), batch.column("most_likely").padded()

    def train(inputs: Any) -> None:
        policy.zero_grad()
        output = policy(inputs)
        loss = output.log_probs.sum()
        if output.most_likely is not None:
            loss = loss - expected_score(output.most_likely, sampler, WeightRule(None)).sum()
        torch.autograd.backward(loss)

    sides = {
        "sampling": lambda: sample(0),
        "sampling, listed tokens": lambda: sample(LISTED),
        "training pass": lambda: train(plain),
        "training pass, centered": lambda: train(batch.inputs),
    }
    rounds = [{name: seconds_of(work) for name, work in sides.items()} for _ in range(ROUNDS)]
    mass = sampler.exp().sum(-1).double()
    return {
        "mean listed mass": float(mass.mean()),
        "smallest listed mass": float(mass.min()),
        "bytes per token": 8.0 * LISTED + 4.0,
        **{name: min(found[name] for found in rounds) for name in sides},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = model_directory(options.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = {}
    for name, given in TRUNCATIONS.items():
        found[name] = measure(model, tokenizer, given)
        show(name, found[name])
    found["score centering"] = measure_centering(model, tokenizer)
    show("score centering", found["score centering"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
