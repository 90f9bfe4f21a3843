"""vLLM for real, on the CPU: one engine in a process of its own, several questions to it."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from transformers import TopPLogitsWarper

from rlctl.batch import Rollouts
from rlctl.engine.log_probs import PolicyModule, policy_output
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.rollout.completions import vllm_options
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.vllm import VLLMRollout, _not_started
from rlctl.tiny.embedded import ensure_embedded
from tests.forked_python import run_in
from tests.unit.rollout.test_hf_rollout import TEXTS, TOKENIZER, make_prompts, random_model, take

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
NUCLEUS = Sampling(max_response_length=9, temperature=0.7, top_p=0.9)


def ask(path: str, answers: str) -> int:
    """In the engine's process: sample in several ways; leave what came out."""
    engine = VLLMRollout(
        *(path, TOKENIZER),
        vllm_options("fp32", 64, max_num_seqs=8) | {"block_size": 32, "max_logprobs": 12},
    )

    def sample(rows, sampling=NUCLEUS, n=4):
        prompts = take(make_prompts(), rows)
        return engine.generate(prompts, sampling, n=n, step_seed=11, num_groups_total=len(TEXTS))

    everything = list(range(len(TEXTS)))
    found = {
        "whole": sample(everything),
        "again": sample(everything),
        "part": sample([4, 1]),
        "plain": sample(everything, Sampling(max_response_length=9)),
        "kept": sample(everything, replace(NUCLEUS, top_k=6, with_kept=True)),
        "most_likely": sample(everything, replace(NUCLEUS, top_p=1.0, num_most_likely=4)),
        "greedy": sample(everything, Sampling(max_response_length=9, greedy=True), n=1),
    }
    found["block_size"] = engine._llm.llm_engine.vllm_config.cache_config.block_size
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


@pytest.fixture(scope="module")
def answers(model, forked_vllm, tmp_path_factory) -> dict[str, Rollouts]:
    directory = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(directory / "model")
    TOKENIZER.save_pretrained(directory / "model")
    run_in(forked_vllm, ask, directory / "model", directory / "answers", log=directory / "log")
    return torch.load(directory / "answers", weights_only=False)


@needs_vllm
@pytest.mark.parametrize(
    ("name", "temperature", "top_p"), [("whole", 0.7, 0.9), ("plain", 1.0, 1.0)], ids=["nucleus", "plain"]
)
def test_log_probs_are_those_of_the_distribution_sampled_from(model, answers, name, temperature, top_p):
    rollouts = answers[name]
    with torch.no_grad():
        logits = model(
            input_ids=rollouts.input_ids,
            attention_mask=rollouts.attention_mask.long(),
            position_ids=rollouts.position_ids,
        ).logits[:, -rollouts.responses.shape[1] - 1 : -1]
    kept = TopPLogitsWarper(top_p)(None, (logits / temperature).flatten(0, 1)).view_as(logits)
    expected = kept.log_softmax(-1).gather(-1, rollouts.responses[..., None]).squeeze(-1)
    mask = rollouts.response_mask
    torch.testing.assert_close(rollouts.rollout_log_probs[mask], expected[mask], atol=2e-5, rtol=0)
    assert (rollouts.rollout_log_probs[~mask] == 0).all()


@needs_vllm
def test_it_says_what_it_sampled_from(model, answers):
    """So the trainer, restricted to that, has the engine's log-probs."""
    rollouts = answers["kept"]
    counts = rollouts.kept.counts[rollouts.response_mask]
    assert counts.min() >= 1
    assert 1 < counts.max() <= 6
    policy = PolicyModule(model, NUCLEUS.temperature)
    with torch.no_grad():
        found = policy_output(policy, rollouts.inputs).log_probs
    torch.testing.assert_close(found, rollouts.rollout_log_probs, atol=2e-5, rtol=0)
    assert not rollouts.aborted.any()


@needs_vllm
def test_it_lists_the_most_likely_tokens(model, answers):
    rollouts = answers["most_likely"]
    assert torch.equal(rollouts.most_likely.counts, rollouts.response_mask.int() * 4)
    inputs = replace(rollouts.inputs, most_likely=rollouts.most_likely)
    with torch.no_grad():
        found = policy_output(PolicyModule(model, NUCLEUS.temperature), inputs).most_likely
    _, log_probs = rollouts.most_likely.padded(rollouts.response_mask)
    torch.testing.assert_close(found, log_probs, atol=2e-5, rtol=0)
    assert (log_probs.diff() <= 0).all()


@needs_vllm
def test_options_reach_the_engine(answers):
    assert answers["block_size"] == 32


@needs_vllm
def test_a_sample_depends_on_its_prompt_and_place_only(answers):
    whole, part = answers["whole"].response_texts, answers["part"].response_texts
    assert answers["again"].response_texts == whole
    assert part == whole[16:20] + whole[4:8]
    assert len(set(whole)) > 1


@needs_vllm
def test_greedy_is_the_other_engines_greedy(model, answers):
    prompts, sampling = make_prompts(), Sampling(max_response_length=9, greedy=True)
    expected = HFRollout(model, TOKENIZER, "cpu").generate(
        prompts, sampling, n=1, step_seed=11, num_groups_total=len(TEXTS)
    )
    found = answers["greedy"]
    assert found.response_texts == expected.response_texts
    torch.testing.assert_close(found.rollout_log_probs, expected.rollout_log_probs, atol=2e-5, rtol=0)
    assert found.truncated.tolist() == expected.truncated.tolist()


@needs_vllm
def test_truncated_means_the_limit_came_first(answers):
    plain = answers["plain"]
    lengths = plain.response_mask.sum(1)
    last = plain.responses.gather(1, lengths[:, None] - 1).squeeze(1)
    assert plain.truncated.tolist() == (last != TOKENIZER.eos_token_id).tolist()
    assert (lengths[plain.truncated] == 9).all()
    assert 0 < int(plain.truncated.sum()) < len(lengths)


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
