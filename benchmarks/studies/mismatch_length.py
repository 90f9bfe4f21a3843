"""Measures the log-prob gap between engine and trainer on a language model, for response lengths 16 to 512.

    python benchmarks/studies/mismatch_length.py [--out FILE.json] [--plot FILE.svg] [--n 4] [--threads 2]

SmolLM2-135M-Instruct answers the built-in questions of `rlctl diagnose mismatch`, `--n` times each, at
temperature 1, up to 512 tokens. Every engine samples once; the trainer scores the same tokens in fp32 and in
bf16 with the training code. Statistics at length T use the first T tokens of the responses with at least T
tokens, so all sequences at T have the same length. The table compares the measured sequence ESS with
exp(−T σ²), its value if the log-ratios of a sequence were independent and normal with the standard deviation
σ measured at the same T (then the mean of exp(2x) is exp(2σ²), and the squared mean of exp(x) is exp(σ²)).

A second table shows the share of Σ r² per class of tokens: by kind (digit, start of a word, rest of a word,
punctuation, white space, end of the response), and by the trainer's probability of the token.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from rlctl.algos.segments import Segments
from rlctl.batch import Task, TokenBatch
from rlctl.data.prompts import Renderer
from rlctl.engine.model import load_policy
from rlctl.environment.single_turn import sample_episodes
from rlctl.mismatch.score import EngineSample, VariantScorer, measure
from rlctl.mismatch.variants import OWN, SamplingSettings, ScoringVariant, question_rows, token_ids
from rlctl.model_files import model_directory
from rlctl.rollout.completions import vllm_options
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import ResponseSampler, Sampling
from rlctl.rollout.vllm import VLLMRollout

MODEL = "smollm2-135m"
LENGTHS = (16, 32, 64, 128, 256, 512)
ENGINES = (("vllm", "fp32", 1.0), ("vllm", "bf16", 1.0), ("hf", "int8", 1.0), ("vllm", "bf16", 0.9))
#: Minimum number of responses for a sequence ESS, because the ESS of n responses is at least 1/n.
FEWEST = 12
SURE = ((0.0, "p < 0.5"), (0.5, "0.5 ≤ p < 0.9"), (0.9, "0.9 ≤ p < 0.99"), (0.99, "p ≥ 0.99"))


def token_class(text: str) -> str:
    """Class of a token, from its text."""
    if not text:
        return "end or special"
    stripped = text.strip()
    if not stripped:
        return "white space"
    if stripped.isdigit():
        return "digit"
    if any(x.isalpha() for x in stripped):
        return "start of a word" if text[0].isspace() else "rest of a word"
    return "punctuation"


def started(running: ExitStack, name: str, dtype: Any, model: Any, tokenizer: Any) -> ResponseSampler:
    """Starts an engine; `running` closes it."""
    if name == "hf":
        return HFRollout(model, tokenizer, model.device, dtype=dtype)
    length = max(map(len, token_ids(question_rows(), Renderer(tokenizer)))) + LENGTHS[-1]
    engine = VLLMRollout(model_directory(MODEL), tokenizer, vllm_options(dtype, length))
    running.callback(engine.close)
    return engine


def sampled(engine: ResponseSampler, model: Any, tokenizer: Any, top_p: float, n: int) -> VariantScorer:
    """Samples responses with the engine and prepares the trainer to score them."""
    own = token_ids(question_rows(), Renderer(tokenizer))
    tasks = [Task(ids, "", group) for group, ids in enumerate(own)]
    episodes = sample_episodes(engine, tasks, n, Sampling(LENGTHS[-1], top_p=top_p), 1, tokenizer)
    batch, prompts = TokenBatch.of(episodes), [episode.task.prompt_ids for episode in episodes]
    sample = EngineSample(prompts, batch.inputs.tokens, batch.rollout_log_probs, batch.units.episode)
    return VariantScorer(model, sample, {OWN: sample.prompts})


def by_length(trainer: Tensor, engine: Tensor, unit: Segments) -> list[dict[str, Any]]:
    """Statistics of the first T tokens of the responses with at least T tokens."""
    found = []
    for length in LENGTHS:
        inside = unit.spread(unit.lengths >= length) & (unit.places < length)
        if (count := int((unit.lengths >= length).sum())) < FEWEST:
            break
        gap = measure(trainer[inside], engine[inside], unit.kept(inside))
        predicted = math.exp(-length * gap.std**2)
        found.append({"length": length, "responses": count, "predicted": predicted} | asdict(gap))
    return found


def by_class(trainer: Tensor, scorer: VariantScorer, tokenizer: Any) -> dict[str, dict[str, float]]:
    """Per class of tokens: share of the tokens, share of Σ r², and mean |r|."""
    squared = (trainer - scorer.sample.reported).double() ** 2
    texts = tokenizer.batch_decode(scorer.sample.tokens[:, None], skip_special_tokens=True)
    kinds = [token_class(text) for text in texts]
    sure = [next(name for low, name in reversed(SURE) if p >= low) for p in trainer.exp().tolist()]
    found = {}
    for names in (kinds, sure):
        for name in sorted(set(names)):
            here = torch.tensor([x == name for x in names])
            found[name] = {
                "tokens": float(here.double().mean()),
                "squared": float(squared[here].sum() / squared.sum()),
                "abs_mean": float(squared[here].sqrt().mean()),
            }
    return found


def measured(n: int) -> Iterator[dict[str, Any]]:
    """Yields one record per engine and trainer precision."""
    model, tokenizer = load_policy(
        model_directory(MODEL),
        revision=None,
        trust_remote_code=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    model.eval().requires_grad_(False)
    plain = ScoringVariant(SamplingSettings(1.0))
    for name, dtype, top_p in ENGINES:
        with ExitStack() as running:
            scorer = sampled(started(running, name, dtype, model, tokenizer), model, tokenizer, top_p, n)
        for precision in ("fp32", "bf16"):
            trainer = scorer.log_probs(plain if precision == "fp32" else replace(plain, dtype=precision))
            yield {
                "engine": f"{name} {dtype}" + (f", top-p {top_p}" if top_p < 1 else ""),
                "trainer": precision,
                "lengths": by_length(trainer, scorer.sample.reported, scorer.sample.unit),
                "classes": by_class(trainer, scorer, tokenizer),
            }


def show(record: dict[str, Any]) -> None:
    """Prints the record as two Markdown tables."""
    print(f"\n**{record['engine']}, trainer {record['trainer']}**\n")
    print("| T | responses | mean r | σ | k3 | token ESS | sequence ESS | exp(−T σ²) |")
    print("|---|---|---|---|---|---|---|---|")
    for x in record["lengths"]:
        print(
            f"| {x['length']} | {x['responses']} | {x['mean']:.1e} | {x['std']:.1e} | {x['k3']:.1e} "
            f"| {x['ess_token']:.4f} | {x['ess_sequence']:.3f} | {x['predicted']:.3f} |"
        )
    print("\n| tokens | share of tokens | share of Σ r² | mean \\|r\\| |\n|---|---|---|---|")
    for name, x in record["classes"].items():
        print(f"| {name} | {x['tokens']:.1%} | {x['squared']:.1%} | {x['abs_mean']:.1e} |", flush=True)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Plots measured and predicted sequence ESS over length; one panel per trainer precision."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, precision in zip(axes, ("fp32", "bf16"), strict=True):
        for record in (x for x in records if x["trainer"] == precision):
            lengths = [x["length"] for x in record["lengths"]]
            (line,) = axis.plot(
                lengths, [x["ess_sequence"] for x in record["lengths"]], "o-", label=record["engine"]
            )
            axis.plot(lengths, [x["predicted"] for x in record["lengths"]], ":", color=line.get_color())
        axis.set(
            xscale="log", xticks=LENGTHS, xlabel="response length (tokens)", title=f"trainer {precision}"
        )
        axis.set_xticklabels([str(x) for x in LENGTHS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("sequence ESS; dotted: exp(−T σ²)")
    axes[0].set_ylim(0, 1.03)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the figures to this file, JSON")
    parser.add_argument("--plot", type=Path, help="draw the sequence ESS to this file")
    parser.add_argument("--n", type=int, default=4, help="responses per question, of which there are 16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "rlctl[bench]"')
    torch.set_num_threads(options.threads)
    records = []
    for record in measured(options.n):
        records.append(record)
        show(record)
        if options.out:
            options.out.write_text(json.dumps(records, indent=1) + "\n")
    if options.plot:
        plot(records, options.plot)


if __name__ == "__main__":
    main()
