"""Up to which length products of ratios are useful: the formula, and the prefixes of sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlctl.algos.usable_length import PrefixSums, usable_length


@pytest.mark.parametrize("chi2", [0.001, 0.05, 0.5, 3.0])
def test_independent_tokens_keep_half_of_the_sample_at_this_length(chi2: float) -> None:
    """Enumerated: ρ is 1 ± √χ², so that E[ρ] = 1 and E[ρ²] = 1 + χ²; E[(Π ρ)²] over all sequences."""
    a = math.sqrt(chi2)
    length = usable_length(chi2)
    assert (0.5 * (1 + a) ** 2 + 0.5 * (1 - a) ** 2) ** length == pytest.approx(2.0)


def test_small_gaps_follow_the_variance() -> None:
    sigma = 0.02
    assert usable_length(math.expm1(sigma**2)) == pytest.approx(math.log(2) / sigma**2)
    assert usable_length(0.0) == math.inf
    with pytest.raises(ValueError, match="NaN"):
        usable_length(math.nan)


@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_prefixes_of_independent_tokens_agree_with_the_formula(sigma: float) -> None:
    draw = np.random.default_rng(1)
    sums = PrefixSums()
    for _ in range(20):
        logs = sigma * draw.normal(size=(500, 512)) - sigma**2 / 2
        sums.add(logs.ravel(), np.full(500, 512))
    found = sums.result()
    assert found.predicted == pytest.approx(math.log(2) / sigma**2, rel=0.1)
    for prefix in found.prefixes:
        if prefix.length < found.predicted / 2:
            assert prefix.ess == pytest.approx(math.exp(-(sigma**2) * prefix.length), abs=0.1)
    assert found.measured <= found.predicted * 2
    assert found.is_exceeded is (found.predicted < 512)


def test_equal_shifts_within_a_sequence_are_seen_by_prefixes_only() -> None:
    """Tokens that move together: the formula for independent ones promises too much."""
    draw = np.random.default_rng(2)
    shifts = 0.05 * draw.normal(size=(2000, 1))
    sums = PrefixSums()
    sums.add(np.repeat(shifts, 256, 1).ravel(), np.full(2000, 256))
    found = sums.result()
    assert found.predicted > 200
    assert found.measured < 64
    assert "as measured on prefixes" in found.text


def test_the_weights_before_a_token_are_those_of_its_prefix() -> None:
    sums = PrefixSums()
    rows = [[0.1 * k, -0.2, 0.3][: 2 + k % 2] for k in range(40)]
    rows.append([math.nan, 0.1])
    sums.add(np.concatenate(rows), np.array([len(row) for row in rows]))
    found = {prefix.length: prefix for prefix in sums.result().prefixes}
    weights = np.exp([row[0] + row[1] for row in rows[:40]])
    assert found[2].num_sequences == 40
    assert found[2].ess == pytest.approx(weights.sum() ** 2 / (40 * (weights**2).sum()))
    assert sums.result().typical in (2, 3)
    assert PrefixSums().result() is None
