"""Would a correction that sets itself by the gauge be better than a fixed one? Training in learned worlds.

    python benchmarks/auto_correction.py FILE [--seeds 10] [--steps 60]

A policy of up to 32 tokens trains (Adam, 32 groups of 8, exact expected reward as the score) on responses of
the policy of 1, 4 or 16 updates before. Fixed rules at three rates, P3O, VCPO's rate ∝ √ESS, and two that set
themselves: `auto bound` takes, batch by batch, the rule of smallest estimated error (formula of
`algos/gradient_error.py`, moments averaged with weight 0.9); `auto bound and rate` also multiplies
the rate by the estimated squared cosine between the rule's expected gradient and the true one. Score: mean
expected reward over the run. Regret: to the fixed setting (rule and rate) that is best on average at that
staleness; 90 % bootstrap intervals over seeds. Finished runs are lines of FILE: interrupted, the same command
goes on. 990 runs, one to two seconds each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runs import interval
from rlctl.bench.exact import BenchRule
from rlctl.bench.learned import LearnedWorld, log_softmax
from rlctl.what_if.settings import NO_UPPER

HORIZON, N, GROUPS = 32, 8, 32
STALENESS, RATES = (1, 4, 16), (0.03, 0.1, 0.3)
FREE = {"rollout_is_bound": "truncate", "rollout_is_threshold": NO_UPPER}
EXACT = BenchRule.of(rollout_is="sequence", **FREE)
RULES = {"no correction": BenchRule.of(rollout_is=None)} | {
    f"{level} truncate {bound}": BenchRule.of(
        rollout_is=level, rollout_is_bound="truncate", rollout_is_threshold=bound
    )
    for level in ("token", "sequence")
    for bound in ("1.5", "2.0", "5.0")
}
P3O = BenchRule.of(rollout_is=None, loss_type="p3o")
ADAPTING = ("P3O", "VCPO", "auto bound", "auto bound and rate")


class Gauge:
    """Averages over batches of the products that an error follows from, for every rule."""

    def __init__(self) -> None:
        self.moments: dict[str, np.ndarray] = {}

    def look(self, world: LearnedWorld, drawn: Any) -> dict[str, np.ndarray]:
        """The gradients of every rule, remembered."""
        exact = world.group_gradients(EXACT, drawn, N)
        found = {name: world.group_gradients(rule, drawn, N) for name, rule in RULES.items()}
        for name, used in found.items():
            now = np.array(
                [pairs(used, used), pairs(used, exact), pairs(exact, exact), (used**2).sum(1).mean()]
            )
            self.moments[name] = 0.9 * self.moments.get(name, now) + 0.1 * now
        return found

    def error(self, name: str) -> float:
        norm, inner, signal, square = self.moments[name]
        spread = signal * (norm + (square - norm) / GROUPS)
        return 1.0 - max(inner, 0.0) ** 2 / spread if spread > 0 else 1.0

    def cosine(self, name: str) -> float:
        """Squared, kept in [0.1, 1]; 1 where the moments make none."""
        norm, inner, signal, _ = self.moments[name]
        return float(np.clip(max(inner, 0.0) ** 2 / (norm * signal), 0.1, 1.0)) if norm > 0 < signal else 1.0


def pairs(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of a_j · b_k over j ≠ k."""
    count = len(a)
    return float((a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1)))


def run(name: str, rate: float, staleness: int, seed: int, steps: int) -> float:
    """Mean expected reward over the run."""
    world = LearnedWorld(seed, "noise", 0.0, HORIZON)
    rng = np.random.default_rng([seed, 1])
    logits = 0.3 * rng.normal(size=world.train.shape)
    logits[:, 0] -= np.log(HORIZON / 2.0)
    past: deque[np.ndarray] = deque([logits], maxlen=staleness + 1)
    first, second = np.zeros_like(logits), np.zeros_like(logits)
    gauge, scores = Gauge(), []
    for step in range(steps):
        world.train, world.rollout = log_softmax(logits), log_softmax(past[0])
        scores.append(world.expected(logits)[0])
        drawn = world.sample(N, GROUPS, draw=(seed, step))
        factor = 1.0
        if name.startswith("auto"):
            found = gauge.look(world, drawn)
            chosen = min(RULES, key=gauge.error)
            gradient = found[chosen].mean(0)
            factor = gauge.cosine(chosen) if name.endswith("rate") else 1.0
        else:
            rule = P3O if name == "P3O" else RULES["sequence truncate 2.0" if name == "VCPO" else name]
            gradient = world.group_gradients(rule, drawn, N).mean(0)
        if name == "VCPO":
            tables = (world.train - world.rollout)[drawn.contexts, drawn.tokens]
            weight = np.exp(np.where(drawn.mask, tables, 0.0).sum(1))
            factor = float(np.sqrt(weight.sum() ** 2 / (len(weight) * (weight**2).sum())))
        gradient = gradient.reshape(logits.shape)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        size = np.sqrt(second / (1 - 0.99 ** (step + 1))) + 1e-8
        logits = logits + rate * factor * first / (1 - 0.9 ** (step + 1)) / size
        past.append(logits)
    return float(np.mean(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    known = {tuple(row[:-1]): row[-1] for row in map(json.loads, lines)}
    for seed in range(options.seeds):
        for staleness in STALENESS:
            for rate in RATES:
                for name in (*RULES, *ADAPTING):
                    key = (name, rate, staleness, seed, options.steps)
                    if key not in known:
                        known[key] = run(*key)
                        with options.file.open("a") as file:
                            file.write(json.dumps([*key, known[key]]) + "\n")

    def scores(name: str, rate: float, staleness: int) -> np.ndarray:
        return np.array([known[name, rate, staleness, s, options.steps] for s in range(options.seeds)])

    print("| updates behind | best fixed setting | its score | " + " | ".join(ADAPTING) + " |")
    print("|---" * (3 + len(ADAPTING)) + "|")
    for staleness in STALENESS:
        settings = [(name, rate) for name in RULES for rate in RATES]
        name, rate = max(settings, key=lambda setting: scores(*setting, staleness).mean())
        best = scores(name, rate, staleness)
        cells = []
        for other in ADAPTING:
            at = max(RATES, key=lambda r: scores(other, r, staleness).mean())
            cells.append(f"{interval(best - scores(other, at, staleness))} at {at:g}")
        print(f"| {staleness} | `{name}` at {rate:g} | {best.mean():.3f} | {' | '.join(cells)} |")
    print("\nRegret at a rate of 0.1 to the best fixed rule of that rate:")
    for staleness in STALENESS:
        name = max(RULES, key=lambda rule: scores(rule, 0.1, staleness).mean())
        best = scores(name, 0.1, staleness)
        cells = [f"{other} {interval(best - scores(other, 0.1, staleness))}" for other in ADAPTING]
        print(f"{staleness} updates behind, `{name}` {best.mean():.3f}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
