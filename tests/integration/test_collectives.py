"""Ranks of a run call the same collectives, whatever their responses, filters and rejections are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlctl.engine.ranks import Ranks
from tests import runs
from tests.collectives import assert_agree, only_on, trace
from tests.hooks import far_rollouts
from tests.other_device import DEVICE, other_device
from tests.processes import Job

#: Responses of all lengths, groups filtered, tokens and whole sequences rejected, updates skipped.
UNEQUAL = (
    "rollout.temperature=1.3",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'",
    "algorithm.rollout_correction.rollout_rs_threshold='0.9_1.1,1.2'",
    "actor.ppo_max_token_len_per_gpu=48",
    "trainer.total_training_steps=3",
    "trainer.save_freq=2",
)
FILTERED = "algorithm.filter_groups.enable=true"
CASES = {
    "skipped updates": (2, "engine.zero_stage=2"),
    "zero 2": (2, FILTERED, "engine.zero_stage=2"),
    "zero 3, critic": (
        2,
        "actor.use_kl_loss=true",
        "engine.zero_stage=3",
        "algorithm.adv_estimator=gae",
        "engine.dtype=fp32",
    ),
    "four ranks": (
        4,
        FILTERED,
        "engine.zero_stage=1",
        "data.train_batch_size=16",
        "actor.ppo_mini_batch_size=8",
    ),
}


def traced(directory: str, off: bool) -> None:
    trace(directory)
    if off:
        far_rollouts()


@pytest.mark.parametrize("case", CASES)
def test_every_rank_calls_the_same_collectives(case: str, tmp_path: Path, embedded: Path) -> None:
    count, *arguments = CASES[case]
    (tmp_path / "trace").mkdir()
    before = partial(traced, str(tmp_path / "trace"), "skipped" in case)
    run = runs.train_on_ranks(tmp_path / "run", count, *UNEQUAL, *arguments, before=before)
    lengths = {len(row["response"]) for row in runs.rollouts(run)}
    assert len(lengths) > 1
    masked = [line["rollout_corr/rollout_rs_masked_fraction"] for line in runs.metrics(run)]
    assert max(masked) > 0.0
    if "skipped" in case:
        assert max(line["rollout_corr/skipped_updates"] for line in runs.metrics(run)) > 0.0
    found = assert_agree(tmp_path / "trace", count)
    assert sum(found.values()) > 50
    assert any("reduce" in name for name in found)


def test_ranks_that_differ_are_found(tmp_path: Path) -> None:
    lines = {
        0: '["all_reduce", [0, 1], [[3, "torch.float32"]]]\n',
        1: '["all_reduce", [0, 1], [[4, "torch.float32"]]]\n',
    }
    for rank, line in lines.items():
        (tmp_path / str(rank)).write_text(line)
    with pytest.raises(AssertionError, match="call 0 of the group"):
        assert_agree(tmp_path, 2)
    (tmp_path / "1").write_text(lines[0] * 2)
    with pytest.raises(AssertionError, match="another number of calls"):
        assert_agree(tmp_path, 2)
    (tmp_path / "1").write_text("")
    with pytest.raises(AssertionError, match="only"):
        assert_agree(tmp_path, 2)


def on_another_device() -> int:
    """Two ranks of a fake group, whose collectives do nothing, on a device apart from the CPU."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with other_device() as moved, only_on(DEVICE):
        ranks = Ranks(0, 2, DEVICE)
        assert ranks.sum([1.0, 2.0]) == [1.0, 2.0]
        assert ranks.max(3.0) == 3.0
        dist.all_reduce(moved(torch.ones(2)))
        with pytest.raises(RuntimeError, match="all_reduce of a tensor on cpu"):
            dist.all_reduce(torch.ones(2))
    return 0


def test_sums_over_ranks_are_on_the_runs_device(tmp_path: Path) -> None:
    job = Job(on_another_device, log=tmp_path / "log")
    assert job.wait() == 0, job.output
