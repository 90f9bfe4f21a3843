"""Estimators per response against the slow reference, and on cases worked out by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rlctl.algos.estimators import has_spread, zero_spread_fraction
from tests.properties.batches import estimate
from tests.reference import advantages as reference

ESTIMATORS = ["grpo", "dr_grpo", "rloo"]


def make_scores(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups of unequal size in random order, ids with gaps, some graders failed (score NaN)."""
    draw = random.Random(seed)
    groups = [group for group in (7, 3, 900, 12, 0) for _ in range(draw.randint(1, 6))]
    draw.shuffle(groups)
    kind = draw.choice(["binary", "real", "large"])
    value = {
        "binary": lambda: float(draw.random() < 0.5),
        "real": draw.random,
        "large": lambda: 1e4 + draw.random(),
    }
    scores = [value[kind]() for _ in groups]
    valid = [draw.random() < 0.8 for _ in groups]
    scores = [score if ok else float("nan") for score, ok in zip(scores, valid, strict=True)]
    return torch.tensor(scores), torch.tensor(groups), torch.tensor(valid)


@pytest.mark.parametrize("seed", range(30))
def test_estimators_equal_the_reference(seed: int) -> None:
    scores, groups, valid = make_scores(seed)
    plain = (scores.tolist(), groups.tolist(), valid.tolist())
    lengths = torch.randint(0, 9, scores.shape, generator=torch.Generator().manual_seed(seed))
    by_length = reference.opo(plain[0], lengths.tolist(), *plain[1:])
    pairs = [
        (estimate("opo", scores, groups, valid, lengths), by_length),
        (estimate("rloo", scores, groups, valid), reference.rloo(*plain)),
        (estimate("grpo", scores, groups, valid), reference.grpo(*plain)),
        (estimate("dr_grpo", scores, groups, valid), reference.grpo(*plain, divide_by_std=False)),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    without, all_of_them = zero_spread_fraction(scores, groups, valid)
    assert (without.item(), all_of_them.item()) == pytest.approx(reference.zero_spread(*plain))


def test_by_hand() -> None:
    scores, groups, valid = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]), torch.ones(4) > 0
    assert estimate("rloo", scores, groups, valid).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    std = (1 / 3) ** 0.5
    assert estimate("grpo", scores, groups, valid).tolist() == pytest.approx(
        [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], rel=1e-5
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_signal_where_nothing_can_be_compared(name: str) -> None:
    valid = torch.tensor([True, True, True, True, False, True])
    scores = torch.tensor([0.1, 0.1, 0.1, 5.0, 9.0, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])  # no spread; alone; the sibling's grader failed
    assert estimate(name, scores, groups, valid).tolist() == [0.0] * 6


GROUP_ESTIMATORS = [
    *ESTIMATORS,
    "opo",
    "maxrl",
    "gpg",
    "optimal_token_baseline",
    "off_policy_optimal_baseline",
]


@pytest.mark.parametrize("n", range(2, 12))
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_scores_give_exactly_zero(name: str, n: int) -> None:
    """The mean of equal numbers differs from them by rounding, which is no learning signal."""
    groups, valid = torch.arange(3).repeat_interleave(n), torch.ones(3 * n, dtype=torch.bool)
    scores = torch.tensor([0.1, 1e-8, 123.4]).repeat_interleave(n)
    lengths = torch.arange(3 * n) % 5 + 1
    others = {
        "score_norms": torch.rand(3 * n, 5, generator=torch.Generator().manual_seed(n)),
        "sequence_weights": torch.rand(3 * n, generator=torch.Generator().manual_seed(n)),
    }
    if name == "optimal_token_baseline":  # the tail of the only longest response keeps its return
        lengths = torch.full_like(lengths, 5)
    assert (estimate(name, scores, groups, valid, lengths, **others) == 0.0).all()
    assert zero_spread_fraction(scores, groups, valid)[0].item() == pytest.approx(3.0)


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 1e4])
def test_the_smallest_spread_that_scores_can_have_is_a_signal(size: float) -> None:
    """Equal scores give exactly 0; adjacent float32 values do not."""
    score = torch.tensor(size)
    scores = torch.stack([score, score, torch.nextafter(score, 2 * score)])
    groups, valid = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    spread = scores.double().std().item()
    expected = (scores.double() - scores.double().mean()) / (spread + 1e-6)
    torch.testing.assert_close(
        estimate("grpo", scores, groups, valid).double(), expected, rtol=1e-4, atol=0.0
    )
    assert has_spread(scores, groups, valid).all()
    for name in ESTIMATORS:
        assert (estimate(name, scores, groups, valid) != 0.0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_groups_are_ids_not_places_and_advantages_sum_to_zero(name: str, seed: int) -> None:
    scores, groups, valid = make_scores(seed)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    found = estimate(name, scores, groups, valid)
    torch.testing.assert_close(estimate(name, scores[order], groups[order], valid[order]), found[order])
    for group in groups.unique():
        assert found[groups == group].sum().item() == pytest.approx(0.0, abs=1e-4)
    torch.testing.assert_close(estimate(name, scores + 3.0, groups, valid), found, rtol=1e-3, atol=2e-3)


def test_opo_weighs_by_length() -> None:
    scores, groups, valid = (
        torch.tensor([1.0, 0.0, 9.0, 0.1, 0.1]),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.ones(5) > 0,
    )
    valid[2] = False
    found = estimate("opo", scores, groups, valid, torch.tensor([3, 1, 50, 7, 2]))
    assert found.tolist() == [0.25, -0.75, 0.0, 0.0, 0.0]
    nothing = estimate("opo", scores[:2], groups[:2], valid[:2], torch.tensor([0, 0]))
    assert nothing.tolist() == [0.0, 0.0]
    alone = estimate("opo", scores[1:3], groups[1:3], valid[1:3], torch.tensor([4, 4]))
    assert alone.tolist() == [0.0, 0.0]


def test_remax_compares_with_the_greedy_response() -> None:
    scores, greedy = torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([1.0, 0.5, 0.0])
    graded, groups = torch.tensor([True, True, False]), torch.zeros(3, dtype=torch.int64)
    found = estimate("remax", scores, groups, graded, baseline_scores=greedy)
    assert found.tolist() == [0.0, -0.5, 0.0]
