"""The embedded job on a card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card on this machine"),
    pytest.mark.usefixtures("embedded"),
]


def test_bf16_zero2(tmp_path: Path) -> None:
    arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=4")
    run = runs.train(tmp_path / "run", *arguments, "engine.dtype=bf16", "engine.zero_stage=2")
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["training/rollout_probs_diff_mean"] < 0.05
    assert lines[0]["perf/max_memory_allocated_gb"] > 0
