"""Estimators per response against the slow reference, and on cases worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs, Estimate, gae_recursion, has_spread, reward_to_go
from rlctl.algos.estimators import estimate as advantages_of
from rlctl.algos.segments import Segments, Units
from rlctl.errors import RunFailure
from rlctl.registry import ADVANTAGE_ESTIMATORS
from tests.properties.batches import advantage_inputs, estimate
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
    """Members that were not graded are missing from the batch."""
    scores, groups, valid = make_scores(seed)
    plain = (scores.tolist(), groups.tolist(), valid.tolist())
    lengths = torch.randint(1, 9, scores.shape, generator=torch.Generator().manual_seed(seed))
    graded = (scores[valid], groups[valid])
    by_length = reference.opo(plain[0], lengths.tolist(), *plain[1:])
    pairs = [
        (estimate("opo", *graded, lengths[valid]), by_length),
        (estimate("rloo", *graded), reference.rloo(*plain)),
        (estimate("grpo", *graded), reference.grpo(*plain)),
        (estimate("dr_grpo", *graded), reference.grpo(*plain, divide_by_std=False)),
        (estimate("maxrl", *graded), reference.maxrl(*plain)),
        (estimate("gpg", *graded), reference.gpg(*plain)),
    ]
    for found, expected in pairs:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected)[valid], rtol=1e-5, atol=1e-6)
    flat, all_of_them = reference.zero_spread(*plain)
    assert len(set(graded[1][has_spread(*graded)].tolist())) == all_of_them - flat


def test_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])
    assert estimate("rloo", scores, groups).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    std = (1 / 3) ** 0.5
    assert estimate("grpo", scores, groups).tolist() == pytest.approx(
        [0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std], rel=1e-5
    )


GROUP_ESTIMATORS = [
    *ESTIMATORS,
    "opo",
    "maxrl",
    "gpg",
    "optimal_token_baseline",
    "off_policy_optimal_baseline",
]


def group_estimate(name: str, scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """(M,) with what only some estimators read, drawn at random."""
    generator = torch.Generator().manual_seed(len(scores))
    norms = torch.rand(int(lengths.sum()), generator=generator)
    weights = torch.rand(len(scores), generator=generator)
    given = advantage_inputs(scores, groups, lengths, score_norms=norms, sequence_weights=weights)
    return advantages_of(name, given).advantages


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_no_signal_where_nothing_can_be_compared(name: str) -> None:
    scores, groups = (
        torch.tensor([0.1, 0.1, 0.1, 5.0, 3.0]),
        torch.tensor([0, 0, 0, 1, 2]),
    )  # no spread; alone
    lengths = torch.full((5,), 3)
    assert group_estimate(name, scores, groups, lengths).tolist() == [0.0] * 15
    assert not has_spread(scores, groups).any()


@pytest.mark.parametrize("n", range(2, 12))
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_scores_give_exactly_zero(name: str, n: int) -> None:
    """The mean of equal numbers differs from them by rounding, which is no learning signal."""
    groups = torch.arange(3).repeat_interleave(n)
    scores = torch.tensor([0.1, 1e-8, 123.4]).repeat_interleave(n)
    lengths = torch.arange(3 * n) % 5 + 1
    if name == "optimal_token_baseline":  # the tail of the only longest response keeps its return
        lengths = torch.full_like(lengths, 5)
    assert (group_estimate(name, scores, groups, lengths) == 0.0).all()
    assert not has_spread(scores, groups).any()


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0, 1e4])
def test_the_smallest_spread_that_scores_can_have_is_a_signal(size: float) -> None:
    """Equal scores give exactly 0; adjacent float32 values do not."""
    score = torch.tensor(size)
    scores = torch.stack([score, score, torch.nextafter(score, 2 * score)])
    groups = torch.zeros(3, dtype=torch.int64)
    spread = scores.double().std().item()
    expected = (scores.double() - scores.double().mean()) / (spread + 1e-6)
    torch.testing.assert_close(estimate("grpo", scores, groups).double(), expected, rtol=1e-4, atol=0.0)
    assert has_spread(scores, groups).all()
    for name in ESTIMATORS:
        assert (estimate(name, scores, groups) != 0.0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(5))
def test_groups_are_ids_not_places_and_advantages_sum_to_zero(name: str, seed: int) -> None:
    scores, groups, valid = make_scores(seed)
    scores, groups = scores[valid], groups[valid]
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    found = estimate(name, scores, groups)
    torch.testing.assert_close(estimate(name, scores[order], groups[order]), found[order])
    for group in groups.unique():
        assert found[groups == group].sum().item() == pytest.approx(0.0, abs=1e-4)
    torch.testing.assert_close(estimate(name, scores + 3.0, groups), found, rtol=1e-3, atol=2e-3)


def test_opo_weighs_by_length() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 0.1, 0.1]), torch.tensor([0, 0, 1, 1])
    assert estimate("opo", scores, groups, torch.tensor([3, 1, 7, 2])).tolist() == [0.25, -0.75, 0.0, 0.0]
    assert estimate("opo", scores[:2], groups[:2], torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_remax_compares_with_the_greedy_response() -> None:
    scores, greedy = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.5])
    found = estimate("remax", scores, torch.zeros(2, dtype=torch.int64), baseline_scores=greedy)
    assert found.tolist() == [0.0, -0.5]


# --- episodes of several turns and sequences -----------------------------------------------------------
OTHERS = [name for name in ADVANTAGE_ESTIMATORS if ADVANTAGE_ESTIMATORS.part(name).params is None]


def episodes(**more: Any) -> AdvantageInputs:
    """Three episodes of 5, 2 and 4 tokens with a reward at every token."""
    draw = torch.Generator().manual_seed(1)
    columns = {name: torch.randn(11, generator=draw) for name in ("token_rewards", "values")}
    given = {
        "units": Units.of_responses(torch.tensor([5, 2, 4])),
        "group_ids": torch.tensor([4, 4, 4]),
        "gamma": 0.9,
        "lam": 0.7,
        "divide_by_std": True,
        "baseline_scores": torch.rand(3, generator=draw),
        "score_norms": torch.rand(11, generator=draw),
        "sequence_weights": torch.rand(3, generator=draw),
    }
    together = columns | given | more
    unit: Any = together["units"]
    return AdvantageInputs(rewards=unit.episode.sum(together["token_rewards"]), **together)


@pytest.mark.parametrize("name", OTHERS)
def test_the_split_of_an_episode_into_sequences_changes_nothing(name: str) -> None:
    whole = advantages_of(name, episodes())
    episode = episodes().unit
    for lengths in ([5, 2, 1, 3], [2, 3, 1, 1, 4], [1] * 11):
        split = Segments(torch.tensor(lengths))
        found = advantages_of(name, episodes(units=Units(split, split, episode)))
        assert torch.equal(found.advantages, whole.advantages)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl", "gpg", "remax"])
def test_the_reward_of_an_episode_is_the_sum_over_its_tokens(name: str) -> None:
    given = episodes()
    scores = given.unit.sum(given.token_rewards)
    last = given.unit.places == given.unit.spread(given.unit.lengths) - 1
    at_the_end = torch.where(last, given.unit.spread(scores), 0.0)
    wanted = advantages_of(name, replace(given, token_rewards=at_the_end)).advantages
    torch.testing.assert_close(advantages_of(name, given).advantages, wanted)


def test_per_turn_a_discount_applies_between_turns_only() -> None:
    """Turns of 2, 2 and 1 tokens: what follows a turn counts γ, however long the turns are."""
    turns = Units(Segments(torch.tensor([2, 2, 1])), *(Segments(torch.tensor([5])) for _ in range(2)))
    rewards, values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), torch.tensor([0.5, 1.5, -1.0, 2.0, 3.0])
    given = replace(
        episodes(), token_rewards=rewards, values=values, units=turns, group_ids=torch.tensor([0])
    )
    given = replace(given, gamma=0.5, lam=0.25)
    gamma, lam = replace(given, gamma_per="turn").discounts
    assert gamma.tolist()[1:] == [1.0, 0.5, 1.0, 0.5]
    assert lam.tolist()[1:] == [1.0, 0.25, 1.0, 0.25]
    returns = reward_to_go(rewards, turns.episode, gamma)
    assert returns.tolist() == [13.0, 12.0, 20.0, 16.0, 16.0]
    advantages, targets = gae_recursion(rewards, values, turns.episode, gamma, lam)
    expected = [0.0] * 6
    for t in reversed(range(5)):  # the definition, one token at a time
        following = values[t + 1].item() if t < 4 else 0.0
        discount, trace = (0.5, 0.25) if t in (1, 3) else (1.0, 1.0)
        expected[t] = rewards[t].item() + discount * following - values[t].item()
        expected[t] += discount * trace * expected[t + 1]
    assert advantages.tolist() == pytest.approx(expected[:5])
    torch.testing.assert_close(targets, advantages + values)
    per_token = advantages_of("gae", given)
    for name in ("gae", "reinforce_plus_plus"):
        found = advantages_of(name, replace(given, gamma_per="turn")).advantages
        assert not torch.allclose(found, advantages_of(name, given).advantages)
    one_each = Units(Segments(torch.ones(5, dtype=torch.int64)), *(turns.sequence, turns.episode))
    same = advantages_of("gae", replace(given, units=one_each, gamma_per="turn"))
    torch.testing.assert_close(same.advantages, per_token.advantages)
    torch.testing.assert_close(same.returns, per_token.returns)


# --- what an estimator may return ----------------------------------------------------------------------
def returning(found: object, needs: frozenset[str] = frozenset()) -> Estimate:
    """What training makes of an estimator that returns `found` for three episodes of 11 tokens."""
    name = "returns_something"
    try:
        ADVANTAGE_ESTIMATORS.register(name, needs=needs)(lambda inputs: found)
        return advantages_of(name, episodes())
    finally:
        ADVANTAGE_ESTIMATORS._parts.pop(name, None)


def test_one_advantage_per_episode_is_that_of_its_tokens() -> None:
    found = returning(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).advantages
    assert found.tolist() == [1.0] * 5 + [2.0] * 2 + [3.0] * 4
    assert found.dtype == torch.float32
    assert torch.equal(returning(Estimate(torch.arange(11.0))).advantages, torch.arange(11.0))


@pytest.mark.parametrize(
    ("found", "needs", "words"),
    [
        (None, (), "returned NoneType, not a tensor"),
        (torch.zeros(3, 5), (), r"shape \(3, 5\)"),
        (torch.zeros(11), (), r"shape \(11,\)"),
        (Estimate(torch.zeros(3)), (), r"shape \(3,\)"),
        (Estimate(torch.zeros(11), torch.zeros(3)), (), "returns"),
        (torch.zeros(3), ("values",), "no target values"),
        (torch.tensor([0.0, float("nan"), float("inf")]), (), "infinite advantages to 2 episodes"),
    ],
)
def test_anything_else_is_refused(found: object, needs: tuple[str, ...], words: str) -> None:
    with pytest.raises(RunFailure, match=words):
        returning(found, frozenset(needs))


@pytest.mark.parametrize(
    "name", ["token_level_rewards", "response_mask", "valid", "valid_mask", "whiten", "total"]
)
def test_what_an_estimator_of_padded_tensors_reads_is_a_clear_error(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute {name}: .*docs/how-to/extend.md"):
        getattr(episodes(), name)
