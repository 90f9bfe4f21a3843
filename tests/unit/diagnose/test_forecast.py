"""Forecasts: series whose crossing is known, noise that has none, and coverage under stated noise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.diagnose.diagnosis_report import as_markdown, diagnosis_document
from rlctl.diagnose.forecast import MIN_VALUES, SLOPE_WANDER, Forecast, Level, forecast, forecasts, levels_of
from rlctl.diagnose.rule import examine, metrics_read
from rlctl.diagnose.table import Facts, RunLog, Series, Table
from rlctl.diagnose.thresholds import ESS, K3, KL, RAW_ESS

RISING, FALLING = Level("rising", 1.0), Level("falling", 0.1, is_floor=True)
SHARE = Level("share", 0.3, is_floor=True, bounds=(0.0, 1.0))


def of(values: NDArray[np.float64], level: Level, steps: NDArray[np.int64] | None = None) -> Forecast | None:
    """Forecast from values at steps 0, 1, 2, …, or at these."""
    return forecast(Series(np.arange(len(values)) if steps is None else steps, values), level)


def certain(values: NDArray[np.float64], level: Level, steps: NDArray[np.int64] | None = None) -> Forecast:
    """The same where there must be one."""
    found = of(values, level, steps)
    assert found is not None
    return found


def noise(rng: np.random.Generator, count: int, rho: float = 0.0, df: float = np.inf) -> NDArray[np.float64]:
    """Autoregressive noise of unit variance; Student's t with `df` degrees of freedom."""
    drawn = rng.standard_t(df, 50 + count) if np.isfinite(df) else rng.standard_normal(50 + count)
    drawn *= np.sqrt((1.0 - 2.0 / df) * (1.0 - rho**2))
    for place in range(1, len(drawn)):
        drawn[place] += rho * drawn[place - 1]
    return drawn[50:]


# --- known crossings ------------------------------------------------------------------------------


def test_an_exact_line_is_met_where_it_meets_the_level() -> None:
    found = certain(np.arange(40) / 60, RISING)

    assert found.step == 60
    assert found.low < 60 < found.high
    assert (found.first_step, found.last_step, found.scale) == (0, 39, "linear")


def test_exponential_growth_and_decay_are_lines_on_the_logarithmic_scale() -> None:
    rising = certain(np.exp(0.1 * (np.arange(40) - 60)), RISING)
    falling = certain(0.1 * np.exp(0.05 * (50 - np.arange(30))), FALLING)

    assert (rising.step, rising.scale) == (60, "log")
    assert (falling.step, falling.scale) == (50, "log")


def test_a_share_falls_along_a_logistic_curve() -> None:
    middle = 60 - np.log(0.7 / 0.3) / 0.12  # there the curve is at one half
    found = certain(1.0 / (1.0 + np.exp(0.12 * (np.arange(50) - middle))), SHARE)

    assert (found.step, found.scale) == (60, "logit")


def test_outliers_do_not_move_the_line() -> None:
    values = np.arange(48) / 60
    values[5::8] += 20.0

    assert certain(values, RISING).step == pytest.approx(60, abs=1)


def test_a_trend_that_began_late_is_seen_behind_a_long_quiet_start() -> None:
    quiet = 0.1 + 0.01 * noise(np.random.default_rng(1), 900)
    rise = 0.1 + 0.01 * np.arange(60) + 0.01 * noise(np.random.default_rng(2), 60)
    found = certain(np.concatenate([quiet, rise]), RISING)

    assert found.first_step >= 890
    assert found.step == pytest.approx(990, abs=6)


@pytest.mark.parametrize("seed", range(8))
def test_a_trend_that_has_ended_is_none(seed: int) -> None:
    rise = np.minimum(np.arange(72), 36) / 60

    assert of(rise + 0.02 * noise(np.random.default_rng(seed), 72), RISING) is None


@pytest.mark.parametrize("seed", range(8))
def test_one_step_up_is_no_trend(seed: int) -> None:
    values = np.where(np.arange(60) < 30, 0.2, 0.6) + 0.02 * noise(np.random.default_rng(seed), 60)

    assert of(values, RISING) is None


