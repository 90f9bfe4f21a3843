"""An engine that changes process-wide state leaves the trainer's as it was, and finds its own again."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.rollout import vllm as module
from rlctl.rollout.process_state import Guest, ProcessState
from tests.unit.rollout.test_hf_rollout import TOKENIZER


def spoil(threads: int = 1) -> None:
    """Everything that vLLM's workers are known to change, and more."""
    torch.set_num_threads(threads)
    torch.set_num_threads = lambda count: None
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    os.environ["RLCTL_TEST_NEW"] = "theirs"
    os.environ["RLCTL_TEST_CHANGED"] = "theirs"
    os.environ.pop("RLCTL_TEST_REMOVED", None)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLCTL_TEST_CHANGED", "ours")
    monkeypatch.setenv("RLCTL_TEST_REMOVED", "ours")
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    set_num_threads(3)
    before = ProcessState.now()
    yield
    before.apply(set_num_threads)
    set_num_threads(threads)


def test_ours_is_restored_and_theirs_is_found_again() -> None:
    before = ProcessState.now()
    guest = Guest()
    with guest.running():
        spoil()
        theirs = ProcessState.now()
    assert ProcessState.now() == before
    with guest.running():
        assert ProcessState.now() == theirs
    assert ProcessState.now() == before


def test_it_is_restored_after_a_fault() -> None:
    before = ProcessState.now()

    def failing() -> None:
        spoil()
        raise RuntimeError("no memory")

    guest = Guest()
    with pytest.raises(RuntimeError, match="no memory"), guest.running():
        failing()
    assert ProcessState.now() == before


class StubLLM:
    """Changes everything at its start and at every call."""

    asked: dict[str, Any]

    def __init__(self, **arguments: Any) -> None:
        StubLLM.asked = arguments
        spoil()
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(use_v2_model_runner=True),
            engine_core=SimpleNamespace(shutdown=spoil),
        )

    def generate(self, asked: list[Any], parameters: list[Any], **_: Any) -> list[Any]:
        spoil(2)
        end = TOKENIZER.eos_token_id
        response = SimpleNamespace(
            token_ids=[end], logprobs=[{end: SimpleNamespace(logprob=-1.0)}], finish_reason="stop"
        )
        return [SimpleNamespace(outputs=[response] * parameter.n) for parameter in parameters]


def test_a_vllm_engine_keeps_its_state_to_itself(monkeypatch, tmp_path) -> None:
    from tests.unit.rollout.test_hf_rollout import PLAIN, make_prompts, random_model

    stub = ModuleType("vllm")
    stub.__version__ = "9.9"  # type: ignore[attr-defined]
    stub.LLM = StubLLM  # type: ignore[attr-defined]
    stub.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stub)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "0")
    module._settle_environment()
    random_model(1).save_pretrained(tmp_path)
    before = ProcessState.now()
    engine = module.VLLMRollout(str(tmp_path), TOKENIZER, dtype="fp32", max_model_len=32, revision="a-branch")
    assert ProcessState.now() == before
    rollouts = engine.generate(make_prompts(), PLAIN, n=2, step_seed=1, num_groups_total=6)
    assert rollouts.responses.shape == (12, 1)
    assert ProcessState.now() == before
    assert engine.description == "vLLM 9.9, model runner V2"
    assert StubLLM.asked["revision"] == StubLLM.asked["tokenizer_revision"] == "a-branch"
    engine.close()
    assert ProcessState.now() == before
