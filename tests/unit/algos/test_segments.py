"""Columns of which an episode's turns alternate between its sequences."""

from __future__ import annotations

import pytest
import torch

from rlctl.algos.correction import correct
from rlctl.algos.rules import CorrectionRules, WeightRule
from rlctl.algos.segments import Segments, Units

#: Turns of two episodes: the first has the sequences (0, 0, 2) and (1, 3, 3), the second only one.
TURNS = torch.tensor([0, 0, 2, 1, 3, 3, 0, 1])
IN_TIME = [0, 1, 3, 2, 4, 5, 6, 7]
VALUES = torch.tensor([1.0, 2.0, 8.0, 4.0, 16.0, 32.0, 64.0, 128.0])


@pytest.fixture
def units() -> Units:
    return Units.nested(Segments(torch.tensor([3, 3, 2])), Segments(torch.tensor([6, 2])), TURNS)


def test_an_episode_is_read_in_the_order_of_sampling(units: Units) -> None:
    assert units.episode.padded(VALUES).tolist() == [[1, 2, 4, 8, 16, 32], [64, 128, 0, 0, 0, 0]]
    assert units.episode.cumsum(VALUES).tolist() == [1, 3, 15, 7, 31, 63, 64, 192]
    assert torch.equal(units.episode.flat(units.episode.padded(VALUES)), VALUES)
    assert units.sequence.cumsum(VALUES).tolist() == [1, 3, 11, 4, 20, 52, 64, 192]
    assert units.turn.lengths.tolist() == [2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("seed", range(8))
def test_of_some_entries_the_order_stays(units: Units, seed: int) -> None:
    mask = torch.rand(len(TURNS), generator=torch.Generator().manual_seed(seed)) < 0.5
    found = units.kept(mask).episode.cumsum(VALUES[mask])
    in_time = torch.tensor(IN_TIME)
    plain = Segments(torch.tensor([6, 2])).kept(mask[in_time]).cumsum(VALUES[in_time][mask[in_time]])
    assert sorted(found.tolist()) == plain.tolist()  # running sums of positive values ascend
    assert torch.equal(found, plain[torch.argsort(torch.argsort(VALUES[mask]))])


def test_prefix_weights_are_those_of_the_order_of_sampling(units: Units) -> None:
    draw = torch.Generator().manual_seed(3)
    log_probs, rollout = (-torch.rand(len(TURNS), generator=draw) for _ in range(2))
    rules = CorrectionRules(WeightRule("prefix", "truncate", upper=1e9), unit="episode")
    gap = (log_probs - rollout).double()[IN_TIME]
    expected = torch.cat([gap[:6].cumsum(0), gap[6:].cumsum(0)]).exp()
    found = correct(log_probs, rollout, units, rules).weights[IN_TIME]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.0)


def test_every_token_by_itself_is_as_segments_of_one_entry(units: Units) -> None:
    plain = Segments(torch.ones(len(TURNS), dtype=torch.int64))
    flags = VALUES > 4
    assert torch.equal(units.token.lengths, plain.lengths)
    for name in ("sum", "mean", "max", "cumsum", "padded", "spread"):
        values = getattr(units.token, name)(VALUES)
        expected = getattr(plain, name)(VALUES)
        assert torch.equal(values, expected), name
        assert values.dtype == expected.dtype, name
    assert torch.equal(units.token.any(flags), plain.any(flags))
    assert torch.equal(units.token.kept(flags).lengths, plain.kept(flags).lengths)
    assert [units.token.total, len(units.token)] == [plain.total, len(plain)]
    for name in ("starts", "index", "places"):
        assert torch.equal(getattr(units.token, name), getattr(plain, name)), name


def test_token_weights_keep_no_index_of_the_tokens() -> None:
    """Two columns of int64 were half of the memory that a correction at token level needs."""
    units = Units.of_responses(torch.tensor([3, 5]))
    assert units.token.lengths.untyped_storage().nbytes() == 8
    rules = CorrectionRules(WeightRule("token", "truncate", upper=2.0))
    correct(-torch.ones(8), -torch.ones(8), units, rules)
    assert "index" not in vars(units.sequence)
