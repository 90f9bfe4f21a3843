import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.cli.app import run
from tests.unit.evaluate.runs import make_run, quick_task


@pytest.fixture
def task(tmp_path_factory):
    return quick_task(tmp_path_factory.getbasetemp() / "export-cache")


@pytest.fixture
def run_dir(tmp_path, task):
    return make_run(tmp_path / "run", task)


def test_the_newest_checkpoint_as_it_is(run_dir, task, tmp_path, capsys):
    out = tmp_path / "new" / "model"
    assert run(["export", str(run_dir), "--out", str(out)]) == 0
    assert "step 8" in capsys.readouterr().out
    exported = {file.name: file.read_bytes() for file in out.iterdir()}
    assert exported == {file.name: file.read_bytes() for file in task.model_dir.iterdir()}
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("12+34=")["input_ids"]


def test_converted_weights_load_in_their_dtype_and_equal_the_cast(run_dir, task, tmp_path):
    out = tmp_path / "model"
    assert run(["export", str(run_dir), "--out", str(out), "--dtype", "bf16", "--step", "4"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    before = load_file(task.model_dir / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)


def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_otherwise(run_dir, tmp_path, capsys):
    weights = run_dir / "checkpoints" / "step_000008" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    out = tmp_path / "model"
    assert run(["export", str(run_dir), "--out", str(out), "--step", "8"]) == 2
    assert "checksum" in capsys.readouterr().err
    assert not out.exists()
    assert run(["export", str(run_dir), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "step 4" in captured.out
    assert "checksum" in captured.err
    assert weights.exists()


def test_mistakes_exit_2_and_touch_nothing(run_dir, tmp_path, capsys):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("keep")
    for arguments, words in (
        ([str(run_dir), "--out", str(taken)], "not empty"),
        ([str(run_dir), "--out", str(taken / "mine.txt")], "is a file"),
        ([str(run_dir), "--out", str(tmp_path / "x"), "--step", "5"], "step_000004, step_000008"),
        ([str(tmp_path), "--out", str(tmp_path / "x")], "not a run directory"),
        ([str(run_dir), "--out", str(tmp_path / "x"), "--dtype", "fp8"], "fp8"),
    ):
        assert run(["export", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert (taken / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "x").exists()


def test_an_empty_destination_is_fine(run_dir, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(["export", str(run_dir), "--out", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "config.json").exists()