def test_a_restart_from_a_checkpoint_does_not_hide_the_trend_since() -> None:
    values = np.concatenate([np.arange(40) / 60, np.arange(10, 50) / 80])

    assert certain(values, RISING).step == pytest.approx(40 + 70, abs=1)


def test_gaps_in_the_log_change_nothing() -> None:
    steps = np.sort(np.random.default_rng(3).permutation(50)[:30])
    steps[-1] = 49

    assert certain(steps / 60, RISING, steps).step == 60


def test_values_that_are_no_numbers_are_passed_over() -> None:
    column = np.arange(40) / 60 * K3.tiers[-1][1]
    column[3::7] = np.nan
    run = RunLog(Path("log"), Table(np.arange(40), {K3.key: column}))

    assert [one.step for one in forecasts(run)] == [60]


# --- nothing to say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        np.arange(MIN_VALUES - 1) / 12,
        np.empty(0),
        np.full(40, 0.5),
        np.zeros(40),
        np.arange(40) / -60,
        np.arange(40) / 400,
        np.arange(40) / 30,
    ],
    ids=["too few", "none", "constant", "zero", "away from it", "too far ahead", "past it"],
)
def test_no_trend_to_the_level_no_forecast(values: NDArray[np.float64]) -> None:
    assert of(values, RISING) is None


def test_entropy_that_falls_while_the_reward_rises_is_no_fault() -> None:
    falling = {"actor/entropy": 0.01 * np.exp(0.05 * (60 - np.arange(40)))}
    rewards = {"critic/score/max": np.ones(40), "critic/score/min": np.zeros(40)}
    flat, rising = ({"critic/score/mean": mean} for mean in (np.full(40, 0.3), 0.3 + np.arange(40) / 80))

    def entropies(columns: dict[str, NDArray[np.float64]]) -> list[int]:
        return [one.step for one in forecasts(RunLog(Path("log"), Table(np.arange(40), columns)))]

    assert entropies(falling | rewards | flat) == [60]
    assert entropies(falling | rewards | rising) == []


def test_a_reference_that_costs_nothing_may_be_left() -> None:
    columns = {"actor/kl_loss": np.arange(40) / 30}
    run = RunLog(Path("log"), Table(np.arange(40), columns))

    assert [one.step for one in forecasts(run)] == [60]
    assert forecasts(replace(run, facts=Facts(kl_coef=0.0))) == ()


def test_a_kl_that_falls_below_zero_is_as_far_as_one_that_rises() -> None:
    run = RunLog(Path("log"), Table(np.arange(40), {KL.key: np.arange(40) / -60 * KL.tiers[-1][1]}))

    [one] = forecasts(run)
    assert one.step == 60
    assert str(one).startswith("|rollout_corr/kl| rises (about 0.0617 at step 39) and reaches the level 0.1")


def test_the_logged_sample_size_counts_where_the_raw_one_is_unknown() -> None:
    falling = 1.0 - 0.7 * np.arange(40) / 60
    both = {RAW_ESS.key: np.full(40, 0.9), ESS.key: falling}

    assert [one.step for one in forecasts(RunLog(Path("log"), Table(np.arange(40), {ESS.key: falling})))] == [
        60
    ]
    assert forecasts(RunLog(Path("log"), Table(np.arange(40), both))) == ()


