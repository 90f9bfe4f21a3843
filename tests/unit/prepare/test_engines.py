"""Here or in processes: the same results in the same order, and an end to everything."""

import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from rlctl.errors import RunFailure
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


def die_while_answering(shared, task):
    """Its process is killed when half of the result is written."""

    def half(connection, data):
        os.write(connection.fileno(), bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if task == shared:
        Connection._send = half
    return bytes(1000)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_each_with_its_task(workers):
    assert list(engines.run(add, 10, range(20), workers)) == [(i, 10 + i) for i in range(20)]
    assert list(engines.run(add, 10, [], workers)) == []


def test_only_a_few_tasks_are_taken_ahead():
    taken = []

    def tasks():
        for task in range(50):
            taken.append(task)
            yield task

    for task, _ in engines.run(slow_at_first, None, tasks(), 2):
        assert len(taken) <= task + 1 + engines.AHEAD * 2


@pytest.mark.parametrize("dies", [die_at, die_while_answering])
def test_a_worker_that_is_killed_is_a_failure_not_a_hang(dies):
    with pytest.raises(RunFailure, match="a worker process died") as caught:
        list(engines.run(dies, 3, range(20), 2))
    assert "--workers" in caught.value.fix


def test_an_error_in_a_worker_comes_through():
    with pytest.raises(ValueError, match="task 3"):
        list(engines.run(fail_at, 3, range(20), 2))


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
