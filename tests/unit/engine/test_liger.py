"""Liger's kernels give the results of the standard layers; reasons against their use are reported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlctl.engine.model import load_policy, run_liger
from rlctl.errors import EnvironmentFailure, UsageError
from tests.models import tiny_model
from tests.triton_on_cpu import environment

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


@pytest.mark.slow
@pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel is not installed")
def test_log_probs_gradients_and_steps_are_those_of_plain_layers(tmp_path: Path) -> None:
    """In float32 on the CPU, by Triton's interpreter: three architectures, ZeRO 0, 2 and 3, adapters and
    recomputed layers."""
    answer = tmp_path / "answer.json"
    env = environment() | {"DS_ACCELERATOR": "cpu"}
    job = [sys.executable, "-m", "tests.unit.engine.liger_jobs", str(answer)]
    done = subprocess.run(job, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    gated = {"llama": "SiLUMul", "qwen2": "SiLUMul", "gemma2": "GELUMul"}
    found = json.loads(answer.read_text())
    for result in found["compared"]:
        kernels = [f"Liger{name}FunctionBackward" for name in (gated[result["kind"]], "RMSNorm", "Rope")]
        assert (result["kernels"], result["plain_kernels"]) == (sorted(kernels), [])
        assert result["moved"] > 0.1
        assert max(result["before"], result["after"]) < 1e-5
        assert result["norms"][1] == pytest.approx(result["norms"][0], rel=1e-5)
        assert result["copy_runs_its_own_norm"]
        assert "Liger" not in result["later_models_norm"]


def pretend(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """A stub of Liger that supports the given architectures, and patches with the functions given for
    them."""

    def patch(model: object, **_: bool) -> None:
        functions[model.config.model_type](model)

    module = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN=functions, _apply_liger_kernel_to_instance=patch)
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", module)


def test_an_architecture_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(UsageError, match="no kernels for LlamaForCausalLM") as caught:
        run_liger(tiny_model())
    assert caught.value.where == "model.use_liger"


def test_an_activation_that_the_kernels_would_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(model: torch.nn.Module) -> None:
        model.model.layers[0].mlp._get_name = lambda: "LigerSwiGLUMLP"

    pretend(monkeypatch, llama=patched)
    run_liger(tiny_model())
    odd = tiny_model()
    odd.config.hidden_act = "relu"
    with pytest.raises(UsageError, match="activation relu, and Liger's kernel computes silu"):
        run_liger(odd)


def test_classes_and_the_rotary_embedding_on_a_cpu_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain, norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", plain)  # put back afterwards

    def fails(*_: object) -> None:
        raise AssertionError("a kernel on a CPU")

    def patched(_: torch.nn.Module) -> None:
        modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm = fails, torch.nn.Identity

    pretend(monkeypatch, llama=patched)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model()
    wanted = model(torch.arange(5)[None]).logits
    run_liger(model)
    assert modeling_llama.LlamaRMSNorm is norm
    assert modeling_llama.apply_rotary_pos_emb is not plain
    assert torch.equal(model(torch.arange(5)[None]).logits, wanted)


def test_what_the_machine_lacks_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        load_policy(
            "/nowhere",
            revision=None,
            trust_remote_code=False,
            attn_implementation="sdpa",
            dtype=torch.float32,
            use_liger=True,
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentFailure, match="not installed") as caught:
        load()
    assert 'pip install "rlctl[liger]"' in str(caught.value.fix)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(EnvironmentFailure, match="need a GPU"):
        load()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="no such directory"):
        load()
