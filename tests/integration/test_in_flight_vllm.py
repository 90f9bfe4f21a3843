"""Weights that change while a real vLLM server samples: versions and log-probs of every token, exactly."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from rlctl.rollout import server_process, weight_sync
from rlctl.rollout.build_vllm import build_vllm
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.protocol import Request, Sampling
from rlctl.rollout.server_access import KEY
from rlctl.rollout.server_client import ServerClient
from rlctl.rollout.vllm_server import GENERATE, VLLMServerRollout
from rlctl.run_spec.model import RECIPE
from rlctl.tiny.model import build_model
from tests import hooks
from tests.processes import wait_until_ended, writers_to
from tests.unit.rollout.stub_server import context_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
#: Seconds until a test that hangs fails.
LIMIT_S = 300.0
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


@contextlib.contextmanager
def started(
    forked_vllm: Path, directory: Path, *, in_flight: bool
) -> Iterator[tuple[VLLMServerRollout, Path]]:
    """An engine with a server that is a fork; its responses end at the limit only."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server_process, "subprocess", subprocess)
        patched.setattr(server_process, "_STOP_S", 1)
        patched.setattr(weight_sync, "SYNC_S", 20.0)
        patched.setenv(KEY, "a-key-of-this-test-alone")
        patched.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        hooks.servers_are_forks(str(forked_vllm / "python"))
        settings = (
            *(("rollout.in_flight=true", "rollout.max_staleness=1") if in_flight else ()),
            f"data.max_response_length={LENGTH}",
            "data.max_prompt_length=8",
            f"rollout.server.weights_dir={directory / 'weights'}",
            "rollout.server.answer_timeout=20",  # until a stopped server is started again
            "rollout.server.max_restarts=9",
        )
        context = context_of(policy(0), *settings)
        object.__setattr__(context, "run_dir", directory)
        built = build_vllm(context)
        built._eos_ids = []
        parameters = built._parameters

        def endless(sampling: Sampling, request: Request) -> dict[str, Any]:
            return parameters(sampling, request) | {"ignore_eos": True}

        patched.setattr(built, "_parameters", endless)
        try:
            send(built, 0)  # starts the server
            yield built, directory
        finally:
            built.close()


@pytest.fixture(scope="module")
def engine(
    forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VLLMServerRollout, Path]]:
    with started(forked_vllm, tmp_path_factory.mktemp("server"), in_flight=True) as running:
        yield running


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


def signal_server(number: signal.Signals, directory: Path) -> None:
    """Sends a signal to the server, SIGSTOP to its engine too.

    Both are forks of a process of the tests, for which `server` stands: what a kill of its group would end is
    ended with it.
    """
    [server] = [
        child
        for child in psutil.Process(os.getpid()).children(recursive=True)
        if "rlctl.rollout.server_process" in child.cmdline() and "--port" in child.cmdline()
    ][:1]
    if number != signal.SIGSTOP:
        server.send_signal(number)
        return
    stopped = [pid for pid in writers_to(directory / "engines") if pid != server.pid]
    assert len(stopped) >= 2
    for pid in stopped:
        os.kill(pid, number)

    def end() -> None:
        wait_until_ended([server.pid], LIMIT_S)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


