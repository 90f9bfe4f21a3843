import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.cli.app import run
from rlctl.engine.checkpoint import ADAPTER, CHECKPOINTS, TrainerState, begin, publish
from rlctl.engine.lora import Adapter, adapter_parameters, add_lora
from rlctl.engine.policy_engine import plain_weights
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


HARNESS = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=sys.argv[1], device="cpu", dtype="float32", batch_size=2)
asked = [("12+34=", "640"), ("12+34=", "9")]
found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)])
print(json.dumps([value for value, _ in found]))
"""


def test_lm_evaluation_harness_loads_an_export(run_dir, tmp_path):
    harness = Path(sys.prefix) / "lm_eval"
    if not harness.is_dir():
        pytest.skip("lm-evaluation-harness is not installed (make test installs it)")
    out = tmp_path / "model"
    assert run(["export", str(run_dir), "--out", str(out)]) == 0
    path = {"PYTHONPATH": str(harness), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HARNESS, str(out)]
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompt = len(tokenizer("12+34=", add_special_tokens=False)["input_ids"])
    for answer, theirs in zip(("640", "9"), json.loads(done.stdout.splitlines()[-1]), strict=True):
        ids = torch.tensor([tokenizer("12+34=" + answer, add_special_tokens=False)["input_ids"]])
        log_probs = model(ids).logits.log_softmax(-1)[0, prompt - 1 : -1]
        ours = log_probs.gather(-1, ids[0, prompt:, None]).sum().item()
        assert theirs == pytest.approx(ours, abs=1e-4)


@pytest.fixture
def lora_run_dir(run_dir, task):
    """A further checkpoint, of step 12, as a LoRA run saves it."""
    model = AutoModelForCausalLM.from_pretrained(task.model_dir)
    add_lora(model, 2, 4.0, ["q_proj", "down_proj"])
    for parameter in adapter_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.2)
    root = run_dir / CHECKPOINTS
    partial = begin(root, 12)
    merged = {weight.name: weight.value() for weight in plain_weights(model)}
    model.save_pretrained(partial / "model", state_dict=merged)
    tensors = {name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()}
    Adapter.of(model, tensors).save(partial / ADAPTER)
    publish(root, partial, TrainerState(12, 12, 1), keep=None)
    return run_dir


def test_an_adapter_on_its_base_is_the_merged_model(lora_run_dir, task, tmp_path, capsys):
    for name, options in (("adapter", ["--adapter"]), ("model", [])):
        assert run(["export", str(lora_run_dir), "--out", str(tmp_path / name), *options]) == 0
    assert "the adapter of step 12" in capsys.readouterr().out
    base, ids = AutoModelForCausalLM.from_pretrained(task.model_dir), torch.arange(4, 12)[None]
    before = base(ids).logits
    said = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(adapted(ids).logits, said, rtol=0, atol=1e-4)
    assert (said - before).abs().max() > 0.5
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(task.model_dir)


@pytest.mark.parametrize("is_old", [False, True])
def test_without_an_adapter_it_says_so(run_dir, tmp_path, capsys, is_old):
    if is_old:  # an earlier rlctl left an empty folder
        (run_dir / CHECKPOINTS / "step_000008" / ADAPTER).mkdir()
    assert run(["export", str(run_dir), "--out", str(tmp_path / "x"), "--adapter"]) == 2
    assert "no adapter in this checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


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
        ([str(run_dir), "--out", str(tmp_path / "x"), "--dtype", "fp8"], "save_pretrained"),
    ):
        assert run(["export", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert (taken / "mine.txt").read_text() == "keep"
    assert not (tmp_path / "x").exists()


def test_an_empty_destination_is_fine(run_dir, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(["export", str(run_dir), "--out", str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "config.json").exists()
