"""vLLM for real, on the CPU: one engine in a process of its own, several questions to it.

With Model Runner V1, which its CPU build takes, and with V2, which GPUs take (`tests/triton_on_cpu`).
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import TopPLogitsWarper

from rlctl.batch import Turn
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.rollout.completions import vllm_options
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.vllm import VLLMRollout, _not_started, completion_of
from rlctl.routing import REPLAY, Mixture
from rlctl.tiny.embedded import ensure_embedded
from tests.forked_python import run_in
from tests.triton_on_cpu import run_on_v2
from tests.unit.engine import routing_jobs
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, make_requests, random_model

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
PLAIN = Sampling(max_response_length=9)
LIMITED = [replace(request, max_tokens=1 + place % 5) for place, request in enumerate(make_requests(n=2))]
NUCLEUS = Sampling(max_response_length=9, temperature=0.7, top_p=0.9)


def ask(path: str, answers: str) -> int:
    """In the engine's process: sample in several ways; leave what came out."""
    engine = VLLMRollout(
        *(path, TOKENIZER),
        vllm_options("fp32", 64, max_num_seqs=8) | {"block_size": 32, "max_logprobs": 12},
    )

    everything = make_requests(n=2)
    found = {
        "whole": engine.sample(everything, NUCLEUS),
        "again": engine.sample(everything, NUCLEUS),
        "part": engine.sample([*everything[8:10], *everything[2:4]], NUCLEUS),
        "plain": engine.sample(everything, PLAIN),
        "limits": engine.sample(LIMITED, PLAIN),
        "kept": engine.sample(everything, replace(NUCLEUS, top_k=6, with_kept=True)),
        "most_likely": engine.sample(everything, replace(NUCLEUS, top_p=1.0, num_most_likely=4)),
        "greedy": engine.sample(make_requests(n=1), replace(PLAIN, greedy=True)),
    }
    found["block_size"] = engine._llm.llm_engine.vllm_config.cache_config.block_size
    found["report"] = engine.report().description
    engine.close()
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=30)
    assert not [process for process in left if "resource_tracker" not in " ".join(process.cmdline())]
    torch.save(found, answers)
    return 0


def refused(path: str, result: str) -> int:
    try:
        VLLMRollout(path, TOKENIZER, vllm_options("fp32", 64))
    except UsageError as error:
        with open(result, "w") as file:  # noqa: PTH123
            json.dump([error.what, error.where], file)
    return 0


@pytest.fixture(scope="module")
def model():
    return random_model(1)


@pytest.fixture(scope="module", params=["V1", pytest.param("V2", marks=[pytest.mark.thorough, needs_triton])])
def runner(request: pytest.FixtureRequest) -> str:
    """The model runner of the engine that answers."""
    return request.param


@pytest.fixture(scope="module")
def answers(
    runner: str, model, forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Turn]]:
    directory = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(directory / "model")
    TOKENIZER.save_pretrained(directory / "model")
    paths = (directory / "model", directory / "answers")
    if runner == "V2":
        run_on_v2(ask, *paths, log=directory / "log")
    else:
        run_in(forked_vllm, ask, *paths, log=directory / "log")
    return torch.load(directory / "answers", weights_only=False)


def logits_of(model, request: Request, turn: Turn) -> torch.Tensor:
    """(t, V) float32: the model's before each token."""
    prompt = list(request.token_ids)
    with torch.no_grad():
        return model(torch.tensor([prompt + turn.token_ids.tolist()])).logits[0, len(prompt) - 1 : -1]


@needs_vllm
@pytest.mark.parametrize(
    ("name", "temperature", "top_p"), [("whole", 0.7, 0.9), ("plain", 1.0, 1.0)], ids=["nucleus", "plain"]
)
def test_log_probs_are_those_of_the_distribution_sampled_from(model, answers, name, temperature, top_p):
    for request, turn in zip(make_requests(n=2), answers[name], strict=True):
        logits = logits_of(model, request, turn) / temperature
        expected = TopPLogitsWarper(top_p)(None, logits).log_softmax(-1)
        expected = expected.gather(-1, turn.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(turn.log_probs, expected, atol=2e-5, rtol=0)
        assert turn.versions.tolist() == [0] * len(turn.token_ids)


@needs_vllm
def test_it_says_what_it_sampled_from(model, answers):
    """So the trainer, restricted to that, has the engine's log-probs."""
    sizes = set()
    for request, turn in zip(make_requests(n=2), answers["kept"], strict=True):
        logits = logits_of(model, request, turn) / NUCLEUS.temperature
        for row, token, ids, log_prob in zip(
            logits,
            turn.token_ids,
            turn.kept.ids.split(turn.kept.counts.tolist()),
            turn.log_probs,
            strict=True,
        ):
            found = row[token] - row[ids.long()].logsumexp(-1)
            torch.testing.assert_close(found, log_prob, atol=2e-5, rtol=0)
            sizes.add(len(ids))
        assert turn.finish_reason != "abort"
        assert not turn.kept.without(turn.token_ids).any()
    assert min(sizes) >= 1
    assert 1 < max(sizes) <= 6


@needs_vllm
def test_it_lists_the_most_likely_tokens(model, answers):
    for request, turn in zip(make_requests(n=2), answers["most_likely"], strict=True):
        assert turn.most_likely.counts.tolist() == [4] * len(turn.token_ids)
        expected = (logits_of(model, request, turn) / NUCLEUS.temperature).log_softmax(-1).topk(4)
        ids, log_probs = turn.most_likely.padded()
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_probs, expected.values, atol=2e-5, rtol=0)


