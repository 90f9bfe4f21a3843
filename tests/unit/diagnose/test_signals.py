import subprocess
import sys

import numpy as np
import pytest
from scipy.ndimage import median_filter
from scipy.stats import kendalltau, median_abs_deviation, theilslopes

from rlctl.diagnose.signals import (
    crossing,
    deviation,
    kendall,
    lasting_change,
    longest_true,
    rolling_median,
    smoothed,
    spikes,
    start_of,
    theil_sen,
    trend,
)
from rlctl.diagnose.table import Series
from rlctl.diagnose.thresholds import FAR_SIGMAS, SPIKE_SIGMAS, WINDOW, Levels

LEVELS = Levels("some/key", (("info", 1.0), ("critical", 2.0)))
RELATIVE = Levels("some/key", (("warning", 1.0), ("critical", 50.0)), relative=True)


def series(values, first=1):
    return Series(np.arange(first, first + len(values)), np.asarray(values, dtype=float))


def noisy(level, count, seed=0, spread=0.05):
    return level * np.exp(np.random.default_rng(seed).normal(0, spread, count))


@pytest.mark.filterwarnings("ignore:.*too small")
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (7,), (3, 0), (3, 8)])
def test_the_deviation_is_scipys(shape):
    values = np.random.default_rng(0).normal(size=shape)
    for some in (values, values * 1e-30, np.where(values > 1, np.nan, values)):
        np.testing.assert_array_equal(deviation(some), median_abs_deviation(some, axis=-1, scale="normal"))


@pytest.mark.parametrize("count", [2, 3, 10, 33, 34, 60, 400])
def test_rank_correlation_and_robust_line_are_scipys(count):
    rng = np.random.default_rng(count)
    places = np.arange(count)
    walk = rng.normal(size=count).cumsum()
    for some in (walk, -places * 1.0, walk.round(), rng.integers(0, 2, count) * 1.0, rng.normal(size=count)):
        if np.ptp(some) > 0.0:
            np.testing.assert_allclose(kendall(some), kendalltau(places, some), rtol=1e-10, atol=1e-300)
        slope, start, *_ = theilslopes(some, places)
        np.testing.assert_allclose(theil_sen(some), start + slope * places, rtol=1e-10, atol=1e-12)
    assert kendall(np.ones(count)) == (0.0, 1.0)


@pytest.mark.parametrize("mode", ["reflect", "mirror", "nearest"])
@pytest.mark.parametrize("size", [1, 4, WINDOW, 51])
def test_medians_of_neighbours_are_scipys(size, mode):
    for count in (60, 5000):
        values = np.random.default_rng(count).normal(size=count)
        np.testing.assert_array_equal(smoothed(values, size, mode), median_filter(values, size, mode=mode))
        flags = values > 0.5
        np.testing.assert_array_equal(smoothed(flags, size, mode), median_filter(flags, size, mode=mode))


def test_of_no_values_there_are_no_medians():
    assert len(smoothed(np.empty(0))) == 0


