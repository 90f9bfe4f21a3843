"""Data sets of the hub by name, where training and evaluation take files."""

import sys
import types
from itertools import chain

import pyarrow as pa
import pytest

from rlctl.data.read import load_rows
from rlctl.data.schema import Message, Row, write_rows
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.evaluate.questions import load_questions
from rlctl.prepare.data_files import hub_name, local_files
from rlctl.run_spec.load import load_spec
from rlctl.train.preflight import check_inputs, count_rows, local_sources


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stub of `datasets` with GSM8K's columns; returns the calls, and the rows of each split."""
    rows = {
        split: [{"question": f"{split} {i} + 1?", "answer": f"#### {i + 1}"} for i in range(count)]
        for split, count in (("train", 6), ("test", 3))
    }
    asked = []

    def load_dataset(*names, split, revision=None):
        asked.append((*names, split, revision))
        if split not in rows:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(rows)}.')
        path = tmp_path / f"{split}-{len(rows[split])}.arrow"
        table = pa.Table.from_pylist(rows[split])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return types.SimpleNamespace(cache_files=[{"filename": str(path)}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return types.SimpleNamespace(asked=asked, rows=rows)


@pytest.mark.parametrize(
    "name",
    [
        "openai/gsm8k",
        "openai/gsm8k/main",
        "openai/gsm8k@740312a",
        "a/b.c@v1.0:train",
        "BytedTsinghua-SIA/DAPO-17k",
    ],
)
def test_names_of_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert hub_name(name) == f"hf:{name}"
    assert hub_name(f"hf:{name}") == f"hf:{name}"


@pytest.mark.parametrize(
    "name",
    [
        "data/train.parquet",
        "/a/b",
        "./a/b",
        "../a/b",
        "~/a/b",
        "data",
        "a/b/c/d",
        "data/*",
        "a/b.jsonl.gz",
        "a/b.zip",
    ],
)
def test_names_of_files(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert hub_name(name) is None


def test_what_exists_here_is_not_looked_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    write_rows(tmp_path / "openai/gsm8k/train.parquet", "train", [Row("s", (Message("user", "?"),), "1")])
    assert hub_name("openai/gsm8k") is None
    assert local_files(["openai/gsm8k"], split="train") == ["openai/gsm8k"]


def sources(spec):
    found = local_sources(spec)
    return [list(chain.from_iterable(files.values())) for files in (found.train_files, found.val_files)]


def test_training_reads_it_prepared_and_cached(hub, tmp_path):
    given = ["model.path=a/b", "data.train_files=openai/gsm8k@740312a", "data.val_files=openai/gsm8k"]
    spec = load_spec([], [], [*given, "trainer.test_freq=1", "data.train_batch_size=2"]).spec
    assert not [one for one in check_inputs(spec) if one.key.startswith("data.")]
    assert count_rows(spec) is None
    assert hub.asked == [], "a dry run needs no network"

    train, val = sources(spec)
    assert hub.asked == [("openai/gsm8k", "train", "740312a"), ("openai/gsm8k", "test", None)]
    rows = load_rows(train)
    assert [row.ground_truth for row in rows] == [str(i + 1) for i in range(6)]
    assert {row.data_source for row in rows} == {"openai/gsm8k"}
    assert [row.question for row in load_rows(val)] == [f"test {i} + 1?" for i in range(3)]
    assert all(str(tmp_path / "cache") in file for file in train + val)
    before = {file: (tmp_path / file).stat().st_mtime_ns for file in train}
    assert sources(spec) == [train, val]
    assert {file: (tmp_path / file).stat().st_mtime_ns for file in train} == before, "prepared once"
    hub.rows["train"].append({"question": "New?", "answer": "#### 1"})
    assert len(load_rows(sources(spec)[0])) == 7, "another content is prepared again"


def test_evaluation_takes_the_same_names(hub):
    found = load_questions(["openai/gsm8k:test"])
    assert [row.question for row in found.rows] == [f"test {i} + 1?" for i in range(3)]


def test_errors_say_what_to_do(hub, monkeypatch):
    with pytest.raises(UsageError, match="Unknown split") as caught:
        local_files(["openai/gsm8k:dev"], split="train")
    assert caught.value.exit_code == 2
    hub.rows["train"][2]["answer"] = "no mark"
    with pytest.raises(UsageError, match="1 of 6 rows cannot be used") as caught:
        local_files(["openai/gsm8k"], split="train")
    assert "rlctl prepare-data parquet hf:openai/gsm8k:train --out DIR" in caught.value.fix

    def offline(*names, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", offline)
    with pytest.raises(EnvironmentFailure, match="could not be loaded: offline") as failed:
        local_files(["data/gsm8k"], split="train")
    assert "if it is a file or directory here: it does not exist" in failed.value.fix
