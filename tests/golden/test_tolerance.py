"""Stored figures allow the rounding of their sums, on any processor, and nothing larger."""

from __future__ import annotations

import math

import pytest
import torch

from tests.golden.first_updates import KEYS
from tests.golden.tolerance import COMMITS, PROCESSORS, distance

#: Metrics that are sums of terms of either sign, such as log-ratios.
SUMS = [key for key in KEYS if key.endswith(("pg_loss", "kl", "kl_loss"))]


def mean_where_terms_cancel(dtype: torch.dtype) -> float:
    """A mean of terms near 0.5 of either sign, which is near 0."""
    terms = torch.randn(256, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    log_probs = 3.0 + terms - terms.mean() + 1e-6
    return float((log_probs.to(dtype).double() - 3.0).mean())


@pytest.mark.parametrize("key", SUMS)
def test_rounding_of_the_terms_is_no_difference(key: str) -> None:
    exact, rounded = (mean_where_terms_cancel(dtype) for dtype in (torch.float64, torch.float32))
    assert abs(rounded - exact) > PROCESSORS * abs(exact)  # of the figure itself it is a large share
    assert distance(rounded, exact, key) < PROCESSORS


@pytest.mark.parametrize("key", KEYS)
def test_a_few_units_of_the_last_place_are_no_difference(key: str) -> None:
    for size in (1e-5, 1e-3, 0.1, 1.0, 50.0):
        assert distance(size + 4 * 2**-23 * max(size, 0.1), size, key) < PROCESSORS


@pytest.mark.parametrize("key", KEYS)
def test_a_change_of_a_thousandth_is_a_difference(key: str) -> None:
    for size in (1.0, 50.0):
        assert distance(size * 1.001, size, key) > PROCESSORS
        assert distance(-size, size, key) > PROCESSORS


def test_processors_are_allowed_more_than_commits() -> None:
    assert 0.0 < COMMITS < PROCESSORS


def test_figures_of_another_kind_cannot_be_compared() -> None:
    assert distance(None, 1.0, "a") == math.inf
    assert distance(1.0, math.nan, "a") == math.inf
    assert distance(math.nan, math.nan, "a") == 0.0
    assert distance([1.0], [1.0, 1.0], "a") == math.inf
    assert distance([1.0, 0.0], [1.0, 1.0], "a") > PROCESSORS
