"""Rewards of a batch: failures are counted and left out, never scored."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.reward.build import build_reward
from rlctl.reward.pool import Failure, GradingPool

HANGS = "#### (10^9)!"  # one integer product in C: no Python signal handler gets a word in


def rollouts(*samples):
    """What a reward reads of `Rollouts`, from (response, ground truth, source)."""
    responses, truths, sources = zip(*samples, strict=True)
    return SimpleNamespace(response_texts=responses, ground_truths=truths, data_sources=sources)


@pytest.fixture(scope="module")
def pool():
    """Shared: starting a process costs the import of sympy."""
    pool = GradingPool("maths", deadline_s=1.0, num_workers=2)
    yield pool
    pool.close()


@pytest.fixture
def maths_reward(pool):
    """The reward of `reward.name=maths`, with its processes already there."""

    def build(max_error_fraction):
        reward = build_reward("maths", max_error_fraction)
        reward._pools["maths"] = pool
        return reward

    return build


def test_auto_grades_each_row_by_its_source_and_keeps_the_order():
    reward = build_reward("auto", 0.0)
    result = reward.score(
        rollouts(
            ("640", "640", "embedded/addition"),
            ("#### 72.0", "72", "openai/gsm8k"),
            ("640.0", "640", "embedded/addition"),
            ("", "72", "openai/gsm8k"),
        )
    )
    reward.close()
    assert result.scores.dtype == torch.float32
    assert result.scores.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert result.valid.dtype == torch.bool
    assert result.valid.all()
    assert result.metrics == {"reward/num_errors": 0.0, "reward/error_fraction": 0.0}


def test_a_failed_grading_is_left_out_and_counted(maths_reward):
    result = maths_reward(0.5).score(rollouts(("#### 1", "1", "x"), ("#### 1", "€", "x")))
    assert result.scores.tolist() == [1.0, 0.0]
    assert result.valid.tolist() == [True, False]
    assert result.metrics == {"reward/num_errors": 1.0, "reward/error_fraction": 0.5}
    assert "'€' is not a mathematical expression" in result.errors[0]


def test_too_many_failures_stop_the_run_with_the_traceback(maths_reward):
    reward = maths_reward(0.4)
    with pytest.raises(
        RunFailure, match=r"failed on 1 of 2 responses(.|\n)*Traceback(.|\n)*ValueError"
    ) as caught:
        reward.score(rollouts(("#### 1", "1", "x"), ("#### 1", "€", "x")))
    assert "max_error_fraction" in caught.value.fix


def test_a_grading_that_hangs_is_ended_and_the_others_go_on(pool):
    start = time.monotonic()
    verdicts = pool.grade_all([("#### 1", "1"), (HANGS, "1"), ("#### 2", "1"), ("#### 1", "1")])
    assert time.monotonic() - start < 15
    assert verdicts[0] == 1.0
    assert verdicts[1] == Failure("the grading took longer than 1 s")
    assert verdicts[2:] == [0.0, 1.0]


def test_a_grading_process_that_dies_is_replaced(pool):
    assert pool.grade_all([("#### 1", "1")]) == [1.0]
    process = pool._workers[0]._process  # a single grading goes to the first
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert pool.grade_all([("#### 1", "1")]) == [Failure("the grading process ended with code -9")]
    assert pool.grade_all([("#### 1", "1")]) == [1.0]


def test_closing_leaves_no_process(pool):
    pool.grade_all([("#### 1", "1"), ("#### 1", "1")])
    processes = [worker._process for worker in pool._workers]
    pool.close()
    assert all(process.returncode is not None for process in processes)


def test_odd_text_survives_the_way_to_the_process(pool):
    assert pool.grade_all([("\ud800\n\r\u2028\x00 #### 7", "7"), ("naïve €\n#### 7", "7")]) == [1.0, 1.0]


def test_exact_grading_takes_milliseconds():
    reward = build_reward("exact", 0.0)
    batch = rollouts(*[(str(i), str(i % 2), "embedded/addition") for i in range(1024)])
    reward.score(batch)
    start = time.perf_counter()
    reward.score(batch)
    assert time.perf_counter() - start < 0.05
