"""Compares the correction that `--what-if` recommends with the best one, where the exact error is known.

    python benchmarks/what_if.py [--seeds 11] [--out DIR]

Short: pairs of policies small enough to enumerate every response (`tests/reference/enumerable.py`), so the
error of every setting is exact. Long: responses of 16 and 48 tokens; the reference is a mean over many
sampled groups. In both cases the replay gets only the data that a run dumps. Writes `what_if.md`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.learning import seeds_of
from rlctl.algos.correction import correct
from rlctl.algos.segments import Units
from rlctl.run_spec.algorithm import RolloutCorrectionSpec
from rlctl.what_if.dumps import Step
from rlctl.what_if.replay import replay
from rlctl.what_if.settings import Setting, grid
from tests.reference.enumerable import GROUP, Truth, World

#: Without normalisation, which only scales the gradient. Rules that depend on the sign of
#: the advantage are excluded, because a world's truth is computed for weights independent of the advantage.
SETTINGS = [
    setting
    for setting in grid(RolloutCorrectionSpec(rollout_is_batch_normalize=False))[1:]
    if not any(rule.negative_advantage_only for rule in setting.rules.reject)
]
FIXED = ("none", "token truncate 2.0", "sequence truncate 2.0", "sequence clip 2.0", "sequence, no bound")
MISMATCHES = [
    ("noise", 0.1), ("noise", 0.3), ("noise", 0.8), ("temperature", 0.1), ("temperature", 0.3),
    ("parameters", 0.1), ("parameters", 0.3), ("stale", 1), ("stale", 4),
]  # fmt: skip
DUMPED, BATCHES = (32, 256), (8, 64, 512)
#: Response length in tokens and mismatch size of the long worlds.
LONG = [(16, 0.1), (16, 0.4), (48, 0.1), (48, 0.3)]


class LongWorld:
    """Policies with long responses over a vocabulary of eight tokens.

    The trained policy's logits depend on the prompt and the previous token. The sampling policy's logits also
    contain noise that depends on all previous tokens. Rewards are scaled sums over tokens, or 0 and 1
    (`sparse`).
    """

    vocabulary, prompts, buckets = 8, 2, 4096

    def __init__(self, seed: int, length: int, size: float, reward: str) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.reward = length, reward
        self.logits = rng.normal(size=(self.prompts, self.vocabulary + 1, self.vocabulary)) * 1.2
        self.noise = rng.normal(size=(self.buckets, self.vocabulary)) * size
        self.values = rng.normal(size=(self.prompts, self.vocabulary))

    def draw(
        self, groups: int, seed: int, *, trained: bool
    ) -> tuple[Step, np.ndarray, np.ndarray, np.ndarray]:
        """Samples responses from either policy.

        Returns:
            The step; the tokens (B, T); the trained policy's probabilities (T, B, V); prompts and previous
            tokens (1 + T, B).
        """
        rng = np.random.default_rng(seed)
        q = np.repeat(rng.integers(self.prompts, size=groups), GROUP)
        rows, before = np.arange(len(q)), np.full(len(q), self.vocabulary)
        history, both, ids, seen, policy = q.copy(), [], [], [], []
        for _ in range(self.length):
            train = _log_softmax(self.logits[q, before])
            rollout = _log_softmax(self.logits[q, before] + self.noise[history % self.buckets])
            sums = np.exp(train if trained else rollout).cumsum(1)
            token = (rng.random((len(q), 1)) * sums[:, -1:] > sums).sum(1)
            both.append((train[rows, token], rollout[rows, token]))
            ids.append(token)
            seen.append(before)
            policy.append(np.exp(train))
            history = (history * 31 + token + 7) % (self.buckets * 101)
            before = token
        tokens = np.stack(ids, 1)
        rewards = np.take_along_axis(self.values[q], tokens, 1).mean(1) * np.sqrt(self.length)
        rewards = (rewards > 0.5).astype(float) if self.reward == "sparse" else rewards
        train, rollout = (np.stack(x, 1).astype(np.float32).ravel() for x in zip(*both, strict=True))
        lengths = np.full(len(q), self.length)
        group_ids = np.arange(groups).repeat(GROUP)
        step = Step(1, group_ids, rewards, lengths, rollout, train)
        return step, tokens, np.stack(policy), np.stack([q, *seen])

    def gradients(
        self, step: Step, tokens: np.ndarray, policy: np.ndarray, seen: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """(groups, P): RLOO gradient of each group with (B, T) weights."""
        rewards = step.rewards.reshape(-1, GROUP)
        advantages = (GROUP * rewards - rewards.sum(1, keepdims=True)) / (GROUP - 1)
        found = np.zeros((len(step.rewards), self.prompts, self.vocabulary + 1, self.vocabulary))
        rows, q = np.arange(len(step.rewards)), seen[0]
        for t in range(self.length):
            scale = weights[:, t] * advantages.ravel()
            found[rows, q, seen[t + 1]] -= scale[:, None] * policy[t]
            found[rows, q, seen[t + 1], tokens[:, t]] += scale
        return found.reshape(-1, GROUP, found[0].size).mean(1)

    def truths(self, settings: list[Setting], seed: int, rounds: int, groups: int = 500) -> dict[str, Truth]:
        """Truth of every setting, estimated from many groups; |m|² is corrected for the bias from noise."""
        sums = {s.name: np.zeros(self.logits.size) for s in settings}
        squares = dict.fromkeys(sums, 0.0)
        target, spread = np.zeros(self.logits.size), 0.0
        for turn in range(rounds):
            found = self.draw(groups, seed + 2 * turn, trained=True)
            exact = self.gradients(*found, np.ones((groups * GROUP, self.length)))
            target += exact.sum(0)
            spread += np.square(exact).sum()
            found = self.draw(groups, seed + 2 * turn + 1, trained=False)
            units = Units.of_responses(torch.from_numpy(found[0].lengths))
            pair = [torch.from_numpy(x) for x in (found[0].log_probs, found[0].rollout_log_probs)]
            for setting in settings:
                done = correct(*pair, units, setting.rules)
                weights = done.weights.double()
                each = self.gradients(*found, weights.reshape(-1, self.length).numpy())
                sums[setting.name] += each.sum(0)
                squares[setting.name] += np.square(each).sum()
        count = rounds * groups
        g = target / count
        signal = g @ g - (spread / count - g @ g) / count
        truths = {}
        for name, total in sums.items():
            m = total / count
            noise = squares[name] / count - m @ m
            norm = max(m @ m - noise / count, 1e-12)
            truths[name] = Truth(m @ g, norm, noise, norm - 2 * m @ g + signal, signal)
        return truths


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


DumpedRow = tuple[str, int, int, str, float, float]


def compare(where: str, truths: dict[str, Truth], step: Step, dumped: int) -> Iterator[DumpedRow]:
    """Yields (world, dumped groups, groups per batch, choice, excess over the best setting, best error)."""
    for groups in BATCHES:
        errors = {name: truth.error(groups) for name, truth in truths.items()}
        best = min(errors.values())
        found = replay([step], SETTINGS, groups_per_batch=groups)
        if found.recommended is None:
            continue
        chosen = {"recommended": found.recommended.name} | {name: name for name in FIXED}
        for who, name in chosen.items():
            yield where, dumped, groups, who, errors[name] - best, best


def short(seeds: list[int]) -> Iterator[DumpedRow]:
    kinds, rewards = ("linear", "hidden"), ("random", "sparse", "count")
    for seed, kind, (mismatch, size), reward in itertools.product(seeds, kinds, MISMATCHES, rewards):
        world = World(seed, kind, mismatch, size, reward)
        truths = {setting.name: world.truth(setting.rules) for setting in SETTINGS}
        for dumped in DUMPED:
            yield from compare("short", truths, world.sample(dumped, seed + 1000), dumped)


def long(seeds: list[int]) -> Iterator[DumpedRow]:
    for seed, (length, size), reward in itertools.product(seeds, LONG, ("sum", "sparse")):
        world = LongWorld(seed, length, size, reward)
        truths = world.truths(SETTINGS, seed * 1000, rounds=3)
        for dumped in DUMPED:
            step = world.draw(dumped, seed + 5000, trained=False)[0]
            yield from compare("long", truths, step, dumped)


def table(rows: list[DumpedRow]) -> list[str]:
    """Mean excess per choice; columns per number of dumped groups and batch size, and the worst case."""
    columns = sorted({row[1:3] for row in rows})
    heads = [f"{dumped} dumped, batch {groups}" for dumped, groups in columns]
    lines = [f"| chosen by | {' | '.join(heads)} | worst |", "|---" * (len(heads) + 2) + "|"]
    names = list(dict.fromkeys(row[3] for row in rows))
    for who in names:
        mine = [row for row in rows if row[3] == who]
        cells = [np.mean([row[4] for row in mine if row[1:3] == column]) for column in columns]
        worst = max(row[4] for row in mine)
        text = " | ".join(f"{x:.3f}" for x in [*cells, worst])
        lines.append(f"| {who} | {text} |")
    best = [np.mean([row[5] for row in rows if row[1:3] == c and row[3] == names[0]]) for c in columns]
    return [*lines, f"| error of the best | {' | '.join(f'{x:.3f}' for x in best)} | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("11"), help="1-5 or 1,4,9")
    parser.add_argument("--out", type=Path, default=Path("build/what_if"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name, worlds in (("Short responses, exact truth", short), ("Long responses, sampled truth", long)):
        rows = list(worlds(arguments.seeds))
        lines += [f"### {name}: excess error", "", *table(rows), ""]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "what_if.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
