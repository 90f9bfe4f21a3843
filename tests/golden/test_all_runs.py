"""All golden runs besides those of `test_runs.py`: minutes."""

from __future__ import annotations

from functools import cache

import pytest

from tests.golden.cases import cases
from tests.golden.runs import Figures, difference, figures, read
from tests.golden.test_runs import FEW
from tests.golden.tolerance import PROCESSORS

OTHERS = [name for name in cases() if name not in FEW]
GOLDEN = read()
#: Runs that the first of their tests waits for; all of them would take longer than a test may.
TOGETHER = 46


@cache
def figures_of(group: int) -> Figures:
    return figures(OTHERS[group * TOGETHER : (group + 1) * TOGETHER])


@pytest.mark.parametrize("name", OTHERS)
def test_figures_are_as_they_were(name: str) -> None:
    now = figures_of(OTHERS.index(name) // TOGETHER)
    found, where = difference(now, GOLDEN, name)
    assert found < PROCESSORS, where
