"""Advantages the slow way: one response, or one token, at a time, plain Python."""

from __future__ import annotations

import itertools
import math
import statistics


def siblings(index: int, groups, valid) -> list[int]:
    """Valid responses to the same prompt, `index` itself included if valid."""
    return [j for j, group in enumerate(groups) if group == groups[index] and valid[j]]


def rloo(scores, groups, valid) -> list[float]:
    found = []
    for i, score in enumerate(scores):
        others = [scores[j] for j in siblings(i, groups, valid) if j != i]
        found.append(score - statistics.fmean(others) if valid[i] and others else 0.0)
    return found


def grpo(scores, groups, valid, *, divide_by_std=True) -> list[float]:
    found = []
    for i, score in enumerate(scores):
        members = [scores[j] for j in siblings(i, groups, valid)]
        if not valid[i] or len(members) < 2 or max(members) == min(members):
            found.append(0.0)
            continue
        centred = score - statistics.fmean(members)
        found.append(centred / (statistics.stdev(members) + 1e-6) if divide_by_std else centred)
    return found


def zero_spread(scores, groups, valid) -> tuple[int, int]:
    """Groups whose valid rewards do not differ, and groups."""
    names = set(groups)
    members = {
        g: {s for s, of, ok in zip(scores, groups, valid, strict=True) if of == g and ok} for g in names
    }
    return sum(len(values) < 2 for values in members.values()), len(names)


def opo(scores, lengths, groups, valid) -> list[float]:
    found = []
    for i, score in enumerate(scores):
        # Each token of the group brings its response's score along: the baseline is their mean.
        tokens = [scores[j] for j in siblings(i, groups, valid) for _ in range(lengths[j])]
        comparable = valid[i] and len(siblings(i, groups, valid)) > 1 and tokens
        found.append(score - statistics.fmean(tokens) if comparable else 0.0)
    return found


def best_constant(scores, weights, groups, valid) -> list[float]:
    """The score minus the b for which Σ c·(r − b)² over the group is least, by bisection of its slope."""
    found = []
    for i, score in enumerate(scores):
        group = [(scores[j], weights[j]) for j in siblings(i, groups, valid)]
        low, high = min((r for r, _ in group), default=0.0), max((r for r, _ in group), default=0.0)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(c * (r - middle) for r, c in group) > 0 else (low, middle)
        found.append(score - low if valid[i] and len(group) > 1 else 0.0)
    return found


def gae(rewards, values, mask, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """One sequence: every advantage is its own sum over the later TD errors."""
    places = [t for t, yes in enumerate(mask) if yes]
    r, v = [rewards[t] for t in places], [values[t] for t in places] + [0.0]
    errors = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(places))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(places):
        advantages[t] = sum((gamma * lam) ** (j - i) * errors[j] for j in range(i, len(places)))
        returns[t] = advantages[t] + v[i]
    return advantages, returns


def reward_to_go(rewards, mask, gamma: float) -> list[float]:
    places = [t for t, yes in enumerate(mask) if yes]
    found = [0.0] * len(mask)
    for i, t in enumerate(places):
        found[t] = sum(gamma**k * rewards[later] for k, later in enumerate(places[i:]))
    return found


def optimal_token_baseline(rewards, mask, groups, valid, log_probs, sum_pi_squared) -> list[list[float]]:
    """All sequences; W and G are summed up anew for every token."""
    horizon = len(mask[0])

    def energy(row: int, t: int) -> float:
        places = [j for j in range(t + 1) if mask[row][j]]
        return sum(1 - 2 * math.exp(log_probs[row][j]) + sum_pi_squared[row][j] for j in places)

    def gain(row: int, t: int) -> float:
        return sum(rewards[row][j] for j in range(t, horizon) if mask[row][j])

    found = [[0.0] * horizon for _ in mask]
    for row, t in itertools.product(range(len(mask)), range(horizon)):
        family = siblings(row, groups, valid)
        if not (mask[row][t] and valid[row]) or len(family) < 2:
            continue
        alive = [other for other in family if mask[other][t]]
        baseline = 0.0
        if len(alive) > 1:
            total = sum(energy(other, t) for other in alive)
            baseline = sum(gain(other, t) * energy(other, t) for other in alive) / total
        found[row][t] = gain(row, t) - baseline
    return found


def whitened(values: list[float]) -> list[float]:
    """All tokens of the batch."""
    spread = statistics.variance(values) if len(values) > 1 else 0.0
    return [(value - statistics.fmean(values)) / math.sqrt(spread + 1e-8) for value in values]


def maxrl(rewards, groups, valid):
    """(r − mean) / mean; 0 without siblings or where the mean is not positive."""
    found = []
    for reward, group, counts in zip(rewards, groups, valid, strict=True):
        members = [r for r, g, v in zip(rewards, groups, valid, strict=True) if v and g == group]
        mean = sum(members) / len(members) if members else 0.0
        found.append((reward - mean) / mean if counts and len(members) > 1 and mean > 0 else 0.0)
    return found


def gpg(rewards, groups, valid):
    """Dr. GRPO times (graded responses) / (those whose reward is not 0)."""
    paid = sum(v and r != 0 for r, v in zip(rewards, valid, strict=True))
    return [x * sum(valid) / max(paid, 1) for x in grpo(rewards, groups, valid, divide_by_std=False)]