def test_a_metric_that_is_logged_no_more_has_no_future() -> None:
    column = np.full(200, np.nan)
    column[:40] = np.arange(40) / 60 * K3.tiers[-1][1]

    assert forecasts(RunLog(Path("log"), Table(np.arange(200), {K3.key: column}))) == ()


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "count"), [(0.0, 24), (0.0, 100), (0.5, 60), (0.8, 100)])
def test_stationary_noise_raises_few_alarms(rho: float, count: int) -> None:
    """At most 20 of 1,000 looks, with the level three standard deviations above the mean."""
    rng = np.random.default_rng(count)
    found = [of(5.0 + noise(rng, count, rho), replace(RISING, value=8.0)) for _ in range(500)]

    assert sum(one is not None for one in found) <= 10


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [RISING, FALLING, SHARE], ids=lambda level: level.key)
def test_the_unit_of_steps_scales_the_forecast(level: Level) -> None:
    values = _towards(level)
    steps = np.arange(len(values))
    plain, strided = certain(values, level, steps), certain(values, level, 1000 + 10 * steps)

    for name in ("first_step", "last_step", "step", "low", "high"):
        assert getattr(strided, name) == pytest.approx(1000 + 10 * getattr(plain, name), abs=10)
    assert strided.scale == plain.scale


@pytest.mark.parametrize("factor", [1e-6, 0.2, 1e4])
@pytest.mark.parametrize("level", [RISING, FALLING], ids=lambda level: level.key)
def test_the_unit_of_the_metric_changes_nothing(level: Level, factor: float) -> None:
    values = _towards(level)
    scaled = certain(factor * values, replace(level, value=factor * level.value))

    assert replace(scaled, level=level, value=0.0) == replace(certain(values, level), value=0.0)


def _towards(level: Level) -> NDArray[np.float64]:
    """A noisy trend that meets the level near step 60."""
    rng = np.random.default_rng(5)
    if level is RISING:
        return np.arange(48) / 60 + 0.03 * noise(rng, 48)
    if level is FALLING:
        return 0.1 * np.exp(0.05 * (60 - np.arange(48)) + 0.1 * noise(rng, 48))
    return 1.0 / (1.0 + np.exp(0.1 * (np.arange(48) - 51) + 0.1 * noise(rng, 48)))


# --- coverage -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rho", "df", "scale"),
    [(0.0, np.inf, 0.03), (0.0, np.inf, 0.1), (0.5, np.inf, 0.05), (0.0, 3.0, 0.05)],
    ids=["white", "strong", "autocorrelated", "heavy tails"],
)
def test_the_interval_holds_the_crossing_about_as_often_as_it_says(
    rho: float, df: float, scale: float
) -> None:
    """A line whose slope changes after the newest value: standard deviation `SLOPE_WANDER`, as a share."""
    rng = np.random.default_rng(7)
    inside = []
    for _ in range(400):
        count = int(rng.integers(32, 56))
        found = of(np.arange(count) / 60 + scale * noise(rng, count, rho, df), RISING)
        slope = 1.0 + SLOPE_WANDER * rng.standard_normal()
        met = count - 1 + (61 - count) / slope if slope > 0.0 else np.inf
        inside += [found.low <= met <= found.high] if found else []

    assert len(inside) > 120
    assert 0.74 <= np.mean(inside) <= 0.96


# --- in a diagnosis -------------------------------------------------------------------------------


def test_reports_name_step_and_interval_and_say_nothing_without_a_trend() -> None:
    columns = {K3.key: np.arange(40) / 60 * K3.tiers[-1][1], "actor/entropy": np.full(40, 0.5)}
    diagnosis = examine(RunLog(Path("log"), Table(np.arange(40), columns)))
    [one] = json.loads(json.dumps(diagnosis_document([diagnosis])))["runs"][0]["forecasts"]

    assert (one["level"]["key"], one["step"]) == (K3.key, 60)
    assert "at about step 60 " in as_markdown([diagnosis])
    flat = examine(RunLog(Path("log"), Table(np.arange(40), {K3.key: np.full(40, 1e-4)})))
    assert diagnosis_document([flat])["runs"][0]["forecasts"] == []
    assert "forecast" not in as_markdown([flat])


def test_readers_keep_every_metric_that_is_forecast() -> None:
    columns = {"critic/score/max": np.ones(9), "critic/score/min": np.zeros(9)}
    run = RunLog(Path("log"), Table(np.arange(9), columns), facts=Facts(max_response_length=8))

    assert {level.key for level in levels_of(run)} | columns.keys() <= metrics_read()
