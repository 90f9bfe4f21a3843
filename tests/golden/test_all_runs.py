"""All golden runs besides those of `test_runs.py`: minutes."""

from __future__ import annotations

import pytest

from tests.golden.cases import cases
from tests.golden.runs import Figures, difference, figures, read
from tests.golden.test_runs import FEW
from tests.golden.tolerance import PROCESSORS

pytestmark = pytest.mark.timeout(2400)  # the first test waits for all runs
OTHERS = [name for name in cases() if name not in FEW]
GOLDEN = read()


@pytest.fixture(scope="module")
def now() -> Figures:
    return figures(OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_figures_are_as_they_were(now: Figures, name: str) -> None:
    found, where = difference(now, GOLDEN, name)
    assert found < PROCESSORS, where
