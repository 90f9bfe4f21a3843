"""A run in which two ranks run each row together learns what one learns in which each runs its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.usefixtures("embedded")
STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=-1")
#: A reference model, π_old of a pass of its own, and a penalty in the reward.
RC = "algorithm.rollout_correction."
CENTERED = (f"{RC}rollout_is=token", f"{RC}score_centering=8")
POLICIES = {
    "decoupled": (f"{RC}bypass_mode=false", "algorithm.use_kl_in_reward=true"),
    "centered": CENTERED,
    # Small updates: rounded to bf16, weights that differ in their last bit can differ by 2^-8 of their value.
    "centered, bf16": (*CENTERED, "rollout.dtype=bf16", "actor.lr=1e-6"),
}


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES)
def test_two_ranks_run_each_row_together(tmp_path: Path, policies: tuple[str, ...]) -> None:
    apart = runs.train_on_ranks(tmp_path / "apart", 2, *STEPS, *policies)
    together = runs.train_on_ranks(tmp_path / "together", 2, *STEPS, *policies, "engine.sequence_parallel=2")
    for theirs, ours in zip(runs.metrics(apart), runs.metrics(together), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, float | int) and not name.startswith(("timing_s/", "perf/")):
                assert ours[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
        assert ours["perf/total_num_tokens"] == theirs["perf/total_num_tokens"]
