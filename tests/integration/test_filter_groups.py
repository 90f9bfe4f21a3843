"""Runs with dynamic sampling: groups with spread only, what they cost, ranks and resumes."""

from __future__ import annotations

import signal
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from rlctl.metric_names import describe
from tests import hooks, runs

pytestmark = pytest.mark.usefixtures("embedded")

FILTERED = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.curriculum=true",
    "rollout.top_p=0.95",
    "rollout.exact_sampling=true",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
)


@pytest.fixture(scope="module")
def run(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("filtered") / "run"
    return runs.train(where, *FILTERED, env={"RLCTL_CACHE": str(embedded_cache)})


def test_every_group_is_live_and_what_it_cost_is_logged(run: Path) -> None:
    rewards: dict[tuple[int, int], set[float]] = defaultdict(set)
    prompts: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in runs.rollouts(run):
        rewards[row["step"], row["group_id"]].add(row["reward"])
        prompts[row["step"], row["group_id"]].add(row["prompt"])
    assert len(rewards) == 4 * 8
    assert all(len(found) > 1 for found in rewards.values())
    assert all(len(found) == 1 for found in prompts.values())
    lines = runs.metrics(run)
    for line in lines:
        own = {key: value for key, value in line.items() if key.startswith("filter_groups/")}
        assert len(own) == 11
        assert all(describe(key) for key in own)
        assert line["reward/zero_spread_groups"] == 0.0
        assert own["filter_groups/samples_used"] == 32
        groups = own["filter_groups/samples_generated"] / 4
        equal = own["filter_groups/zero_spread_fraction"] * groups
        assert groups == pytest.approx(8 + equal + own["filter_groups/unused_groups"])
        assert own["filter_groups/zero_spread_used"] == 0.0
    assert max(line["filter_groups/rounds"] for line in lines) > 1
    assert max(line["filter_groups/generated_per_used"] for line in lines) > 1.1


def test_two_ranks_are_one_run(run: Path, tmp_path: Path) -> None:
    two = runs.train_on_ranks(tmp_path / "run", 2, *FILTERED)
    runs.assert_close(two, run, rel=1e-3)


def test_resumed_it_is_the_same_run(run: Path, tmp_path: Path) -> None:
    half = tmp_path / "run"
    job = runs.start_train(half, *FILTERED, before=partial(hooks.kill_after_logging, 3))
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    job = runs.resume(half)
    assert job.wait() == 0, job.output[-4000:]
    assert runs.reproducible(half) == runs.reproducible(run)
    assert runs.rollouts(half) == runs.rollouts(run)


def test_too_few_live_groups_fill_the_batch_with_dead_ones(tmp_path: Path) -> None:
    """One round alone."""
    once = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=1")
    lines = runs.metrics(runs.train(tmp_path / "run", *once, "trainer.total_training_steps=1"))
    assert lines[0]["filter_groups/rounds"] == 1.0
    assert lines[0]["filter_groups/samples_generated"] == lines[0]["filter_groups/samples_used"] == 32
    assert (
        lines[0]["filter_groups/zero_spread_used"] == lines[0]["filter_groups/zero_spread_fraction"] * 8 > 0
    )
