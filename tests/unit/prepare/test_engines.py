"""Here, in processes or on Ray: the same results in the same order, and an end to everything."""

import operator
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.prepare import engines, sources
from rlctl.prepare.pipeline import prepare
from rlctl.prepare.request import PrepareRequest
from tests.unit.prepare.helpers import gsm8k_rows, write_jsonl


def add(shared, task):
    return shared + task


def slow_at_first(shared, task):
    time.sleep(0.2 if task == 0 else 0)
    return task


def die_at(shared, task):
    if task == shared:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def fail_at(shared, task):
    if task == shared:
        raise ValueError(f"task {task}")
    return task


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_each_with_its_task(workers):
    assert list(engines.run("local", add, 10, range(20), workers)) == [(i, 10 + i) for i in range(20)]
    assert list(engines.run("local", add, 10, [], workers)) == []


def test_only_a_few_tasks_are_taken_ahead():
    taken = []

    def tasks():
        for task in range(50):
            taken.append(task)
            yield task

    for task, _ in engines.run("local", slow_at_first, None, tasks(), 2):
        assert len(taken) <= task + 1 + engines.AHEAD * 2


def test_a_worker_that_is_killed_is_a_failure_not_a_hang():
    with pytest.raises(RunFailure, match="a worker process died") as caught:
        list(engines.run("local", die_at, 3, range(20), 2))
    assert "--workers" in caught.value.fix


def test_an_error_in_a_worker_comes_through():
    with pytest.raises(ValueError, match="task 3"):
        list(engines.run("local", fail_at, 3, range(20), 2))


@pytest.fixture
def many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 2048)
    rows = [*gsm8k_rows(copies=60), {"question": "no answer"}, *gsm8k_rows(copies=2)]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    assert len(list(sources.read_blocks(sources.Source(source, "in")))) > 10
    options = {"bad_rows": "quarantine", "duplicates": "drop", "rows_per_shard": 100, "check_graders": False}
    return lambda name, **more: PrepareRequest((str(source),), tmp_path / name, **options, **more)


def contents(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_processes_write_the_same_bytes(many_blocks, tmp_path):
    prepare(many_blocks("one", workers=1))
    prepare(many_blocks("two", workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert "train-00003-of-00004.parquet" in contents(tmp_path / "one")


@pytest.fixture(scope="module")
def local_ray():
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_writes_the_same_bytes(many_blocks, tmp_path, local_ray, monkeypatch):
    monkeypatch.setattr(engines, "RAY_TASKS", 8)  # several runs of Ray Data one after the other
    prepare(many_blocks("one", workers=1))
    prepare(many_blocks("ray", engine="ray"))
    assert contents(tmp_path / "one") == contents(tmp_path / "ray")


@pytest.mark.slow
def test_an_error_on_ray_says_what_it_was(local_ray):
    with pytest.raises(RunFailure, match="ZeroDivisionError: division by zero"):
        list(engines.run("ray", operator.truediv, 1, [2, 1, 0], 1))


@pytest.mark.slow
def test_ray_reads_relative_paths_wherever_it_was_started(tmp_path, local_ray, monkeypatch):
    write_jsonl(tmp_path / "in.jsonl", gsm8k_rows(copies=2))
    monkeypatch.chdir(tmp_path)  # the workers' processes stand where the tests were started
    prepare(PrepareRequest(("in.jsonl",), Path("out"), engine="ray", check_graders=False, leakage="off"))
    assert (tmp_path / "out" / "train.parquet").is_file()


@pytest.mark.slow
def test_a_mistake_found_on_ray_is_told_as_such(local_ray):
    with pytest.raises(UsageError, match="no such file") as caught:
        list(engines.run("ray", operator.call, sources.find_sources, [["/no/such.jsonl"]], 1))
    assert caught.value.where == "/no/such.jsonl"


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match="not installed") as caught:
        list(engines.run("ray", add, 1, [1], 1))
    assert caught.value.fix == 'pip install "rlctl[ray]"'
