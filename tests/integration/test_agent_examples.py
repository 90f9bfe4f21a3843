"""The examples of ways into training: what they score, and training of those whose packages are installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.own_model import save_tiny_qwen2

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))


@pytest.mark.parametrize("package", ["langgraph", "smolagents"])
def test_agents_of_packages_train(tmp_path: Path, package: str) -> None:
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    rows = [{"prompt": f"How much is {n} + 1? Use the tool.", "ground_truth": str(n + 1)} for n in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny_qwen2(tmp_path / "model", context=16384)
    run = runs.train(
        tmp_path / "run",
        *("--model", str(model), "--data", str(tmp_path / "sums.jsonl"), "-p", "rloo-seq-is"),
        f"environment.name={ROOT}/examples/{package}_agent.py:agent",
        "environment.max_turns=2",
        "environment.context_length=16384",
        "reward.terms=[]",
        "data.max_prompt_length=12000",
        "data.max_response_length=12",
        "data.train_batch_size=2",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=2",
        "engine.dtype=fp32",
        "trainer.total_training_steps=1",
    )
    [line] = runs.metrics(run)
    assert line["episode/num_failed"] == 0.0
    assert 1.0 <= line["episode/num_turns/mean"] <= 2.0
    assert 0.0 <= line["critic/score/mean"] <= 1.0


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def is_right(self, trace) -> float:
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield SumTask(Sum(answer=str(number + 1), prompt=f"{number}+1?"), self.config.task)
"""


def test_a_taskset_of_verifiers_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    (tmp_path / "sums_of_four.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    rows = tmp_path / "tasks.jsonl"
    subprocess.run([sys.executable, ROOT / "examples/verifiers_tasks.py", "4", rows], check=True)
    model = save_tiny_qwen2(tmp_path / "model", context=512)
    run = runs.train(
        tmp_path / "run",
        *("--model", str(model), "--data", str(rows), "-p", "rloo-seq-is"),
        *("environment.name=verifiers", "environment.params.taskset=sums_of_four"),
        *("environment.max_turns=2", "reward.terms=[]", "data.max_response_length=12"),
        *("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2", "engine.dtype=fp32"),
        "trainer.total_training_steps=1",
        env={"PYTHONPATH": str(tmp_path)},
    )
    [line] = runs.metrics(run)
    assert line["episode/num_failed"] == 0.0
    assert line["episode/num_turns/mean"] == 1.0
    assert 0.0 <= line["critic/score/mean"] <= 1.0


def test_the_phone_book_is_read_by_the_tool_only() -> None:
    from examples.phone_book import PhoneBook

    book = PhoneBook()
    book.reset({"Ada": "417"}, "417")
    assert book.look_up("Ada") == "417"
    assert "not in the book" in book.look_up("Kurt")
    for text, reward in (("417", 1.0), (" 417\n", 1.0), ("It is 417", 0.0), ("", 0.0)):
        book.respond(text)
        assert book.get_reward() == reward


def test_the_hunt_ends_and_reads_numbers_only() -> None:
    from examples.text_game import HuntGame

    game = HuntGame()
    for seed in range(5):
        game.reset(seed)
        low, high, answer = 1, 20, "?"
        assert game.respond("a number") == "Write a number and nothing else."
        while answer is not None:
            guess = (low + high) // 2
            answer = game.respond(str(guess))
            low, high = (guess + 1, high) if answer == "Higher." else (low, guess - 1)
        assert game.get_reward() == 1.0
        game.reset(seed)
        assert [game.respond("0") for _ in range(5)] == ["Higher."] * 4 + [None]
        assert game.get_reward() == 0.0


TABLES = "CREATE TABLE people (name TEXT, age INT); INSERT INTO people VALUES ('Ada', 36), ('Kurt', 28);"


@pytest.mark.parametrize(
    ("sql", "reward"),
    [
        ("SELECT name FROM people WHERE age > 20", 1.0),
        ("SELECT name FROM people ORDER BY age;", 1.0),
        ("SELECT name FROM people WHERE age > 30", 0.0),
        ("SELECT name, age FROM people", 0.0),
        ("SELECT 'Ada' UNION ALL SELECT 'Kurt'", 1.0),
        ("Here it is: SELECT", 0.0),
        ("DELETE FROM people", 0.0),
        ("", 0.0),
    ],
)
def test_a_query_is_right_by_its_rows(sql: str, reward: float) -> None:
    from examples.text_to_sql import TextToSql

    task = TextToSql()
    task.reset(TABLES, "SELECT name FROM people")
    task.respond(sql)
    assert task.get_reward() == reward


@pytest.mark.parametrize(
    "sql",
    [
        *("DROP TABLE people", "INSERT INTO people VALUES ('Eve', 1)", "PRAGMA writable_schema=1"),
        *("ATTACH DATABASE '{file}' AS other", "VACUUM INTO '{file}'", "SELECT load_extension('x')"),
        "CREATE TABLE more AS SELECT 1",
    ],
)
def test_a_query_writes_nothing(tmp_path: Path, sql: str) -> None:
    from examples.text_to_sql import TextToSql

    task = TextToSql()
    task.reset(TABLES, "SELECT 1")
    with pytest.raises(Exception, match=r".+"):
        task.query(sql.format(file=tmp_path / "file"))
    assert list(tmp_path.iterdir()) == []
    assert "('Ada', 36)" in task.query("SELECT * FROM people")