@needs_vllm
def test_each_request_has_its_own_limit(answers):
    """And up to it the tokens are those of a request with another limit."""
    for request, turn, longer in zip(LIMITED, answers["limits"], answers["plain"], strict=True):
        limit = request.max_tokens
        assert turn.token_ids.tolist() == longer.token_ids[:limit].tolist()
        assert turn.finish_reason == ("length" if len(longer.token_ids) > limit else longer.finish_reason)


def outputs(logits: torch.Tensor, tokens: torch.Tensor, listed: int) -> SimpleNamespace:
    """As vLLM writes them: at each place the sampled token, then the most likely ones."""
    top = logits.log_softmax(-1).topk(listed)
    own = logits.log_softmax(-1).gather(1, tokens[:, None])
    flat = SimpleNamespace(
        token_ids=torch.cat([tokens[:, None], top.indices], 1).flatten().tolist(),
        logprobs=torch.cat([own, top.values], 1).flatten().tolist(),
        start_indices=list(range(0, len(tokens) * (1 + listed), 1 + listed)),
    )
    return SimpleNamespace(token_ids=tokens.tolist(), logprobs=flat, finish_reason="length")


def test_what_vllm_lists_is_converted_without_loss():
    """A sampled token is listed once, whether or not it is among the most likely ones."""
    torch.manual_seed(3)
    logits, tokens = torch.randn(200, 12), torch.randint(12, (200,))
    sampling = Sampling(200, top_k=2, with_kept=True, num_most_likely=4)
    turn = completion_of(outputs(logits, tokens, 4), has_lists=True).turn(sampling, 5)
    assert turn.token_ids.tolist() == tokens.tolist()
    assert turn.versions.unique().tolist() == [5]
    log_probs = logits.log_softmax(-1)
    torch.testing.assert_close(turn.log_probs, log_probs.gather(1, tokens[:, None]).squeeze(1))
    ids, values = turn.most_likely.padded()
    assert ids.shape == (200, 4)
    torch.testing.assert_close(values, log_probs.topk(4).values)
    assert torch.equal(ids, log_probs.topk(4).indices)
    assert turn.finish_reason == "abort"  # the lists are not all that it was sampled from
    assert set(turn.kept.counts.tolist()) == {0}
    cut = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf)
    tokens = cut.softmax(-1).multinomial(1).squeeze(1)
    turn = completion_of(outputs(cut, tokens, 6), has_lists=True).turn(replace(sampling, top_k=3), 5)
    assert turn.finish_reason == "length"
    assert turn.kept.counts.tolist() == [4] * 200
    kept = turn.kept.ids.view(200, 4).sort(1).values.tolist()
    assert kept == logits.topk(4).indices.sort(1).values.tolist()
    assert not turn.kept.without(tokens).any()


def test_experts_are_converted():
    """vLLM has unsigned numbers of one or two bytes."""
    output = outputs(torch.randn(5, 12), torch.randint(12, (5,)), 0)
    assert completion_of(output, has_lists=False).turn(Sampling(5), 0).experts is None
    for dtype in (np.uint8, np.uint16):
        output.routed_experts = np.arange(7 * 3 * 2, dtype=dtype).reshape(7, 3, 2) + dtype(200)
        experts = completion_of(output, has_lists=False).turn(Sampling(5), 0).experts
        assert experts.dtype == torch.int16
        assert experts.tolist() == output.routed_experts.tolist()


def test_log_probs_of_other_tokens_are_refused():
    output = outputs(torch.randn(5, 12), torch.randint(12, (5,)), 0)
    completion_of(output, has_lists=False)
    output.token_ids[3] = (output.token_ids[3] + 1) % 12
    with pytest.raises(RunFailure, match="not those of the tokens"):
        completion_of(output, has_lists=False)


@needs_vllm
def test_options_reach_the_engine(runner, answers):
    assert answers["block_size"] == 32
    assert answers["report"].endswith(f"model runner {runner}")


def ask_for_experts(path: str, answers: str) -> int:
    options = vllm_options("fp32", 64, max_num_seqs=8) | {"enable_return_routed_experts": True}
    engine = VLLMRollout(path, TOKENIZER, options)
    torch.save(engine.sample(make_requests(n=1), replace(PLAIN, with_experts=True)), answers)
    engine.close()
    return 0


