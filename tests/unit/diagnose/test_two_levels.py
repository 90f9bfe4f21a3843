"""Stationary rewards of two levels, of batches from two sources, are no fall; their fall is one."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from rlctl.diagnose.falls import fall_of, is_new_level
from rlctl.diagnose.table import Series

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
STEPS, LOGS = 300, 200


def sticky(correlation: float) -> Draw:
    """The sign of an AR(1) process: stays of random lengths, 13 steps on average at 0.97."""

    def draw(random: np.random.Generator, steps: int) -> NDArray[np.float64]:
        values = [random.normal()]
        for step in random.normal(size=steps - 1):
            values.append(correlation * values[-1] + step * (1 - correlation**2) ** 0.5)
        return np.sign(values)

    return draw


def blocks(upper: int, lower: int) -> Draw:
    """Blocks of these lengths in turn, from anywhere in the first one on."""

    def draw(random: np.random.Generator, steps: int) -> NDArray[np.float64]:
        places = (np.arange(steps) + random.integers(upper + lower)) % (upper + lower)
        return np.where(places < upper, 1.0, -1.0)

    return draw


def thirds(random: np.random.Generator, steps: int) -> NDArray[np.float64]:
    """A third of the batches, at random, are of the harder source."""
    return np.where(random.random(steps) < 1 / 3, -1.0, 1.0)


SOURCES = {
    **{f"sticky {correlation}": sticky(correlation) for correlation in (0.0, 0.5, 0.9, 0.97)},
    **{f"blocks of {length}": blocks(length, length) for length in (5, 10, 20, 40)},
    **{"blocks of 30 and 10": blocks(30, 10), "thirds": thirds},
}


def rewards(draw: Draw, seed: int, size: float) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    levels = 0.5 + size * draw(random, STEPS)
    return np.clip(levels + random.normal(0, 0.02, STEPS), 0, 1)


def has_fallen(values: NDArray[np.float64]) -> bool:
    """Whether `reward-fell` reports it, for rewards from 0 to 1."""
    fall = fall_of(Series(np.arange(1, len(values) + 1), values))
    return fall is not None and fall[0] - fall[1] >= 0.15 and is_new_level(values, fall[0], fall[1])


@pytest.mark.parametrize("name", SOURCES)
def test_at_most_one_stationary_log_in_a_hundred_is_called_a_fall(name: str) -> None:
    logs = [rewards(SOURCES[name], seed, size) for seed in range(LOGS // 2) for size in (0.1, 0.16)]
    assert sum(map(has_fallen, logs)) <= LOGS / 100


@pytest.mark.parametrize("name", SOURCES)
def test_a_collapse_below_both_levels_is_found(name: str) -> None:
    for seed in range(20):
        values = rewards(SOURCES[name], seed, 0.1)
        values[STEPS - 30 :] = np.random.default_rng(seed).uniform(0.0, 0.04, 30)
        assert has_fallen(values), seed


@pytest.mark.parametrize("lost", [0.5, 0.3])
@pytest.mark.parametrize("start", [0.5, 0.3, 0.05])
def test_a_fall_after_learning_is_found(start: float, lost: float) -> None:
    """From any start, and also back to it."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        learned = np.minimum(0.7, start + 0.01 * np.arange(STEPS))
        learned[STEPS - 60 :] = max(0.0, 0.7 - lost)
        values = np.clip(learned + random.normal(0, 0.04, STEPS), 0, 1)
        assert has_fallen(values), seed
