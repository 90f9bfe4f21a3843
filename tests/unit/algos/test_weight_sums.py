"""Weights of several tokens are sums of log-ratios as they are; the sum alone is clamped before exp."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.algos.correction import correct
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import Segments, Units

#: Log-ratios of two episodes: the first of two sequences, of which the first has two turns.
TURNS = [[[[25.0, -24.0], [0.5]], [[-26.0, 25.5, 0.25]]], [[[-0.125, 22.0], [-30.0, 8.5]]]]


def units_of(turns: list[list[list[list[float]]]]) -> Units:
    """The segments of nested lists."""
    sequences = [sequence for episode in turns for sequence in episode]
    lengths = (
        [len(turn) for sequence in sequences for turn in sequence],
        [sum(map(len, sequence)) for sequence in sequences],
        [sum(len(turn) for sequence in episode for turn in sequence) for episode in turns],
    )
    return Units(*(Segments(torch.tensor(each)) for each in lengths))


def flat(nested: list) -> list[float]:
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]


def clamped_exp(value: float) -> float:
    return math.exp(min(max(value, -LOG_RATIO_CLAMP), LOG_RATIO_CLAMP))


def spread(parts: list) -> list[float]:
    """Of each part the sum, at each of its tokens."""
    return [sum(flat(part)) for part in parts for _ in flat(part)]


SEQUENCES = [sequence for episode in TURNS for sequence in episode]
EXPECTED = {
    "token": flat(TURNS),
    "turn": spread([turn for sequence in SEQUENCES for turn in sequence]),
    "sequence": spread(SEQUENCES),
    "episode": spread(TURNS),
    "geometric": [sum(flat(s)) / len(flat(s)) for s in SEQUENCES for _ in flat(s)],
    "prefix": [sum(flat(s)[: place + 1]) for s in SEQUENCES for place in range(len(flat(s)))],
}


@pytest.mark.parametrize("level", EXPECTED)
def test_a_weight_is_the_clamped_sum(level: str) -> None:
    units, gaps = units_of(TURNS), torch.tensor(flat(TURNS))
    rollout = torch.full_like(gaps, -1.0)
    rules = CorrectionRules(WeightRule(level, "truncate", upper=1e12, normalize=False), unit="sequence")
    found = correct(rollout + gaps, rollout, units, rules).weights
    assert found.tolist() == pytest.approx([clamped_exp(value) for value in EXPECTED[level]], rel=1e-4)


@pytest.mark.parametrize("scope", ["turn", "sequence", "episode"])
def test_a_ratio_of_a_scope_is_that_of_the_sum(scope: str) -> None:
    """Whatever is above 1 is rejected."""
    units, gaps = units_of(TURNS), torch.tensor(flat(TURNS))
    rollout = torch.full_like(gaps, -1.0)
    rule = RejectRule("ratio", "ratio", "sum", None, 1.0, scope)
    rules = CorrectionRules(WeightRule(None, "truncate", upper=2.0), (rule,), unit="sequence")
    keep = correct(rollout + gaps, rollout, units, rules).keep
    assert keep.tolist() == [value <= 0.0 for value in EXPECTED[scope]]
