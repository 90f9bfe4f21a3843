"""An engine that changes process-wide state leaves the trainer's as it was, and finds its own again."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.rollout import vllm as module
from rlctl.rollout.completions import vllm_options
from rlctl.rollout.vllm import IsolatedState, process_state, restore
from tests.models import tiny_model
from tests.unit.rollout.test_hf_rollout import TOKENIZER

OPTIONS = vllm_options("fp32", 32)


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
    before = process_state()
    yield
    restore(before)
    set_num_threads(threads)


def test_ours_is_restored_and_theirs_is_found_again() -> None:
    before = process_state()
    isolated = IsolatedState()
    with isolated.running():
        spoil()
        theirs = process_state()
    assert process_state() == before
    with isolated.running():
        assert process_state() == theirs
    assert process_state() == before


def test_it_is_restored_after_a_fault() -> None:
    before = process_state()

    def failing() -> None:
        spoil()
        raise RuntimeError("no memory")

    isolated = IsolatedState()
    with pytest.raises(RuntimeError, match="no memory"), isolated.running():
        failing()
    assert process_state() == before


def test_a_class_of_transformers_that_an_engine_changes_stays_usable() -> None:
    """vLLM changes the class of a model that it runs through transformers; the trainer has another model."""
    model, isolated = tiny_model("qwen2"), IsolatedState()
    kind, ids = type(model.model), torch.arange(5)[None]
    wanted, own_init = model(input_ids=ids).logits, kind.__init__

    class Compiled:
        """Base class of vLLM's models."""

    with isolated.running():
        kind.__bases__ = (*kind.__bases__, Compiled)
        kind.__init__ = lambda self, *_: pytest.fail("no configuration of vLLM")
        kind.__call__ = lambda self, *_, **__: pytest.fail("not compiled")
    assert torch.equal(model(input_ids=ids).logits, wanted)
    assert kind.__init__ is own_init
    type(model)(model.config)
    with isolated.running():
        assert Compiled in kind.__mro__
        with pytest.raises(pytest.fail.Exception, match="not compiled"):
            model(input_ids=ids)
    assert Compiled not in kind.__mro__


class Stream:
    """A CUDA stream that records which streams it has waited for, and they in turn."""

    current: Stream

    def __init__(self) -> None:
        self.queued, self.sees = set[str](), set[str]()

    def wait_stream(self, other: Stream) -> None:
        self.sees |= other.queued | other.sees


def test_what_one_stream_has_queued_precedes_what_the_other_one_queues(monkeypatch) -> None:
    """vLLM's stream does not wait for the trainer's by itself, nor the trainer's for vLLM's."""
    own, theirs = Stream(), Stream()
    Stream.current = own
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Stream, "current", stream))
    isolated = IsolatedState()
    with isolated.running():
        Stream.current = theirs
    own.queued.add("an optimizer step")
    with isolated.running():
        assert Stream.current is theirs
        assert "an optimizer step" in theirs.sees
        theirs.queued.add("a copy of the weights")
    assert Stream.current is own
    assert "a copy of the weights" in own.sees


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
        log_probs = SimpleNamespace(token_ids=[end], logprobs=[-1.0], start_indices=[0])
        response = SimpleNamespace(token_ids=[end], logprobs=log_probs, finish_reason="stop")
        return [SimpleNamespace(outputs=[response]) for _ in parameters]


def test_a_vllm_engine_keeps_its_state_to_itself(monkeypatch, tmp_path) -> None:
    from tests.unit.rollout.test_hf_rollout import PLAIN, make_requests, random_model

    stub = ModuleType("vllm")
    stub.__version__ = "9.9"  # type: ignore[attr-defined]
    stub.LLM = StubLLM  # type: ignore[attr-defined]
    stub.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stub)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "0")
    module._set_environment()
    random_model(1).save_pretrained(tmp_path)
    before = process_state()
    engine = module.VLLMRollout(str(tmp_path), TOKENIZER, OPTIONS, revision="a-branch")
    assert process_state() == before
    turns = engine.sample(make_requests(n=2), PLAIN)
    assert [turn.token_ids.tolist() for turn in turns] == [[TOKENIZER.eos_token_id]] * 12
    assert process_state() == before
    assert engine.report().description == "vLLM 9.9, model runner V2"
    assert StubLLM.asked["revision"] == StubLLM.asked["tokenizer_revision"] == "a-branch"
    engine.close()
    assert process_state() == before


class Sleeper(StubLLM):
    """Counts what sleeping and waking copy between the GPU and the host."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.copies: list[str] = []
        self.level = 0

    free = 1000  # bytes on the GPU

    def sleep(self, level: int) -> None:
        self.copies += ["to the host"] * (level == 1)
        self.level = level
        Sleeper.free += 300

    def wake_up(self, tags: list[str]) -> None:
        Sleeper.free -= {"weights": 100, "kv_cache": 200}[tags[0]] if len(tags) == 1 else 300
        self.copies += ["back"] * (self.level == 1 and "weights" in tags)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        assert list(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""


@pytest.mark.parametrize(("weights_follow", "copies"), [(True, []), (False, ["to the host", "back"])])
def test_a_step_copies_weights_only_where_none_follow(monkeypatch, tmp_path, weights_follow, copies) -> None:
    from rlctl.errors import RunFailure
    from rlctl.rollout.expected_weights import ExpectedWeights, PlainWeights
    from tests.unit.rollout.test_hf_rollout import PLAIN, make_requests, random_model

    stub = ModuleType("vllm")
    stub.LLM, stub.SamplingParams = Sleeper, SimpleNamespace  # type: ignore[attr-defined]
    stub.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (Sleeper.free, 2000))
    model = random_model(1)
    model.save_pretrained(tmp_path)
    engine = module.VLLMRollout(str(tmp_path), TOKENIZER, OPTIONS, ExpectedWeights(model))
    assert "max_num_seqs" not in StubLLM.asked  # vLLM's own choice
    engine._sleeps = True  # as on a GPU

    def sample() -> None:
        engine.sample(make_requests(n=1), PLAIN)

    engine.sync_weights(PlainWeights(model.named_parameters()), 0)
    sample()  # the check of the sync
    for step in range(2):
        engine._llm.copies.clear()
        sample()
        engine.release(weights_follow=weights_follow)
        engine.release(weights_follow=weights_follow)  # asleep already
        assert engine.report().sleeping_bytes == 300
        if weights_follow:
            with pytest.raises(RunFailure, match="sync"):
                sample()
            engine.sync_weights(PlainWeights(model.named_parameters()), step + 1)
        sample()
        assert engine._llm.copies == copies
    engine.close()
