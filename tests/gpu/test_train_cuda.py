"""The embedded job on a card."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests import runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card on this machine"),
    pytest.mark.usefixtures("embedded"),
]


def test_bf16_zero2(tmp_path: Path) -> None:
    arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=4")
    run = runs.train(tmp_path / "run", *arguments, "engine.dtype=bf16", "engine.zero_stage=2")
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["training/rollout_probs_diff_mean"] < 0.05
    assert lines[0]["perf/max_memory_allocated_gb"] > 0


def test_lora_zero3_with_recomputed_layers(tmp_path: Path) -> None:
    arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=2", "engine.dtype=bf16")
    run = runs.train(
        tmp_path / "run",
        *arguments,
        "engine.zero_stage=3",
        "model.lora_rank=8",
        "model.enable_gradient_checkpointing=true",
    )
    assert [line["step"] for line in runs.metrics(run)] == [1, 2]


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize("more", [[], ["model.lora_rank=8", "engine.zero_stage=3"]])
def test_ligers_kernels_train_as_plain_layers_do(tmp_path: Path, more: list[str]) -> None:
    check_first_step(tmp_path, "model.use_liger", more)


@pytest.mark.parametrize("more", [["engine.zero_stage=2"], ["engine.name=fsdp"]])
def test_compiled_layers_train_as_plain_layers_do(tmp_path: Path, more: list[str]) -> None:
    check_first_step(tmp_path, "model.compile_layers", more)


def check_first_step(tmp_path: Path, key: str, more: list[str]) -> None:
    """Same weights, same samples up to rounding: the first step's rewards and gradient are alike."""
    first = []
    for used in ("false", "true"):
        arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=2", "engine.dtype=bf16", *more)
        run = runs.train(tmp_path / used, *arguments, f"{key}={used}")
        lines = runs.metrics(run)
        assert [line["step"] for line in lines] == [1, 2]
        assert lines[0]["training/rollout_probs_diff_mean"] < 0.05
        first.append(lines[0])
    plain, fused = first
    assert fused["critic/score/mean"] == pytest.approx(plain["critic/score/mean"], abs=0.05)
    assert fused["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=0.2)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("sleeps", ["true", "false"])
def test_vllm_colocated_takes_every_weight_sync(tmp_path: Path, sleeps: str) -> None:
    """Asleep or not between calls, the engine samples with the weights of its time."""
    arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=4", "engine.dtype=bf16")
    run = runs.train(
        tmp_path / "run",
        *arguments,
        "rollout.name=vllm",
        "rollout.gpu_memory_utilization=0.3",
        f"rollout.free_cache_engine={sleeps}",
    )
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/sync_gap"] < 0.05 for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the server needs a card beside the trainer's")
def test_vllm_server_samples_ahead(tmp_path: Path) -> None:
    arguments = ("-p", "rloo-seq-is", "trainer.total_training_steps=6", "engine.dtype=bf16")
    run = runs.train(
        tmp_path / "run", *arguments, "rollout.name=vllm", "rollout.mode=server", "rollout.max_staleness=1"
    )
    lines = runs.metrics(run)
    assert all(line["rollout/sync_gap"] < 0.05 for line in lines)
    assert max(line["training/staleness_max"] for line in lines) > 0
