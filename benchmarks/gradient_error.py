"""Measures how often the interval of `rollout_corr/grad_error` contains the exact error.

    python benchmarks/gradient_error.py [--draws 20] [--seeds 2]

Samples batches of groups from enumerated worlds with known exact error, under four rules. The nominal level
of the interval is 90 %. A vacuous interval (0 to 1) always contains the error; the share of vacuous intervals
is shown separately. Takes two minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlctl.algos.gradient_error import gradient_error
from rlctl.bench.corrections import BenchPlace
from rlctl.bench.exact import BenchRule

REGIMES = ((0.9, "> 0.9"), (0.5, "0.5–0.9"), (0.0, "< 0.5"))
SIZES, GROUPS = (0.1, 0.5, 1.0, 1.6), (64, 256, 1024)
N, MINI = 8, 64
RULES = {
    "no correction": BenchRule.of(rollout_is=None),
    "token": BenchRule.of(rollout_is="token", rollout_is_bound="truncate", rollout_is_threshold="2.0"),
    "sequence": BenchRule.of(rollout_is="sequence", rollout_is_bound="truncate", rollout_is_threshold="2.0"),
    "masked": BenchRule.of(rollout_is="sequence", rollout_is_bound="mask", rollout_is_threshold="2.0"),
}


def sampled(rng, world, factors, groups: int):
    """Samples groups; returns gradients under the rule and under exact weights, and these weights' ESS."""
    used, exact, weights = [], [], []
    for _ in range(groups):
        prompt = rng.integers(world.num_prompts)
        share = world.rollout[prompt] / world.rollout[prompt].sum()
        rows = rng.choice(len(share), size=N, p=share)
        rewards = world.rewards[prompt][rows]
        others = (rewards.sum() - rewards).astype(int)
        weight = world.train[prompt][rows] / world.rollout[prompt][rows]
        advantages = (rewards - others / (N - 1)) * weight
        scores = world.scores[prompt][rows]
        used.append(np.einsum("it,itp->p", factors[prompt][rows, others], scores))
        exact.append(np.einsum("i,itp->p", advantages, scores))
        weights.append(weight)
    w = np.concatenate(weights)
    return torch.tensor(np.array(used)), torch.tensor(np.array(exact)), w.sum() ** 2 / (len(w) * (w**2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    cells: dict[tuple[str, int], list[tuple[bool, bool, float, float]]] = defaultdict(list)
    for size in SIZES:
        for seed in range(options.seeds):
            world = BenchPlace("KL", size=size, horizon=4).world(seed)
            ess = world.ess
            regime = next(
                name for low, name in ((0.9, "> 0.9"), (0.5, "0.5–0.9"), (0.0, "< 0.5")) if ess >= low
            )
            for rule in RULES.values():
                factors = [world.token_factors(rule, N, prompt) for prompt in range(world.num_prompts)]
                truth = world.moments(rule, N).error(MINI)
                for groups in GROUPS:
                    for _ in range(options.draws):
                        found = gradient_error(*sampled(rng, world, factors, groups), MINI)
                        held = found.low <= truth <= found.high
                        cells[regime, groups].append(
                            (held, found.is_undetermined, found.high - found.low, abs(found.estimate - truth))
                        )
    head = ("effective sample size", "groups", "held", "vacuous", "held, of the others", "their width")
    print("| " + " | ".join([*head, "mean distance of the estimate"]) + " |")
    print("|---" * 7 + "|")
    for (regime, groups), rows in sorted(cells.items(), reverse=True):
        values = np.array(rows, float)
        others = values[values[:, 1] == 0]
        rest = f"{others[:, 0].mean():.0%} | {others[:, 2].mean():.3f}" if len(others) else "— | —"
        print(
            f"| {regime} | {groups} | {values[:, 0].mean():.0%} | {values[:, 1].mean():.0%} | {rest} "
            f"| {values[:, 3].mean():.3f} |"
        )


if __name__ == "__main__":
    main()
