"""The statistics behind the figures of the documentation."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import holm, mean_interval, p_different, p_not_equivalent
from benchmarks.runs import Outcome
from benchmarks.studies.off_policy_report import pair_table


@pytest.mark.slow
def test_the_interval_covers_as_often_as_it_says() -> None:
    samples = np.random.default_rng(1).normal(3.0, 2.0, (4000, 5))
    covered = [low <= 3.0 <= high for _, low, high in map(mean_interval, samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors


def test_holm_as_in_a_textbook() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert max(holm(dict.fromkeys("abc", 0.9)).values()) == 1.0


def test_holm_keeps_the_chance_of_any_error() -> None:
    """15 true null hypotheses: some adjusted p below 0.05 in at most 5 % of studies."""
    p_values = np.random.default_rng(2).uniform(size=(4000, 15))
    wrong = [min(holm(dict(enumerate(row))).values()) < 0.05 for row in p_values]
    assert np.mean(wrong) == pytest.approx(0.05, abs=0.013)


@pytest.mark.parametrize("mean", [0.0, 0.012, -0.012, 0.03])
def test_equivalent_exactly_when_the_90_percent_interval_is_within_the_margin(mean: float) -> None:
    differences = mean + 0.004 * np.array([-1.2, -0.3, 0.1, 0.4, 1.0])
    low, high = stats.t.interval(0.9, 4, loc=differences.mean(), scale=stats.sem(differences))
    is_within = low > -0.015 and high < 0.015
    assert (p_not_equivalent(differences, 0.015) < 0.05) == is_within


def test_a_difference_that_is_not_found_is_not_equality() -> None:
    differences = [-0.2, 0.1, 0.15, -0.1, 0.05]
    assert p_different(differences) > 0.5
    assert p_not_equivalent(differences, 0.02) > 0.3


def test_seeds_without_any_spread() -> None:
    assert mean_interval([0.25, 0.25]) == (0.25, 0.25, 0.25)
    assert (p_different([0.0, 0.0]), p_different([0.1, 0.1])) == (1.0, 0.0)
    assert (p_not_equivalent([0.01, 0.01], 0.02), p_not_equivalent([0.03, 0.03], 0.02)) == (0.0, 1.0)


def test_pairs_are_named_different_or_equal_by_sign_and_size() -> None:
    rewards = {
        "none": [0.50, 0.52, 0.49, 0.51, 0.50],
        "token TIS": [0.80, 0.83, 0.79, 0.80, 0.81],
        "sequence IS": [0.801, 0.83, 0.79, 0.802, 0.81],
        "decoupled PPO": [0.5, 0.9, 0.7, 0.95, 0.6],
    }
    table = {
        ("staleness 4", method): [Outcome([value], validation=value) for value in values]
        for method, values in rewards.items()
    }
    rows = dict(line[2:].split(" | ", 1) for line in pair_table(table, "staleness 4").splitlines()[2:])
    assert rows["token TIS"].startswith("**+0.302 [")
    assert rows["sequence IS"].split(" | ")[1].endswith(" =")
    none, token, sequence = rows["decoupled PPO"].rstrip(" |").split(" | ")
    assert not any(mark in cell for cell in (none, token, sequence) for mark in ("*", "="))