def test_a_series_is_judged_without_importing_scipys_statistics():
    code = """if True:
        import sys
        import numpy as np
        from rlctl.diagnose.falls import fall_of
        from rlctl.diagnose.signals import growth, spikes, start_of, trend
        from rlctl.diagnose.table import Series
        series = Series(np.arange(30), np.linspace(1.0, 2.0, 30) ** 4)
        assert fall_of(series) is None
        assert trend(series) > 0.99
        assert not start_of(series).is_stable
        assert growth(series).end > 10.0
        assert len(spikes(series)) == 0
        assert not {"scipy.ndimage", "scipy.stats"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_rolling_median_is_the_plain_one():
    values = np.random.default_rng(0).normal(size=50)
    expected = [np.median(values[i : i + WINDOW]) for i in range(51 - WINDOW)]
    np.testing.assert_array_equal(rolling_median(values), expected)
    np.testing.assert_array_equal(rolling_median(values[:6]), [np.median(values[:6])])


def test_the_worst_level_and_where_it_was():
    found = crossing(series([0.0] * 20 + [3.0] * 20 + [1.5] * 20), LEVELS)
    assert (found.severity, found.limit, found.worst) == ("critical", 2.0, 3.0)
    assert not found.lasts
    assert (found.first_step, found.last_step) == tuple(series(range(60)).steps[[20, 39]])
    short = crossing(series([3.0] * 7), LEVELS)
    assert (short.first_step, short.last_step) == tuple(series(range(7)).steps[[0, 6]])
    assert crossing(series([0.0] * 20 + [1.5] * 20), LEVELS).lasts


def test_floors_and_absolute_values():
    floor = Levels("some/key", (("warning", -1.0),), is_floor=True)
    assert crossing(series([-2.0] * 11), floor).worst == -2.0
    assert crossing(series([0.0] * 11), floor) is None
    either = Levels("some/key", (("warning", 1.0),), absolute=True)
    assert crossing(series([-2.0] * 11), either).worst == 2.0


@pytest.mark.parametrize("count", [0, 1, 4])
def test_below_critical_a_level_needs_five_values(count):
    assert crossing(series([1.5] * count), LEVELS) is None
    assert (crossing(series([9.0] * count), LEVELS) is None) == (count == 0)


def test_a_window_states_its_steps():
    found = crossing(series([3.0]), LEVELS)
    assert (found.severity, found.where) == ("critical", "in step 1")
    assert found.evidence.figure == "3, over 2"
    assert crossing(series([3.0] * 7), LEVELS).evidence.figure == "3 (median of steps 1–7), over 2"
    late = crossing(series([0.0] * 20 + [3.0] * 30 + [4.0] * 11), LEVELS)
    assert late.evidence.figure == "4 (median of steps 46–56), over 2"


def test_a_start_is_a_robust_one():
    values = noisy(2.0, 60)
    values[3] = 1e6
    start = start_of(series(values))
    assert start.median == np.median(values[:20])
    assert 0.05 <= start.sigma <= 0.3
    assert start.is_stable
    assert not start.is_far(2.0)
    assert start.is_far(2.0 + 2 * FAR_SIGMAS)
    assert not start_of(series(np.linspace(1.0, 4.0, 60))).is_stable
    assert start_of(series(np.linspace(1.0, 1.5, 60))).is_stable  # no more than noise that drifts
    assert start_of(series([1.0] * 19)) is None
    assert start_of(series([0.0] * 60)).is_stable


@pytest.mark.parametrize(
    ("values", "severity", "remark"),
    [
        (noisy(3.0, 60), "info", "as from"),
        (np.concatenate([noisy(3.0, 30), noisy(9.0, 30)]), "warning", ""),
        (np.concatenate([noisy(0.5, 30), noisy(3.0, 30)]), "warning", ""),
        (noisy(99.0, 60), "critical", ""),
        (np.linspace(1.0, 9.0, 60), "warning", ""),  # a start with a trend
        (noisy(3.0, 15), "warning", ""),  # too short for a start
        (np.concatenate([noisy(3.0, 12), noisy(0.5, 48)]), "info", "at the run's start only"),
    ],
)
def test_what_the_start_excuses(values, severity, remark):
    found = crossing(series(values), RELATIVE)
    assert found.severity == severity
    assert remark in found.remark
    assert bool(found.remark) == bool(remark)


@pytest.mark.parametrize("count", [40, 1000, 50_000])
def test_trends_are_told_from_noise(count):
    noise = np.random.default_rng(1)
    assert trend(series(np.linspace(1.0, 3.0, count) + noise.normal(0, 0.5, count))) > 0.0
    assert trend(series(np.linspace(3.0, 1.0, count) + noise.normal(0, 0.5, count))) < 0.0
    assert trend(series(np.ones(count))) == 0.0


def test_noise_seldom_makes_a_trend():
    noise = np.random.default_rng(2)
    found = sum(trend(series(noise.normal(size=200))) != 0.0 for _ in range(100))
    assert found <= 1
    assert trend(series([1.0, 2.0, 3.0, 4.0])) == 0.0
    assert trend(series(np.arange(20))) > 0.0


def test_a_change_lasts_to_the_end_and_has_an_onset():
    noise = np.random.default_rng(0).normal(0, 0.02, 60)
    risen = np.where(np.arange(60) < 30, 1.0, 3.0) + noise
    start, end, since = lasting_change(series(risen))
    assert (start, end) == (pytest.approx(1.0, abs=0.05), pytest.approx(3.0, abs=0.05))
    assert since == series(risen).steps[30]
    back = np.where((np.arange(60) > 20) & (np.arange(60) < 52), 3.0, 1.0) + noise
    assert lasting_change(series(back)) is None
    assert lasting_change(series(np.ones(60))) is None
    assert lasting_change(series([5.0])) is None
    assert lasting_change(series([4.0, *([1.0] * 20)])) is None  # one value
    fell_at_once = lasting_change(series([4.0, 4.0, *([1.0] * 20)]))
    assert (fell_at_once.start, fell_at_once.end) == (4.0, 1.0)


def test_spikes_in_noise_are_found_at_their_steps():
    values = np.random.default_rng(0).lognormal(0.0, 0.3, 500)
    assert len(spikes(series(values))) == 0
    values[[100, 321]] = 20.0
    assert spikes(series(values, first=11)).steps.tolist() == [111, 332]


@pytest.mark.parametrize("seed", range(3))
def test_spikes_are_what_their_definition_says(seed):
    values = np.random.default_rng(seed).lognormal(0.0, 1.0, 300)
    expected = []
    for i in range(51, 300):
        before = values[i - 51 : i]
        median = np.median(before)
        sigma = 1.4826 * np.median(np.abs(before - median))
        if values[i] > 3 * median and values[i] > median + SPIKE_SIGMAS * sigma:
            expected.append(i)
    assert spikes(series(values, first=0)).steps.tolist() == expected
    assert expected


def test_a_short_series_has_no_spikes():
    assert len(spikes(series([1.0] * 20 + [99.0]))) == 0
    assert spikes(series([1.0] * 21 + [99.0])).steps.tolist() == [22]
    assert len(spikes(series([0.0] * 40 + [1.0] * 20))) == 0  # no size to compare with


def test_longest_true():
    assert longest_true(np.array([True, False, True, True, False])) == (2, 2)
    assert longest_true(np.zeros(3, dtype=bool)) == (0, 0)
    assert longest_true(np.zeros(0, dtype=bool)) == (0, 0)
