import numpy as np
import pytest

from rlctl.diagnose.signals import crossing, longest_true, rolling_median, spikes
from rlctl.diagnose.table import Series
from rlctl.diagnose.thresholds import Levels

LEVELS = Levels("some/key", (("info", 1.0), ("critical", 2.0)), "a test")


def series(values, first=1):
    return Series(np.arange(first, first + len(values)), np.asarray(values, dtype=float))


def test_rolling_median_is_the_plain_one():
    values = np.random.default_rng(0).normal(size=50)
    expected = [np.median(values[i : i + 7]) for i in range(44)]
    np.testing.assert_array_equal(rolling_median(values, 7), expected)


def test_the_worst_level_and_where_it_was():
    found = crossing(series([0.0] * 20 + [3.0] * 20 + [1.5] * 20), LEVELS)
    assert (found.severity, found.limit, found.worst) == ("critical", 2.0, 3.0)
    assert not found.lasts
    # A window counts once its median is beyond: from half a window before to half a window after.
    assert 16 <= found.first_step <= 20
    assert 40 <= found.last_step <= 45
    assert crossing(series([0.0] * 20 + [1.5] * 20), LEVELS).lasts


def test_floors_and_absolute_values():
    floor = Levels("some/key", (("warning", -1.0),), "a test", is_floor=True)
    assert crossing(series([-2.0] * 10), floor).worst == -2.0
    assert crossing(series([0.0] * 10), floor) is None
    either = Levels("some/key", (("warning", 1.0),), "a test", absolute=True)
    assert crossing(series([-2.0] * 10), either).worst == 2.0


@pytest.mark.parametrize("count", [0, 1, 4])
def test_too_few_steps_cross_nothing(count):
    assert crossing(series([9.0] * count), LEVELS) is None


def test_spikes_in_noise_are_found_at_their_steps():
    values = np.random.default_rng(0).lognormal(0.0, 0.3, 500)
    assert len(spikes(series(values))) == 0
    values[[100, 321]] = 20.0
    assert spikes(series(values, first=11)).steps.tolist() == [111, 332]


def test_a_short_series_has_no_spikes():
    assert len(spikes(series([1.0] * 19 + [99.0]))) == 0
    assert spikes(series([1.0] * 20 + [99.0])).steps.tolist() == [21]


def test_longest_true():
    assert longest_true(np.array([True, False, True, True, False])) == (2, 2)
    assert longest_true(np.zeros(3, dtype=bool)) == (0, 0)
    assert longest_true(np.zeros(0, dtype=bool)) == (0, 0)
