from __future__ import annotations

import json

import pytest

from tests.golden.first_updates import FILE, figures
from tests.golden.tolerance import PROCESSORS, distance
from tests.unit.train.updates import CASES

GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def now() -> dict[str, list[dict[str, float]]]:
    return figures()


@pytest.mark.parametrize("name", CASES)
def test_figures_are_as_they_were(now, name: str) -> None:
    assert now.keys() == GOLDEN.keys()
    for step, (ours, golden) in enumerate(zip(now[name], GOLDEN[name], strict=True)):
        assert ours.keys() == golden.keys()
        for key, value in golden.items():
            assert distance(ours[key], value, key) < PROCESSORS, (step, key)
