"""Measures exact sampling and score centering on a pretrained model: sizes of token lists, seconds, gaps.

    python benchmarks/exact_sampling.py [--model smollm2-135m] [--threads 1] [--json FILE]

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

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlctl.algos.rules import WeightRule
from rlctl.algos.score_centering import expected_score
from rlctl.batch import ModelInputs, Prompts
from rlctl.engine.log_probs import PolicyModule, policy_output
from rlctl.model_files import model_directory
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling

TEXTS = ("Once upon a time", "The number seven is", "My favourite recipe starts with", "In physics, energy")
TOKENS, SIBLINGS, ROUNDS, LISTED = 24, 4, 2, 128
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "min_p 0.05": {"min_p": 0.05},
}


def prompts_of(tokenizer: Any) -> Prompts:
    tokenizer.padding_side = "left"
    encoded = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    words = tuple("" for _ in TEXTS)
    return Prompts(
        encoded["input_ids"],
        encoded["attention_mask"].bool(),
        torch.arange(len(TEXTS)),
        words,
        words,
        TEXTS,
    )


def seconds_of(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def show(name: str, values: dict[str, float]) -> None:
    print(f"\n{name}", flush=True)
    for what, value in values.items():
        print(f"  {what:<28}{value:.4g}")


def measure(model: Any, tokenizer: Any, options: dict[str, Any]) -> dict[str, float]:
    engine, prompts = HFRollout(model, tokenizer, "cpu"), prompts_of(tokenizer)

    def sample(*, with_kept: bool) -> Any:
        sampling = Sampling(TOKENS, with_kept=with_kept, **options)
        return engine.generate(prompts, sampling, n=SIBLINGS, step_seed=1, num_groups_total=len(TEXTS))

    rollouts = sample(with_kept=True)
    policy = PolicyModule(model, 1.0)
    plain = rollouts.inputs
    plain = ModelInputs(plain.input_ids, plain.attention_mask, plain.position_ids, plain.scored)

    def train(inputs: ModelInputs) -> None:
        policy.zero_grad()
        torch.autograd.backward(policy_output(policy, inputs).log_probs.sum())

    sides = {
        "sampling": lambda: sample(with_kept=False),
        "sampling, kept sets": lambda: sample(with_kept=True),
        "training pass": lambda: train(plain),
        "training pass, kept sets": lambda: train(rollouts.inputs),
    }
    rounds = [{name: seconds_of(work) for name, work in sides.items()} for _ in range(ROUNDS)]
    mask, counts = rollouts.response_mask, rollouts.kept.counts[rollouts.response_mask].double()
    gaps = {}
    with torch.no_grad():
        for name, inputs in (("gap without", plain), ("gap", rollouts.inputs)):
            found = policy_output(policy, inputs).log_probs - rollouts.rollout_log_probs
            gaps[name] = float(found[mask].abs().mean())
            gaps[f"largest {name}"] = float(found[mask].abs().max())
    return {
        "mean set": float(counts.mean()),
        "median set": float(counts.median()),
        "largest set": float(counts.max()),
        "bytes per token": 4.0 * (float(counts.mean()) + 1.0),
        **{name: min(found[name] for found in rounds) for name in sides},
        **gaps,
    }


def measure_centering(model: Any, tokenizer: Any) -> dict[str, float]:
    engine, prompts, policy = (
        HFRollout(model, tokenizer, "cpu"),
        prompts_of(tokenizer),
        PolicyModule(model, 1.0),
    )

    def sample(listed: int) -> Any:
        sampling = Sampling(TOKENS, num_most_likely=listed)
        return engine.generate(prompts, sampling, n=SIBLINGS, step_seed=1, num_groups_total=len(TEXTS))

    rollouts = sample(LISTED)
    plain = rollouts.inputs
    _, sampler = rollouts.most_likely.padded(plain.scored)

    def train(inputs: ModelInputs) -> None:
        policy.zero_grad()
        output = policy_output(policy, inputs)
        loss = output.log_probs.sum()
        if output.most_likely is not None:
            loss = loss - expected_score(output.most_likely, sampler, WeightRule(None)).sum()
        torch.autograd.backward(loss)

    sides = {
        "sampling": lambda: sample(0),
        "sampling, listed tokens": lambda: sample(LISTED),
        "training pass": lambda: train(plain),
        "training pass, centered": lambda: train(replace(plain, most_likely=rollouts.most_likely)),
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
