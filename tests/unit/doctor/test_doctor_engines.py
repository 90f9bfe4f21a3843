"""The trials distinguish a working engine from a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlctl.doctor.engines import torch_computes
from rlctl.doctor.examine import _call
from rlctl.errors import EnvironmentFailure
from tests.processes import Job


def _healthy(said: str) -> int:
    found = {name: _call(f"rlctl.doctor.engines:{name}") for name in ("hf_samples", "deepspeed_steps")}
    Path(said).write_text(json.dumps({name: (each.works, each.found) for name, each in found.items()}))
    return 0


def _faulty(said: str) -> int:
    """A step that changes nothing, and a model that computes no numbers."""
    from rlctl.engine.deepspeed import DeepSpeedEngine
    from rlctl.engine.protocol import StepResult
    from rlctl.tiny import model as tiny

    build = tiny.build_model

    def not_finite(recipe: object) -> object:
        model = build(recipe)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        return model

    DeepSpeedEngine.step = lambda *_, **__: StepResult(grad_norm=1.0, applied=True)
    step = _call("rlctl.doctor.engines:deepspeed_steps")
    tiny.build_model = not_finite
    sampled = _call("rlctl.doctor.engines:hf_samples")
    Path(said).write_text(json.dumps([(each.works, each.found) for each in (step, sampled)]))
    return 0


def test_engines_that_work_do(tmp_path: Path) -> None:
    job = Job(_healthy, str(tmp_path / "said"), log=tmp_path / "log")
    assert job.wait() == 0, job.output
    found = json.loads((tmp_path / "said").read_text())
    assert [works for works, _ in found.values()] == [True, True], found
    assert "tokens sampled on cpu" in found["hf_samples"][1]


def test_engines_that_do_not_work_are_told(tmp_path: Path) -> None:
    job = Job(_faulty, str(tmp_path / "said"), log=tmp_path / "log")
    assert job.wait() == 0, job.output
    step, sampled = json.loads((tmp_path / "said").read_text())
    assert step == [False, "an optimizer step changed no weight"]
    assert not sampled[0]


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("rlctl.engine.ranks.gpus", lambda: ["NVIDIA X, 80 GiB, 550.1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(EnvironmentFailure, match="without CUDA"):
        torch_computes()
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with pytest.raises(EnvironmentFailure, match=r"CUDA 13\.0"):
        torch_computes()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "on the CPU" in torch_computes()
