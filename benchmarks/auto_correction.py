"""Compares corrections that adapt to an estimated gradient error with fixed ones, in learned worlds.

    python benchmarks/auto_correction.py FILE [--seeds 10] [--steps 60]

A policy with responses of up to 32 tokens trains (Adam, 32 groups of 8) on responses of the policy from 1, 4
or 16 updates before. Fixed methods: five rules at three rates. Adaptive methods, at the same rates: P3O; VCPO
(sequence weights truncated at 8, rate ∝ √ESS, minimum-variance baseline; as in its repository); and four
methods that use the formula of `algos/gradient_error.py` with moments averaged over batches with weight 0.9:

- `auto bound` uses, per batch, the rule with the smallest estimated error;
- `auto bound and rate` also multiplies the rate by the estimated squared cosine between the rule's expected
  gradient and the true gradient;
- `auto bound and staleness` also waits one step for fresh responses if that squared cosine is below ½;
- `rollout_correction.auto`, as built: all three, from the batches before (`algos/gradient_error.py`). Here
  fresh responses cost a step without an update; in training they cost the sampling only.

Score: mean exact expected reward over the steps, including steps that waited. Two seeds select each method's
rate at each staleness, and the best fixed rule; ten other seeds are reported. Regret: score of the best fixed
rule minus the method's score, with 90 % bootstrap intervals over seeds. Worst case: the largest mean regret
of the three staleness levels. Finished runs are stored as lines of FILE; after an interruption, the same
command continues. 528 runs of half a second to two seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.special import log_softmax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runs import interval
from rlctl.algos.gradient_error import CANDIDATES, AutoChoice, CandidateMoments, averaged, choose
from rlctl.bench.exact import BenchRule
from rlctl.bench.learned import LearnedWorld, SampledGroups
from rlctl.train.gradient_error import TOO_OLD
from rlctl.what_if.settings import NO_UPPER

HORIZON, NEEDED, N, GROUPS = 32, (4, 8), 8, 32
STALENESS, RATES, TUNING = (1, 4, 16), (0.3, 1.0, 3.0), (0, 1)


def weights(level: str, bound: str) -> BenchRule:
    return BenchRule.of(rollout_is=level, rollout_is_bound="truncate", rollout_is_threshold=bound)


EXACT = weights("sequence", NO_UPPER)
NONE = BenchRule.of(rollout_is=None)
RULES = {"no correction": NONE} | {
    f"{level} truncate {bound}": weights(level, bound)
    for level in ("token", "sequence")
    for bound in ("2.0", "5.0")
}
#: The candidates of `rollout_correction.auto`.
CHOICES = {
    name: NONE if rule.level is None else weights(rule.level, f"{rule.upper:g}")
    for name, rule in CANDIDATES.items()
}
P3O, VCPO = BenchRule.of(rollout_is=None, loss_type="p3o"), weights("sequence", "8.0")
BUILT = "rollout_correction.auto"
ADAPTING = ("P3O", "VCPO", "auto bound", "auto bound and rate", "auto bound and staleness", BUILT)


class Gauge:
    """Moving averages, over batches, of the moments from which each rule's error is computed."""

    def __init__(self) -> None:
        self.moments: dict[str, np.ndarray] = {}

    def observe(self, world: LearnedWorld, drawn: SampledGroups) -> dict[str, np.ndarray]:
        """Updates the averages; returns the gradients of every rule."""
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
        """Squared cosine, clipped to [0.1, 1]; 1 if the moments do not define it."""
        norm, inner, signal, _ = self.moments[name]
        return float(np.clip(max(inner, 0.0) ** 2 / (norm * signal), 0.1, 1.0)) if norm > 0 < signal else 1.0


