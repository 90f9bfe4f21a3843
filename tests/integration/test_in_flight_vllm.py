"""Weights that change while a real vLLM server samples: versions and log-probs of every token, exactly."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import DynamicCache

from rlctl.batch import Turn
from rlctl.rollout import server_process
from rlctl.rollout.build_vllm import build_vllm
from rlctl.rollout.protocol import PlainWeights, Request, Sampling
from rlctl.rollout.server_access import KEY
from rlctl.rollout.vllm_server import GENERATE, VLLMServerRollout
from rlctl.spec.model import RECIPE
from rlctl.tiny.model import build_model
from tests import hooks
from tests.unit.rollout.stub_server import context_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
LENGTH, PROMPT, COUNT = 480, [3, 4, 5], 4
SAMPLING = Sampling(max_response_length=LENGTH)


def policy(version: int) -> Any:
    """Random weights, another direction for each version; its responses seldom end."""
    recipe = replace(RECIPE, max_position_embeddings=512)
    torch.manual_seed(0)
    model = build_model(recipe).eval()
    with torch.no_grad():
        for weight in model.parameters():
            generator = torch.Generator().manual_seed(version)
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=generator))
        model.lm_head.weight.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def engine(
    forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMServerRollout, Path]]:
    directory = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_process, "subprocess", subprocess)
        patched.setenv(KEY, "a key")
        patched.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        hooks.servers_are_forks(str(forked_vllm / "python"))
        settings = (
            "rollout.in_flight=true",
            "rollout.max_staleness=1",
            f"data.max_response_length={LENGTH}",
            "data.max_prompt_length=8",
            f"rollout.server.weights_dir={directory / 'weights'}",
        )
        context = context_of(policy(0), *settings)
        object.__setattr__(context, "run_dir", directory)
        built = build_vllm(context)
        built._eos_ids = []
        parameters = built._parameters

        def endless(sampling: Sampling, request: Request) -> dict[str, Any]:
            return parameters(sampling, request) | {"ignore_eos": True}

        patched.setattr(built, "_parameters", endless)
        yield built, directory
        built.close()


def send(engine: VLLMServerRollout, version: int) -> None:
    engine.sync_weights(PlainWeights(policy(version).state_dict().items()), policy_version=version)


def sampled(engine: VLLMServerRollout, versions: list[int]) -> list[Turn]:
    """Turns during which these versions were sent one after the other."""
    send(engine, versions[0])
    with ThreadPoolExecutor(COUNT) as threads:
        turns = [
            threads.submit(engine.sample_in_flight, [Request(PROMPT, seed=seed, max_tokens=LENGTH)], SAMPLING)
            for seed in range(COUNT)
        ]
        for version in versions[1:]:
            time.sleep(0.05)
            send(engine, version)
        return [turn for one in turns for turn in one.result()]


@torch.no_grad()
def expected(turn: Turn, *, keeps: bool) -> torch.Tensor:
    """(t,) log-probs of a turn: of each token under its version, with the cache of older ones or without."""
    ids, found, cache = torch.tensor([*PROMPT, *turn.token_ids.tolist()]), [], DynamicCache()
    versions = turn.versions.tolist()
    for version in sorted(set(versions)):
        first, count = versions.index(version), versions.count(version)
        end = len(PROMPT) + first + count - 1  # the last token of this version is not read by it
        cache = cache if keeps else DynamicCache()
        start = cache.get_seq_length()
        logits = policy(version)(input_ids=ids[None, start:end], past_key_values=cache).logits[0]
        chosen = ids[len(PROMPT) + first : end + 1]
        found.append(logits[-count:].log_softmax(-1).gather(1, chosen[:, None]).squeeze(1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("cache", "versions"), [("recompute", [1, 2, 3]), ("keep", [4, 5, 6]), ("clear", [7, 8])]
)
def test_every_log_prob_is_that_of_the_policy_that_sampled(
    engine: tuple[VLLMServerRollout, Path], cache: str, versions: list[int]
) -> None:
    """Of which version, at which token, and with whose cache: to rounding."""
    rollout, _ = engine
    rollout._weights.cache = cache
    for _ in range(5):  # until an update meets an open response
        turns = sampled(rollout, versions)
        counts = [len(set(turn.versions.tolist())) for turn in turns]
        if max(counts) > 1:
            break
    assert max(counts) > 1
    for turn, count in zip(turns, counts, strict=True):
        assert turn.versions.diff().min() >= 0
        assert set(turn.versions.tolist()) <= set(versions)
        right, wrong = (expected(turn, keeps=keeps) for keeps in (cache != "recompute", cache == "recompute"))
        assert float((turn.log_probs - right).abs().max()) < 1e-4
        if count > 1:
            assert float((turn.log_probs - wrong).abs().max()) > 1e-2
    # The trainer's own requests, such as validation, never read blocks of older weights.
    [fresh] = rollout.sample([Request(PROMPT, seed=1, max_tokens=4)], SAMPLING)
    assert set(fresh.versions.tolist()) == {versions[-1]}
    assert float((fresh.log_probs - expected(fresh, keeps=False)).abs().max()) < 1e-4


def test_a_server_that_is_killed_while_it_samples_loses_no_request(
    engine: tuple[VLLMServerRollout, Path],
) -> None:
    """Those that were open are repeated, with the newest weights, and counted."""
    rollout, _ = engine
    rollout._weights.cache = "recompute"
    before = rollout.num_repeated
    send(rollout, 9)
    [server] = [
        child
        for child in psutil.Process(os.getpid()).children(recursive=True)
        if "rlctl.rollout.server_process" in child.cmdline() and "--port" in child.cmdline()
    ][:1]
    # A paused engine ends no request, on however fast a machine; a server that was restarted is not paused.
    rollout._client.run(rollout._client.everywhere(rollout._weights.pause))
    with ThreadPoolExecutor(COUNT) as threads:
        requests = [Request(PROMPT, seed=seed, max_tokens=LENGTH) for seed in range(COUNT)]
        turns = [threads.submit(rollout.sample_in_flight, [request], SAMPLING) for request in requests]
        threading.Timer(0.3, server.send_signal, (signal.SIGKILL,)).start()
        found = [turn for one in turns for turn in one.result()]
    assert rollout.num_repeated > before
    for turn in found:
        assert set(turn.versions.tolist()) == {9}
        assert len(turn.token_ids) == LENGTH
        assert float((turn.log_probs - expected(turn, keeps=False)).abs().max()) < 1e-4


def test_pausing_sampling_and_replacing_weights_need_the_key(engine: tuple[VLLMServerRollout, Path]) -> None:
    rollout, _ = engine
    paths = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/abort_requests", GENERATE)
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer x"}):
            answer = httpx.post(rollout._urls[0] + path, json={}, headers=headers, trust_env=False)
            assert answer.status_code == 401, path
