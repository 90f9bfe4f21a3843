"""The client of vLLM servers in flight, against a real HTTP server: calls, versions, repeated requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.rollout import server_client, vllm_server
from rlctl.rollout.build_vllm import reachable
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.protocol import Request
from rlctl.rollout.shared_engine import InFlightRollout
from rlctl.rollout.vllm_server import GENERATE, VLLMServerRollout
from tests.unit.rollout.stub_server import SAMPLING, Server, engine_on, sample

IN_FLIGHT = ("rollout.in_flight=true", "rollout.max_staleness=1")


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.shutdown()
    one.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "RETRY_S", 0.01)


def started(server: Server, tmp_path: Path, *overrides: str) -> tuple[VLLMServerRollout, Any]:
    engine, model = engine_on([server], tmp_path, *IN_FLIGHT, *overrides)
    send(engine, model, 4)
    return engine, model


def send(engine: VLLMServerRollout, model: Any, version: int) -> None:
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=version)


@pytest.mark.parametrize(("cache", "clears"), [("recompute", "true"), ("clear", "false"), ("keep", "false")])
def test_an_update_pauses_sends_names_the_version_and_resumes(
    server: Server, tmp_path: Path, cache: str, clears: str
) -> None:
    engine, model = started(server, tmp_path, f"rollout.stale_cache={cache}")
    pause = f"/pause?mode=keep&clear_cache={clears}"
    assert server.paths() == [pause, "/collective_rpc", "/update_weight_version", "/resume"]
    sampler, requests = InFlightRollout(engine), [Request([5], 2), Request([5], 13)]
    turns = sampler.sample(requests, SAMPLING)
    assert [turn.token_ids.tolist()[:-1] for turn in turns] == [[5] * 2, [5] * 3]
    assert [float(turn.log_probs[0]) for turn in turns] == [-2.5, -3.5]
    assert [turn.versions.tolist() for turn in turns] == [[4] * 3, [4] * 4]
    tag, [(path, body), _] = server.weight_version, server.asked[-2:]
    assert path == GENERATE
    assert body.get("cache_salt") == (None if cache == "keep" else tag)
    assert body["sampling_params"]["repetition_penalty"] == 1.0
    sample(engine)  # the trainer's own requests never share blocks of older weights
    assert server.asked[-1][1]["cache_salt"] == tag
    assert server.asked[-1][1]["priority"] < body.get("priority", 0)
    send(engine, model, 5)
    sample(engine)
    assert server.asked[-1][1]["cache_salt"] == server.weight_version != tag
    engine.close()


def test_an_update_waits_for_no_open_request(server: Server, tmp_path: Path) -> None:
    """And the request has the versions that sampled its tokens."""
    engine, model = started(server, tmp_path)
    server.may_answer.clear()
    first = server.weight_version
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(engine.sample_in_flight, [Request([5], 2)], SAMPLING)
        assert server.is_asked.wait(60)
        send(engine, model, 7)
        assert not waiting.done()
        names = (first, 0, 2), (server.weight_version, 2, 3)
        server.weight_versions = [[{"version": v, "start": a, "end": b} for v, a, b in names]]
        server.may_answer.set()
        [turn] = waiting.result(60)
    assert turn.versions.tolist() == [4, 4, 7]
    engine.close()


@pytest.mark.parametrize(
    "spans", [[("default", 0, 3)], [("default", 0, 1), (None, 1, 3)], [(None, 0, 2)], []], ids=str
)
def test_tokens_of_weights_that_this_run_did_not_send_are_sampled_again(
    server: Server, tmp_path: Path, spans: list[tuple[str | None, int, int]]
) -> None:
    """Of a server that was restarted, or of another run; and tokens without a version."""
    engine, _ = started(server, tmp_path)
    tag = server.weight_version
    server.weight_versions = [[{"version": v or tag, "start": a, "end": b} for v, a, b in spans]]
    if spans and spans[0][0]:
        server.weight_version = "default"
    [turn] = engine.sample_in_flight([Request([5], 2)], SAMPLING)
    assert turn.versions.tolist() == [4] * 3
    assert server.weight_version == tag
    assert engine.report().num_repeated == 1
    server.weight_versions = [[{"version": "default", "start": 0, "end": 3}]] * 3
    with pytest.raises(RunFailure, match="repeatedly"):
        engine.sample_in_flight([Request([5], 2)], SAMPLING)
    engine.close()


def test_an_older_vllm_is_named(server: Server, tmp_path: Path) -> None:
    """It returns no versions at all."""
    engine, _ = started(server, tmp_path)
    server.weight_versions = [None]
    with pytest.raises(RunFailure, match="does not report which weights sampled a token") as caught:
        engine.sample_in_flight([Request([5], 2)], SAMPLING)
    assert "0.32" in str(caught.value.fix)
    engine.close()


def test_a_server_that_hangs_up_is_asked_again(server: Server, tmp_path: Path) -> None:
    engine, _ = started(server, tmp_path)
    server.trouble = [0, 500]
    [turn] = engine.sample_in_flight([Request([5], 1)], SAMPLING)
    assert turn.versions.tolist() == [4, 4]
    assert engine.report().num_repeated == 2
    engine.close()


def test_most_likely_tokens_are_listed_as_by_other_requests(server: Server, tmp_path: Path) -> None:
    engine, _ = started(server, tmp_path)
    [turn] = engine.sample_in_flight([Request([5], 1)], replace(SAMPLING, num_most_likely=2))
    assert turn.most_likely.counts.tolist() == [2, 2]
    assert torch.equal(turn.most_likely.ids[:2], torch.tensor([5, 3], dtype=torch.int32))
    engine.close()


def test_a_server_that_was_not_started_for_it_is_refused(server: Server) -> None:
    reachable([server.url], seconds=60, in_flight=True)
    server.scheduling_policy = "fcfs"
    with pytest.raises(EnvironmentFailure, match="has no priorities") as caught:
        reachable([server.url], seconds=60, in_flight=True)
    server.scales_out = False
    reachable([server.url], seconds=60)
    with pytest.raises(EnvironmentFailure, match="does not report which weights") as caught:
        reachable([server.url], seconds=60, in_flight=True)
    assert "--enable-scale-out and --scheduling-policy priority" in str(caught.value.fix)


def test_the_trainers_own_requests_wait_for_no_request_in_flight(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are open: a sync is tested, and a policy validated, meanwhile."""
    monkeypatch.setattr(vllm_server, "CONNECTIONS", 2)
    engine, _ = started(server, tmp_path)
    server.answers_in_flight.clear()
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(engine.sample_in_flight, [Request([5], 1)] * 6, SAMPLING)
        assert server.is_asked.wait(60)
        assert len(sample(engine)) == 6
        assert not waiting.done()
        server.answers_in_flight.set()
        assert len(waiting.result(60)) == 6
    engine.close()


def test_closing_the_engine_ends_open_requests(server: Server, tmp_path: Path) -> None:
    """So that a run that is stopped does not wait for them."""
    engine, _ = started(server, tmp_path)
    server.may_answer.clear()
    sampler = InFlightRollout(engine)
    threading.Timer(0.2, sampler.close).start()
    for _ in range(2):  # one that is open, and a later one
        with pytest.raises(RunFailure, match="closed"):
            sampler.sample([Request([5], 1)], SAMPLING)
    engine.close()
    server.may_answer.set()
