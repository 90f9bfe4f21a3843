"""The command, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rlctl.cli.diagnose_mismatch import mismatch
from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.errors import UsageError
from rlctl.mismatch.mismatch_run import MismatchRequest, run_preflight
from rlctl.rollout import build_vllm
from tests.unit.mismatch.planted import TOKENIZER
from tests.unit.rollout.test_hf_rollout import random_model

app = typer.Typer()
app.command()(mismatch)


def save(directory: Path, seed: int) -> Path:
    random_model(seed).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def test_a_model_with_built_in_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.mismatch.mismatch_run.MAX_RESPONSE_LENGTH", 8)
    model = random_model(1)
    model.config.max_position_embeddings = 256  # the questions are long for the tiny model
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    said = CliRunner().invoke(app, ["--model", str(tmp_path), "--engine-dtype", "int8", "--format", "json"])
    assert said.exit_code == 0, said.output
    document = json.loads(said.stdout)
    assert [cause["name"] for cause in document["causes"]] == ["dtype"]
    assert document["causes"][0]["spec"] == ["rollout.dtype=fp32"]
    assert document["gap"]["abs_mean"] > 1e-4
    assert {part["by"] for part in document["parts"]} == {"position", "probability"}
    assert document["conclusion"] == "100% of the gap is explained: dtype"


def test_the_embedded_model_agrees_with_itself(embedded: Path) -> None:
    said = CliRunner().invoke(app, [])
    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("the engines agree to ")
    assert "64 responses" in said.stdout
    assert "raw or processed" in said.stdout


def run_of(run: Path, *overrides: str) -> Path:
    from rlctl.run_spec.load import dump_spec, load_spec

    run.mkdir()
    spec = ["model.path=embedded", "engine.dtype=fp32", "trainer.seed=1", *overrides]
    (run / "spec.yaml").write_text(dump_spec(load_spec([], [], spec).spec))
    return run


def test_the_engine_of_a_run_has_the_runs_precision(tmp_path: Path, embedded: Path) -> None:
    run = run_of(tmp_path / "run", "rollout.dtype=int8")
    partial = begin(run / CHECKPOINTS, 1)
    save(partial / "model", 1)
    publish(run / CHECKPOINTS, partial, TrainerState(1, 1, 1), keep=None)
    (cause,) = run_preflight(MismatchRequest(str(run))).causes
    assert cause.what == "the engine computes in int8, the trainer in fp32"
    same = run_preflight(MismatchRequest(str(run), engine_dtype="fp32"))
    assert same.gap.agrees
    # of 16 listed tokens: the rest of the vocabulary is the width of the interval
    low, high = run_preflight(MismatchRequest(str(run))).total_variation
    assert 0.001 < low < high < 0.5
    assert same.total_variation[0] < 1e-5


def test_prompts_are_rendered_with_the_arguments_of_the_run(tmp_path: Path, embedded: Path) -> None:
    run = run_of(tmp_path / "run", "data.chat_template_kwargs.mode=short")
    partial = begin(run / CHECKPOINTS, 1)
    saved = AutoTokenizer.from_pretrained(save(partial / "model", 1))
    saved.chat_template = (
        "{% if mode != 'short' %}{{ raise_exception('no mode') }}{% endif %}{{ messages[0].content }}"
    )
    saved.save_pretrained(partial / "model")
    publish(run / CHECKPOINTS, partial, TrainerState(1, 1, 1), keep=None)
    assert run_preflight(MismatchRequest(str(run))).gap.agrees


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (MismatchRequest("/nowhere/at/all"), "no such directory"),
        (MismatchRequest(engine="vlm"), "--engine: no rollout engine `vlm`"),
        (MismatchRequest(data_files=["/nowhere.parquet"]), "no such file"),
        (MismatchRequest(engine="vllm", engine_dtype="int8"), "vllm does not run in int8"),
    ],
)
def test_mistakes_are_the_users(request_: MismatchRequest, says: str, embedded: Path) -> None:
    with pytest.raises(UsageError, match=says):
        run_preflight(request_)


def test_vllm_leaves_half_of_the_gpu_to_the_trainers_model(
    monkeypatch: pytest.MonkeyPatch, embedded: Path
) -> None:
    """That model is on the GPU when vLLM starts, and vLLM refuses to start with less than its share free."""

    class Started(Exception):
        pass

    def start(path: str, tokenizer: Any, options: dict[str, Any]) -> None:
        raise Started(options["gpu_memory_utilization"])

    monkeypatch.setattr(build_vllm, "VLLMRollout", start)
    with pytest.raises(Started) as caught:
        run_preflight(MismatchRequest(engine="vllm"))
    assert caught.value.args == (0.5,)


def test_a_users_engine_agrees_with_the_trainer(embedded: Path) -> None:
    report = run_preflight(MismatchRequest(engine="examples/custom_engine.py:plain_sampling"))
    assert report.engine.endswith("examples/custom_engine.py:plain_sampling, fp32")
    assert report.gap.abs_max < 1e-3
    assert not report.causes