def before_request(monkeypatch: pytest.MonkeyPatch, chosen: str, action: Callable[[], None]) -> list[str]:
    """Calls a function right before the next request to a path; returns the list of calls, at most one."""
    send_request, called = ServerClient.send, list[str]()

    async def send_after(self: ServerClient, url: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.partition("?")[0] == chosen and not called:
            called.append(path)
            action()
        return await send_request(self, url, path, *args, **kwargs)

    monkeypatch.setattr(ServerClient, "send", send_after)
    return called


def assert_sampled_by(turns: list[Turn], version: int) -> None:
    """All tokens of whole turns are of one version, and their log-probs are those of its policy."""
    for turn in turns:
        assert set(turn.versions.tolist()) == {version}
        assert len(turn.token_ids) == LENGTH
        assert float((turn.log_probs - expected(turn, keeps=False)).abs().max()) < 1e-4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_fails_while_it_samples_loses_no_request(
    engine: tuple[VLLMServerRollout, Path], number: signal.Signals
) -> None:
    """Those that were open are repeated, with the newest weights, and counted."""
    rollout, directory = engine
    rollout._weights.cache = "recompute"
    before = rollout.report().num_repeated
    send(rollout, 9)
    # A paused engine ends no request, on however fast a machine; a server that was restarted is not paused.
    rollout._client.run(rollout._client.everywhere(rollout._weights.pause))
    with ThreadPoolExecutor(COUNT) as threads:
        requests = [Request(PROMPT, seed=seed, max_tokens=LENGTH) for seed in range(COUNT)]
        turns = [threads.submit(rollout.sample_in_flight, [request], SAMPLING) for request in requests]
        threading.Timer(0.3, signal_server, (number, directory)).start()
        found = [turn for one in turns for turn in one.result(LIMIT_S)]
    assert rollout.report().num_repeated > before
    assert_sampled_by(found, 9)


@pytest.mark.parametrize(
    ("number", "path", "version"),
    [(signal.SIGKILL, "/collective_rpc", 10), (signal.SIGSTOP, "/update_weight_version", 11)],
)
def test_a_server_that_fails_in_a_weight_update_gets_the_whole_update(
    engine: tuple[VLLMServerRollout, Path],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    path: str,
    version: int,
) -> None:
    """Killed, or stopped, when it is asked to load the weights, or to name them; requests are open."""
    rollout, directory = engine
    rollout._weights.cache = "recompute"
    with ThreadPoolExecutor(COUNT) as threads:
        requests = [Request(PROMPT, seed=seed, max_tokens=LENGTH) for seed in range(COUNT)]
        turns = [threads.submit(rollout.sample_in_flight, [request], SAMPLING) for request in requests]
        signalled = before_request(monkeypatch, path, lambda: signal_server(number, directory))
        threads.submit(send, rollout, version).result(LIMIT_S)
        for turn in (turn for one in turns for turn in one.result(LIMIT_S)):
            assert set(turn.versions.tolist()) <= {version - 1, version}
            assert float((turn.log_probs - expected(turn, keeps=False)).abs().max()) < 1e-4
    assert signalled
    assert_sampled_by(rollout.sample([Request(PROMPT, seed=1, max_tokens=LENGTH)], SAMPLING), version)


def test_pausing_sampling_and_replacing_weights_need_the_key(engine: tuple[VLLMServerRollout, Path]) -> None:
    rollout, _ = engine
    paths = ("/pause", "/resume", "/update_weight_version", "/collective_rpc", "/abort_requests", GENERATE)
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer x"}):
            answer = httpx.post(rollout._urls[0] + path, json={}, headers=headers, trust_env=False)
            assert answer.status_code == 401, path


#: As another user: what the processes named in its input show, and what their ports answer.
SECOND_USER = """
import json, os, pathlib, socket, sys
pids, ports = json.load(sys.stdin)
shown = ""
socket.getaddrinfo("127.0.0.1", 1)  # imports what the other user may not read
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for pid in pids:
    for name in ("environ", "cmdline", "maps", "fd", "status", "cwd"):
        try:
            path = pathlib.Path(f"/proc/{pid}/{name}")
            shown += repr(list(path.iterdir()) if name == "fd" else path.read_bytes())
        except OSError:
            shown += f" {name} refused"
for port in ports:
    for text in (b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n", b"\\0" * 64):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as one:
                one.settimeout(2)
                one.sendall(text)
                shown += f" {port}: {one.recv(4096)!r}"
        except OSError as error:
            shown += f" {port}: {type(error).__name__}"
print(os.getuid(), shown)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_gets_nothing(engine: tuple[VLLMServerRollout, Path]) -> None:
    """No environment, no key, no answer of a port; the key is in no command line and no file of the run."""
    rollout, directory = engine
    [sample] = rollout.sample([Request(PROMPT, seed=1, max_tokens=4)], SAMPLING)
    assert len(sample.token_ids) == 4  # the server is ready, and its ports are closed
    key = os.environ[KEY]
    pids = {*writers_to(directory / "engines")}
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in pids]
    ports = sorted({connection.laddr.port for connection in listening})
    assert ports
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SECOND_USER],
        input=json.dumps([sorted(pids), ports]),
        capture_output=True,
        text=True,
        cwd="/",
        env={},
        check=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.startswith("65534 ")
    assert done.stdout.count("environ refused") == len(pids)
    assert key not in done.stdout
    for port in ports:
        answers = done.stdout.split(f" {port}: ")[1:]
        assert len(answers) == 2
        for answer in answers:
            is_refused = "401" in answer or "400" in answer
            assert is_refused or answer.split()[0] in {"TimeoutError", "ConnectionRefusedError", "b''"}, (
                answer
            )
    files = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert files
    assert [path for path in files if key.encode() in path.read_bytes()] == []
