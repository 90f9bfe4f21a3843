"""Advantages the slow way: one response at a time, plain Python."""

from __future__ import annotations

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
