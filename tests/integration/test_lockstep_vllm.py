"""A real vLLM server in lockstep that is killed, stopped, slow or misread, in sampling and in updates.

Every token is of the newest weights, with its exact log-prob, or the request is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlctl.batch import Turn
from rlctl.rollout.protocol import Request
from rlctl.rollout.server_client import TRIES, ServerClient
from rlctl.rollout.vllm_server import VLLMServerRollout
from tests.integration.test_in_flight_vllm import (
    COUNT,
    LENGTH,
    LIMIT_S,
    PROMPT,
    SAMPLING,
    assert_sampled_by,
    before_request,
    send,
    signal_server,
    started,
)
from tests.processes import writers_to

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
REQUESTS = [Request(PROMPT, seed=seed, max_tokens=LENGTH) for seed in range(COUNT)]
#: What a proxy, or a broken server, answers with status 200.
GARBAGE = ("", "null", '{"choices": []}', "<html>Bad gateway</html>")
SAMPLES, LOADS, NAMES = "/v1/completions", "/collective_rpc", "/update_weight_version"


@pytest.fixture(scope="module")
def engine(
    forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMServerRollout, Path]]:
    with started(forked_vllm, tmp_path_factory.mktemp("server"), in_flight=False) as running:
        yield running


def sampled(engine: VLLMServerRollout) -> list[Turn]:
    """Turns of `REQUESTS`; a sampler that hangs fails the test."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(engine.sample, REQUESTS, SAMPLING).result(LIMIT_S)


def stop(directory: Path, seconds: float | None, number: signal.Signals | None) -> None:
    """Stops server and engine, so that no request ends before; later sends another signal."""
    pids = writers_to(directory / "engines")
    signal_server(signal.SIGSTOP, directory)

    def later() -> None:
        if number == signal.SIGKILL:
            signal_server(number, directory)
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    if seconds is not None:
        threading.Timer(seconds, later).start()


#: Fault → how many seconds the server is stopped before another signal (None: until it is started again).
FAULTS = {
    "killed": (0.5, signal.SIGKILL),
    "stopped": (None, None),
    "slow": (4.0, signal.SIGCONT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_in_sampling(
    engine: tuple[VLLMServerRollout, Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    rollout, directory = engine
    version = 20 + list(FAULTS).index(fault)
    send(rollout, version)
    before = rollout.report().num_repeated
    called = before_request(monkeypatch, SAMPLES, lambda: stop(directory, *FAULTS[fault]))
    assert_sampled_by(sampled(rollout), version)
    assert called
    if fault != "slow":  # on a busy machine a slow server may be started again, too
        assert rollout.report().num_repeated - before >= COUNT


@pytest.mark.parametrize(("fault", "path"), [("killed", LOADS), ("stopped", NAMES), ("slow", LOADS)])
def test_in_a_weight_update(
    engine: tuple[VLLMServerRollout, Path], monkeypatch: pytest.MonkeyPatch, fault: str, path: str
) -> None:
    """Before the server loads the weights, or after it and before their version is named."""
    rollout, directory = engine
    version = 30 + list(FAULTS).index(fault)
    called = before_request(monkeypatch, path, lambda: stop(directory, *FAULTS[fault]))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(send, rollout, version).result(LIMIT_S)
    assert called
    assert_sampled_by(sampled(rollout), version)


@pytest.mark.parametrize(("misread", "count"), [(SAMPLES, COUNT), ("/weight_info", TRIES - 1)])
def test_garbage_for_answers(
    engine: tuple[VLLMServerRollout, Path], monkeypatch: pytest.MonkeyPatch, misread: str, count: int
) -> None:
    """Between server and trainer: an answer is replaced, or comes slowly; the next one is its own again."""
    rollout, _ = engine
    version = 50 + len(misread)
    send(rollout, version)
    send_request, left = ServerClient.send, list(GARBAGE[:count])

    async def replaced(self: ServerClient, url: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answer = await send_request(self, url, path, *args, **kwargs)
        if path != misread or not left:
            return answer
        await asyncio.sleep(0.2)
        return httpx.Response(200, text=left.pop(), headers=dict(answer.headers))

    monkeypatch.setattr(ServerClient, "send", replaced)
    turns = sampled(rollout)
    assert left == []
    assert_sampled_by(turns, version)
