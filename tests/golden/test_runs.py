"""A dozen golden runs; `test_all_runs.py` has the others."""

from __future__ import annotations

import pytest

from rlctl.metric_names import describe
from tests.golden.cases import cases
from tests.golden.runs import Figures, difference, figures, read
from tests.golden.tolerance import PROCESSORS

#: One of every kind, half a second to two seconds of a processor each.
FEW = (
    "preset rloo-seq-is",
    "preset grpo-token-is-multi-rs",
    "preset ppo-seq-is-token-rs",
    "loss gspo, decoupled",
    "loss clip_cov, bypass",
    "estimator optimal_token_baseline, some ungraded",
    "seq-mean-token-mean, after rejecting tokens",
    "kl loss unbiased, decoupled",
    "kl reward, adaptive",
    "exact sampling, centered",
    "groups filtered",
    "damaged, survivors",
)
GOLDEN = read()


@pytest.fixture(scope="module")
def now() -> Figures:
    return figures(FEW)


@pytest.mark.parametrize("name", FEW)
def test_figures_are_as_they_were(now: Figures, name: str) -> None:
    found, where = difference(now, GOLDEN, name)
    assert found < PROCESSORS, where


def test_every_case_is_recorded() -> None:
    assert list(GOLDEN) == list(cases())
    assert set(FEW) <= set(GOLDEN)


def test_every_metric_has_a_definition() -> None:
    recorded = {key for steps in GOLDEN.values() for step in steps for key in step}
    metrics = {key for key in recorded if key != "step" and not key.startswith(("change/", "dump/"))}
    assert len(metrics) > 100
    assert [key for key in metrics if describe(key) is None] == []


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"actor/pg_loss": 0.1002, "dump/keep_mask": [1, 1]}, "step 1, actor/pg_loss"),
        ({"actor/pg_loss": 0.1, "dump/keep_mask": [1, 0]}, "step 1, dump/keep_mask"),
        ({"actor/pg_loss": float("nan"), "dump/keep_mask": [1, 1]}, "step 1, actor/pg_loss"),
        ({"dump/keep_mask": [1, 1]}, "step 1, actor/pg_loss"),
        ({"actor/pg_loss": 0.1, "dump/keep_mask": [1]}, "step 1, dump/keep_mask"),
    ],
)
def test_a_difference_is_found(changed: dict[str, float | list[float]], where: str) -> None:
    golden: Figures = {"a": [{"actor/pg_loss": 0.1, "dump/keep_mask": [1, 1]}]}
    assert difference(golden, golden, "a")[0] == 0.0
    found, place = difference({"a": [changed]}, golden, "a")
    assert found > PROCESSORS
    assert place == where