def pairs(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of a_j · b_k over j ≠ k."""
    count = len(a)
    return float((a.sum(0) @ b.sum(0) - (a * b).sum()) / (count * (count - 1)))


def vcpo(world: LearnedWorld, drawn: SampledGroups) -> tuple[np.ndarray, float]:
    """Returns the mean gradient with VCPO's baseline, and √ESS of the unbounded sequence weights."""
    tables = (world.train - world.rollout)[drawn.contexts, drawn.tokens]
    ratio = np.exp(np.where(drawn.mask, tables, 0.0).sum(1))
    scores = world.group_gradients(NONE, replace(drawn, advantages=np.ones(len(ratio))), 1)
    # Rewards are 0 or 1. In a group with equal rewards, RLOO's advantages are 0, and so are these.
    rewards = (drawn.advantages > 0).astype(float).reshape(-1, N)
    share = (ratio**2 * (scores**2).sum(1)).reshape(-1, N)
    baseline = (share * rewards).sum(1, keepdims=True) / share.sum(1, keepdims=True)
    centred = replace(drawn, advantages=(rewards - baseline).ravel())
    ess = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    return world.group_gradients(VCPO, centred, N).mean(0), float(np.sqrt(ess))


def run(name: str, rate: float, staleness: int, seed: int, steps: int) -> float:
    """Mean expected reward over the run."""
    world = LearnedWorld(seed, "noise", 0.0, HORIZON, needed=NEEDED, learned=0.0)
    logits = world.train
    past: deque[np.ndarray] = deque([logits], maxlen=staleness + 1)
    first, second = np.zeros_like(logits), np.zeros_like(logits)
    gauge, scores, updates, waits = Gauge(), [], 0, False
    means: dict[str, CandidateMoments] = {}
    choice, last_wait = AutoChoice(), 0
    for step in range(steps):
        scores.append(world.expected(logits)[0])
        if waits:
            past.clear()
            past.append(logits)
            waits = False
            continue
        world.train, world.rollout = log_softmax(logits, -1), log_softmax(past[0], -1)
        drawn = world.sample(N, GROUPS, draw=(seed, step))
        factor = 1.0
        if name.startswith("auto"):
            found = gauge.observe(world, drawn)
            chosen = min(RULES, key=gauge.error)
            gradient, cosine = found[chosen].mean(0), gauge.cosine(chosen)
            factor = cosine if name.endswith("rate") else 1.0
            waits = name.endswith("staleness") and cosine < 0.5
        elif name == BUILT:
            exact = torch.from_numpy(world.group_gradients(EXACT, drawn, N))
            found = {key: world.group_gradients(rule, drawn, N) for key, rule in CHOICES.items()}
            gradient, factor = found[choice.name].mean(0), choice.lr_scale
            batch = {key: CandidateMoments.of(torch.from_numpy(used), exact) for key, used in found.items()}
            means = averaged(means, batch)
            choice = choose(means, GROUPS, choice)
            waits = choice.lr_scale < TOO_OLD and step + 1 - last_wait > staleness
            last_wait, means = (step + 1, {}) if waits else (last_wait, means)
        elif name == "VCPO":
            gradient, factor = vcpo(world, drawn)
        else:
            gradient = world.group_gradients(RULES.get(name, P3O), drawn, N).mean(0)
        gradient, updates = gradient.reshape(logits.shape), updates + 1
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        size = np.sqrt(second / (1 - 0.99**updates)) + 1e-8
        logits = logits + rate * factor * first / (1 - 0.9**updates) / size
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

    def score(name: str, rate: float, staleness: int, seed: int) -> float:
        key = (name, rate, staleness, seed, options.steps)
        if key not in known:
            known[key] = run(*key)
            with options.file.open("a") as file:
                file.write(json.dumps([*key, known[key]]) + "\n")
        return known[key]

    names, sides = (*RULES, *ADAPTING), {}
    for staleness in STALENESS:
        tuned = {
            (name, rate): float(np.mean([score(name, rate, staleness, seed) for seed in TUNING]))
            for name in names
            for rate in RATES
        }
        rates = {name: max(RATES, key=lambda rate: tuned[name, rate]) for name in names}
        best = max(RULES, key=lambda name: tuned[name, rates[name]])
        sides[staleness] = rates, best
    seeds = range(len(TUNING), len(TUNING) + options.seeds)
    found = {
        (name, staleness): np.array(
            [score(name, sides[staleness][0][name], staleness, seed) for seed in seeds]
        )
        for staleness in STALENESS
        for name in names
    }
    regret = {
        (name, staleness): found[sides[staleness][1], staleness] - scores
        for (name, staleness), scores in found.items()
    }
    print(f"| | {' | '.join(f'{staleness} behind' for staleness in STALENESS)} | worst case |")
    print("|---" * (2 + len(STALENESS)) + "|")
    best = [f"`{sides[s][1]}` {found[sides[s][1], s].mean():.3f}" for s in STALENESS]
    print(f"| best fixed, its score | {' | '.join(best)} | |")
    for name in names:
        cells = [f"{interval(regret[name, s])} at {sides[s][0][name]:g}" for s in STALENESS]
        worst = max(regret[name, s].mean() for s in STALENESS)
        print(f"| `{name}` | {' | '.join(cells)} | {worst:+.3f} |")


if __name__ == "__main__":
    main()
