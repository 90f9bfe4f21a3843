"""Mixtures of sources by weight: shares, coverage, order."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.data.mixture import MixedSource, PromptMixture, shares
from rlctl.errors import UsageError

THREE = PromptMixture(
    (MixedSource("a.parquet", 70, 0.5), MixedSource("data/b.csv", 25, 0.3), MixedSource("c", 5, 0.2))
)


def drawn(mixture, epochs, **options):
    options = {"seed": 3, "shuffle": True} | options
    return [mixture.row_at(position, **options) for position in range(epochs * mixture.size)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_the_shares_exactly(shuffle):
    rows = drawn(THREE, 6, shuffle=shuffle)
    for epoch in range(6):
        of_epoch = Counter(map(THREE.source_of, rows[epoch * 100 : (epoch + 1) * 100]))
        assert of_epoch == {0: 50, 1: 30, 2: 20}


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_uses_all_its_rows_before_it_repeats_one(shuffle):
    rows = drawn(THREE, 7, shuffle=shuffle)
    for source, size in enumerate((70, 25, 5)):
        own = [row for row in rows if THREE.source_of(row) == source]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size


def test_the_order_depends_on_seed_and_position_alone():
    rows = drawn(THREE, 3)
    assert [THREE.row_at(position, seed=3, shuffle=True) for position in reversed(range(300))] == rows[::-1]
    assert drawn(THREE, 3, seed=4) != rows
    assert rows[:100] != rows[100:200]
    assert [row for row in drawn(THREE, 1, shuffle=False) if row < 70] == list(range(50))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 5000))
def test_shares_are_within_one_of_the_exact_ones(weights, size):
    found = shares(tuple(weights), size)
    total = sum(map(Fraction, weights))
    assert sum(found) == size
    assert all(
        abs(count - Fraction(w) / total * size) < 1 + 1e-6 for count, w in zip(found, weights, strict=True)
    )


def test_an_empty_part_and_a_share_below_one_prompt_are_errors():
    with pytest.raises(UsageError, match="no prompt of this part") as caught:
        PromptMixture((MixedSource("a", 10, 1.0), MixedSource("b.csv", 0, 1.0)))
    assert caught.value.where == "data.train_files: b.csv"
    with pytest.raises(UsageError, match="none of the 11 prompts of an epoch") as caught:
        PromptMixture((MixedSource("a", 10, 1.0), MixedSource("b.csv", 1, 1e-3)))
    assert caught.value.where == "data.train_files: b.csv"