@needs_vllm
@needs_triton
def test_the_experts_that_it_reports_are_those_of_the_model(tmp_path: Path) -> None:
    """Only Model Runner V2 reports them: of every token that was read, the prompt's too."""
    sizes = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "head_dim": 32, "moe_intermediate_size": 32}
    mixture = routing_jobs.built("qwen3_moe", **sizes, pad_token_id=TOKENIZER.pad_token_id)
    mixture.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    run_on_v2(ask_for_experts, tmp_path / "model", tmp_path / "answers", log=tmp_path / "log")
    turns = torch.load(tmp_path / "answers", weights_only=False)
    chosen, routers = set(), Mixture.of(mixture.model, REPLAY)
    for request, turn in zip(make_requests(n=1), turns, strict=True):
        ids = torch.tensor([[*request.token_ids, *turn.token_ids.tolist()]])
        with torch.no_grad():
            logits = mixture(ids[:, :-1], output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(routers.experts_per_token).indices for layer in logits], 1)
        found = routers.of_routers(turn.experts).long()
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
        chosen |= set(found.flatten().tolist())
    assert len(chosen) == routing_jobs.EXPERTS


@needs_vllm
def test_a_turn_depends_on_its_request_only(answers):
    whole, again, part = (
        [turn.token_ids.tolist() for turn in answers[name]] for name in ("whole", "again", "part")
    )
    assert again == whole
    assert part == whole[8:10] + whole[2:4]
    assert len({tuple(tokens) for tokens in whole}) > len(TEXTS)


@needs_vllm
def test_greedy_is_the_other_engines_greedy(model, answers):
    expected = HFRollout(model, TOKENIZER, "cpu").sample(make_requests(n=1), replace(PLAIN, greedy=True))
    for turn, other in zip(answers["greedy"], expected, strict=True):
        assert turn.token_ids.tolist() == other.token_ids.tolist()
        assert turn.finish_reason == other.finish_reason
        torch.testing.assert_close(turn.log_probs, other.log_probs, atol=2e-5, rtol=0)


@needs_vllm
def test_a_turn_stops_at_its_end_or_has_the_full_length(answers):
    reasons = set()
    for turn in answers["plain"]:
        is_end = int(turn.token_ids[-1]) == TOKENIZER.eos_token_id
        assert turn.finish_reason == ("stop" if is_end else "length")
        assert is_end or len(turn.token_ids) == 9
        reasons.add(turn.finish_reason)
    assert reasons == {"stop", "length"}


@needs_vllm
def test_a_model_it_refuses_is_named(tmp_path, forked_vllm):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    run_in(forked_vllm, refused, tmp_path, tmp_path / "said", log=tmp_path / "log")
    what, where = json.loads((tmp_path / "said").read_text())
    assert where == str(tmp_path)
    assert "no-such-architecture" in what


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EnvironmentFailure, match="not installed") as caught:
        VLLMRollout("anywhere", TOKENIZER, vllm_options("fp32", 64))
    assert "rlctl[vllm]" in str(caught.value.fix)


def test_an_option_that_vllm_does_not_have_is_named() -> None:
    refused = TypeError("EngineArgs.__init__() got an unexpected keyword argument 'max_num_batched_token'")
    error = _not_started("a/model", refused)
    assert error.exit_code == 2
    assert error.where == "rollout.engine_kwargs.max_num_batched_token"
    assert error.fix == "write max_num_batched_tokens"


@needs_vllm
@pytest.mark.parametrize(
    ("option", "value", "where"),
    [
        ("block_size", "a", "rollout.engine_kwargs.block_size"),
        ("cpu_offload_gb", "x", "rollout.engine_kwargs.cpu_offload_gb"),
        ("max_num_batched_tokens", "lots", "rollout.engine_kwargs"),
    ],
)
def test_an_option_of_the_wrong_type_is_the_users_mistake(option, value, where, embedded):
    from vllm import EngineArgs

    with pytest.raises((ValueError, TypeError)) as caught:
        EngineArgs(model=str(ensure_embedded(1).model_dir), **{option: value}).create_engine_config()
    error = _not_started("a/model", caught.value)
    assert (error.exit_code, error.where) == (2, where)
    assert "number" in error.what or "integer" in error.what


@needs_vllm
def test_experts_that_vllm_cannot_report_here_are_no_fault_of_the_model(embedded):
    """Its CPU build has no model runner that does."""
    from vllm import EngineArgs

    given = EngineArgs(model=str(ensure_embedded(1).model_dir), enable_return_routed_experts=True)
    with pytest.raises(ValueError, match="Runner V2") as caught:
        given.create_engine_config()
    error = _not_started("a/model", caught.value)
    assert (error.exit_code, error.where) == (2, "actor.routing_replay")


@pytest.mark.parametrize(
    "words",
    [
        "Free memory on device cuda:0 (30.1/79.1 GiB) on startup is less than desired GPU memory utilization "
        "(0.5, 39.55 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
        "the engine by adjusting the value.",
    ],
)
def test_too_little_memory_is_no_fault_of_the_model(words: str) -> None:
    error = _not_started("a/model", ValueError(words))
    assert error.where == "rollout.gpu_memory_utilization"
    assert words in error.what
    assert "model" not in error.what.replace(words, "")
