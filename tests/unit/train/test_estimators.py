"""What the loop accepts from an advantage estimator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.train.estimators import estimate
from tests.unit.train.scored import scored_batch
from tests.unit.train.updates import alone


def test_advantages_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def divided(batch):\n"
        "    scores = batch.token_level_rewards.sum(1)\n"
        "    return scores / (scores - scores)\n"
    )
    algorithm = AlgorithmSpec(adv_estimator=f"{file}:divided")
    with pytest.raises(RunFailure, match="NaN or infinite advantages to") as caught:
        estimate(scored_batch(), algorithm, alone())
    assert "divided" in str(caught.value)


def test_a_value_that_is_not_finite_costs_an_update_only() -> None:
    """It is the critic's, and the update is withheld; a run goes on."""
    scored = scored_batch()
    values = torch.zeros(scored.rollouts.response_mask.shape)
    values[0, 0] = float("nan")
    object.__setattr__(scored, "values", values)
    found = estimate(scored, AlgorithmSpec(adv_estimator="gae"), alone())
    assert not found.advantages.isfinite().all()
