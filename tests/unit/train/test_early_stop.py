"""A run ends when its metric has not improved for a while, by its log alone."""

from __future__ import annotations

import math

import pytest

from rlctl.errors import SpecError
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import EarlyStopSpec
from rlctl.train.early_stop import early_stop_reason

REWARD = "val/gsm8k/reward_mean"


def ends_at(values: list[float | None], **options: object) -> int | None:
    """The first step after which the run ends; None is a step without the metric."""
    spec = EarlyStopSpec.model_validate(options)
    key = spec.metric or REWARD
    history: list[dict[str, float]] = []
    for step, value in enumerate(values):
        history.append({"step": float(step)} | ({} if value is None else {key: value}))
        if early_stop_reason(history, spec):
            return step
    return None


@pytest.mark.parametrize(
    ("values", "options", "step"),
    [
        ([0.1, 0.2, 0.3, 0.4], {"patience": 1}, None),
        ([0.4, 0.3, 0.2], {"patience": 2}, 2),
        ([0.4, 0.3, 0.5, 0.4, 0.45], {"patience": 2}, 4),
        ([0.4, 0.4, 0.4], {"patience": 2}, 2),  # equal is no improvement
        ([0.4, None, None, None, 0.3, None, 0.3], {"patience": 2}, 6),  # only values count
        ([0.40, 0.41, 0.42], {"patience": 2, "min_delta": 0.05}, 2),
        ([0.40, 0.44, 0.48], {"patience": 2, "min_delta": 0.05}, None),  # against the best, not the last
        ([0.4, math.nan, math.nan, 0.3], {"patience": 1}, 3),
        ([3.0, 2.0, 2.5, 2.6], {"patience": 2, "metric": "actor/entropy", "goal": "min"}, 3),
        ([0.4, 0.3, 0.2, 0.1], {}, None),
    ],
)
def test_patience_counts_values_without_improvement(
    values: list[float | None], options: dict[str, object], step: int | None
) -> None:
    assert ends_at(values, **options) == step


def test_a_step_without_the_metric_never_ends_the_run() -> None:
    spec = EarlyStopSpec(patience=1)
    log = [{"step": 1.0, REWARD: 0.5}, {"step": 2.0, REWARD: 0.4}]
    reason = early_stop_reason(log, spec)
    assert "0.4 now, 0.5 at step 1" in reason
    assert early_stop_reason([*log, {"step": 3.0}], spec) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("patience=2", "no validation"),
        ("patience=2 metric=val/x/reward_mean", "no validation"),
        ("patience=2 metric=critic/score/maen", "critic/score/mean"),
        ("patience=0", "greater than or equal to 1"),
    ],
)
def test_a_metric_that_is_never_logged_is_refused(given: str, said: str) -> None:
    values = [f"trainer.early_stop.{value}" for value in given.split()]
    with pytest.raises(SpecError) as caught:
        load_spec(overrides=values)
    assert said in str(caught.value)
    load_spec(overrides=["trainer.early_stop.patience=2", "trainer.early_stop.metric=critic/score/mean"])
