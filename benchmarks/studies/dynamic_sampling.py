"""Measures dynamic sampling: validation reward at equal numbers of sampled tokens.

    python benchmarks/studies/dynamic_sampling.py DIR [--seeds 1-10] [--steps 60] [--workers 1]

Trains on 256 prompts of the embedded task, so that their difficulty is known from the second epoch on: plain,
with `algorithm.filter_groups`, and with its curriculum. All runs have the same number of steps. Validation,
sampled at the training temperature, is compared at equal numbers of sampled tokens (including discarded
ones), by linear interpolation, and after the last step. Prints a Markdown table: means over seeds, and 90 %
bootstrap intervals of the paired difference to plain. Finished runs are stored as lines of DIR/runs.jsonl;
after an interruption, the same command continues. 30 runs, half a minute to a minute each on an idle core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, interval, run_all
from rlctl.tiny.embedded import ensure_embedded

FILTER = "algorithm.filter_groups.enable=true"
SIDES = {
    "plain": (),
    "filter": (FILTER,),
    "filter, curriculum": (FILTER, "algorithm.filter_groups.curriculum=true"),
}
BATCH, SIBLINGS, PROMPTS = 32, 8, 256
COMMON = (
    f"data.train_batch_size={BATCH}",
    f"actor.ppo_mini_batch_size={BATCH}",
    "actor.lr_warmup_steps=0",
    f"rollout.n={SIBLINGS}",
    "actor.lr_scheduler_type=constant",
    "trainer.test_freq=4",
    "rollout.val_kwargs.temperature=1.0",
    "rollout.val_kwargs.n=2",
)
BUDGETS = (0.25, 0.5, 0.75, 1.0)


def prompts_in(directory: Path) -> Path:
    """Writes the first `PROMPTS` training prompts of the embedded task, if missing; returns the file."""
    path = directory / "train.parquet"
    if not path.exists():
        pq.write_table(pq.read_table(ensure_embedded(0).train_file).slice(0, PROMPTS), path)
    return path


def jobs_of(data: Path, seeds: list[int], steps: int) -> list[Job]:
    """Jobs of every side and seed."""
    limit = f"trainer.total_training_steps={steps}"
    common = (*COMMON, f"data.train_files={data}")
    return [
        Job("dynamic sampling", name, seed, ("rloo-seq-is",), (*common, limit, *more))
        for seed in seeds
        for name, more in SIDES.items()
    ]


def generated_tokens(outcome: Outcome) -> np.ndarray:
    """(steps,) response tokens sampled up to each step."""
    plain = [(length or 0.0) * BATCH * SIBLINGS for length in outcome.series["length"]]
    pairs = zip(outcome.series["paid"], plain, strict=True)
    return np.cumsum([own if paid is None else paid for paid, own in pairs])


def validation_at(outcome: Outcome, tokens: float) -> float:
    """Validation reward after `tokens` sampled tokens, interpolated linearly between validations."""
    paid = generated_tokens(outcome)
    known = [
        (paid[step], value) for step, value in enumerate(outcome.series["validation"]) if value is not None
    ]
    return float(np.interp(tokens, *zip(*known, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seeds", type=seeds_of, default=list(range(1, 11)))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(prompts_in(options.directory), options.seeds, options.steps)
    found = run_all(jobs, options.directory / "runs.jsonl", options.workers)
    found = {job: outcome for job, outcome in found.items() if not outcome.error}
    by_side = {name: {job.seed: out for job, out in found.items() if job.name == name} for name in SIDES}
    seeds = sorted(set.intersection(*(set(outcomes) for outcomes in by_side.values())))
    least = {seed: min(generated_tokens(by_side[name][seed])[-1] for name in SIDES) for seed in seeds}

    def scores(name: str, share: float) -> np.ndarray:
        """Validation reward per seed at a share of the smallest token total; inf: after the last step."""
        return np.array([validation_at(by_side[name][seed], share * least[seed]) for seed in seeds])

    heads = [*(f"{share:.0%} of the tokens" for share in BUDGETS), f"{options.steps} updates"]
    print(f"| | tokens per step | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 2) + "|")
    for name in SIDES:
        cells = []
        for share in (*BUDGETS, np.inf):
            values, plain = scores(name, share), scores("plain", share)
            difference = "" if name == "plain" else f"; {interval(values - plain)}"
            cells.append(f"{values.mean():.3f}{difference}")
        per_step = np.mean([generated_tokens(by_side[name][seed])[-1] / options.steps for seed in seeds])
        print(f"| {name} | {per_step:,.0f} | {' | '.join(cells)} |")
    print(f"\n{len(seeds)} seeds; {len(jobs) - len(found)} runs ended with an error")


if __name__ == "__main__":
    main()
