from __future__ import annotations

import json

import pytest

from tests.golden.first_updates import FILE, figures
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
            # A loss is a sum of terms of either sign near 1: where they cancel, their rounding is left.
            least = 2e-6 if key == "actor/pg_loss" else 1e-7
            assert ours[key] == pytest.approx(value, rel=1e-4, abs=least), (step, key)
