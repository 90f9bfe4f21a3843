"""New weights by broadcast: a real group, servers that implement vLLM's protocol, and every kind of server
failure."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.rollout import server_client, weight_broadcast
from rlctl.rollout.build_vllm import _can_broadcast, replica_settings
from rlctl.rollout.expected_weights import ExpectedWeights, PlainWeights
from rlctl.rollout.vllm_server import VLLMServerRollout
from rlctl.rollout.weight_broadcast import WeightBroadcast, join_gloo
from rlctl.rollout.weights import chunks
from rlctl.run_spec.load import load_spec
from tests.unit.rollout.stub_server import Server, engine_on, sample, versions_of
from tests.unit.rollout.test_hf_rollout import random_model


class Worker:
    """The one worker of a stub server: vLLM's engine for weight transfer, limited to the interface that the
    trainer uses."""

    def __init__(self, server: Server) -> None:
        self.weights: dict[str, Tensor] = {}
        self.loading: dict[str, Tensor] | None = None  # of an open session
        self.refuses: Callable[[str], bool] = lambda _path: False
        server.loads = self

    def __call__(self, path: str, body: dict[str, Any]) -> None:
        if self.refuses(path):
            raise ValueError("out of memory, says the worker")
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            where = info["master_address"], info["master_port"]
            self.group = join_gloo(*where, info["rank_offset"], info["world_size"])
        elif path == "/start_weight_update":
            assert self.loading is None
            self.loading = {}
        elif path == "/update_weights":
            info = body["update_info"]
            counts = [torch.Size(shape).numel() for shape in info["shapes"]]
            flat = torch.empty(sum(counts), dtype=getattr(torch, info["dtype_names"][0]))
            self.group.broadcast(flat.view(torch.uint8), 0).wait()
            assert self.loading is not None
            for name, part, shape in zip(info["names"], flat.split(counts), info["shapes"], strict=True):
                self.loading[name] = part.view(shape)
        elif path == "/finish_weight_update":
            assert self.loading is not None
            self.weights, self.loading = self.loading, None


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    monkeypatch.setattr(server_client, "RETRY_S", 0.01)
    monkeypatch.setattr(weight_broadcast, "_CONNECT_S", 10.0)
    monkeypatch.setattr(weight_broadcast, "_GLOO_S", 3.0)
    before, both = set(threading.enumerate()), [Server(), Server()]
    yield both
    for server in both:
        server.shutdown()
        server.server_close()
    for thread in set(threading.enumerate()) - before:
        if thread.name != "rollouts-http":  # it never ends
            thread.join(15.0)  # one that gloo holds when the interpreter ends would abort the process


def broadcasting(
    servers: list[Server], tmp_path: Path, *overrides: str, **options: Any
) -> tuple[VLLMServerRollout, Any, list[Worker]]:
    workers = [Worker(server) for server in servers]
    engine, model = engine_on(servers, tmp_path, *overrides, **options)
    broadcast = WeightBroadcast(engine._client, ExpectedWeights(model), torch.device("cpu"))
    engine._weights.broadcast = broadcast
    engine._held.callback(broadcast.close)
    return engine, model, workers


def sync(engine: VLLMServerRollout, model: Any, version: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=version)


@pytest.mark.parametrize("chunk_bytes", [2**29, 12_000])
def test_every_server_gets_every_weight_and_nothing_is_written(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(weight_broadcast, "CHUNK_BYTES", chunk_bytes)
    engine, model, workers = broadcasting(servers, tmp_path)
    for version in (1, 2):
        sync(engine, model, version)
        for worker in workers:
            assert worker.weights.keys() == model.state_dict().keys()
            for name, value in model.state_dict().items():
                assert torch.equal(worker.weights[name], value), name
        assert versions_of(sample(engine)) == {version}
    paths = servers[0].paths()
    assert paths.count("/init_weight_transfer_engine") == 1
    assert (paths.count("/update_weights") > 2) == (chunk_bytes < 2**29)
    assert "/collective_rpc" not in paths
    assert paths[-5:] == ["/reset_prefix_cache", "/update_weight_version", *["/v1/completions"] * 3]
    assert not list((tmp_path / "weights").rglob("*.safetensors"))
    assert engine.report().description == "2 vLLM servers, weights by broadcast"
    engine.close()


@pytest.mark.slow  # imports vLLM
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_requests_are_those_of_vllms_nccl_engine(servers: list[Server], tmp_path: Path) -> None:
    """Its own records take them, and workers get the ranks that it would give them."""
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    engine, model, _ = broadcasting(servers, tmp_path)
    sync(engine, model, 1)
    engine.close()
    offsets = []
    for server in servers:
        bodies = dict(server.asked)
        info = NCCLWeightTransferInitInfo(**bodies["/init_weight_transfer_engine"]["init_info"])
        assert (info.packed, info.world_size) == (True, 3)
        offsets.append(info.rank_offset)
        update = NCCLWeightTransferUpdateInfo(**bodies["/update_weights"]["update_info"])
        assert dataclasses.asdict(update)["names"] == list(model.state_dict())
    assert offsets == [1, 2]


def test_a_server_that_started_again_answers_nothing_until_the_next_sync(
    servers: list[Server], tmp_path: Path
) -> None:
    """It answers requests with unknown weights."""
    engine, model, workers = broadcasting(servers, tmp_path)
    sync(engine, model, 1)
    servers[1].weight_version = "default"
    assert len(sample(engine)) == 6
    assert engine._weights.lost == {servers[1].url}
    before = len(servers[1].paths())
    assert len(sample(engine)) == 6
    assert len(servers[1].paths()) == before
    sync(engine, model, 2)
    assert servers[1].paths().count("/init_weight_transfer_engine") == 2
    assert torch.equal(workers[1].weights["lm_head.weight"], model.lm_head.weight)
    sample(engine)
    assert servers[1].paths()[-1] == "/v1/completions"
    servers[0].weight_version = servers[1].weight_version = "default"
    with pytest.raises(RunFailure, match="lost the weights that were broadcast") as caught:
        sample(engine)
    assert "weight_transfer=files" in str(caught.value.fix)
    engine.close()


def test_a_server_that_went_away_and_came_back_whole_is_asked_again(
    servers: list[Server], tmp_path: Path
) -> None:
    engine, model, _ = broadcasting(servers, tmp_path)
    sync(engine, model, 1)
    servers[1].trouble = [500]
    assert len(sample(engine)) == 6
    assert engine._weights.lost == set()
    assert servers[1].paths().count("/v1/completions") == 4
    engine.close()


@pytest.mark.parametrize("is_needed", [False, True])
def test_without_a_group_weights_are_files_unless_it_is_asked_for(
    servers: list[Server], tmp_path: Path, is_needed: bool
) -> None:
    how = ["rollout.server.weight_transfer=broadcast"] if is_needed else []
    engine, model, workers = broadcasting(servers, tmp_path, *how, starts_empty=True)
    workers[1].refuses = lambda path: path == "/init_weight_transfer_engine"
    if is_needed:
        with pytest.raises(RunFailure, match="out of memory, says the worker") as caught:
            sync(engine, model, 1)
        assert caught.value.where == servers[1].url
        with pytest.raises(RunFailure, match="old and new weights"):
            sample(engine)
    else:
        sync(engine, model, 1)
        assert versions_of(sample(engine)) == {1}
        methods = [body.get("method") for path, body in servers[0].asked if path == "/collective_rpc"]
        assert methods == ["update_config", "reload_weights"]  # its loader reads no files otherwise
        (note,) = engine.report().notes
        assert "as files" in note
        assert "out of memory, says the worker" in note
        assert engine.report().description == "2 vLLM servers, weights by files"
    engine.close()


@pytest.mark.parametrize("moment", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_server_that_fails_in_the_middle_leaves_no_mixture(
    servers: list[Server], tmp_path: Path, moment: str
) -> None:
    """The other one waits for its part of a broadcast or has new weights: nothing is sampled from either."""
    engine, model, workers = broadcasting(servers, tmp_path)
    sync(engine, model, 1)
    workers[1].refuses = lambda path: path == moment
    with pytest.raises(RunFailure, match="out of memory, says the worker"):
        sync(engine, model, 2)
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)
    engine.close()


def test_weights_that_are_incomplete_end_no_session(servers: list[Server], tmp_path: Path) -> None:
    engine, model, workers = broadcasting(servers, tmp_path)
    some = list(model.state_dict().items())
    with pytest.raises(RunFailure, match="is missing"):
        engine.sync_weights(PlainWeights(some[1:]), policy_version=1)
    assert [worker.weights for worker in workers] == [{}, {}]
    with pytest.raises(RunFailure, match="old and new weights"):
        sample(engine)
    engine.close()


def test_chunks_hold_one_dtype_and_copies() -> None:
    gathered = torch.zeros(3)

    def weights() -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for number in range(3):  # in the same memory, as under ZeRO-3
            yield (f"w{number}",), gathered.fill_(number)
        yield ("head", "embedding"), torch.ones(2, 2, dtype=torch.bfloat16)

    first, second = chunks(weights(), 2**20, "cpu")
    assert {name: value.tolist() for name, value in first.items()} == {f"w{i}": [i] * 3 for i in range(3)}
    assert {name: (value.dtype, value.shape) for name, value in second.items()} == dict.fromkeys(
        ["head", "embedding"], (torch.bfloat16, (2, 2))
    )
    assert [len(chunk) for chunk in chunks(weights(), 24, "cpu")] == [2, 1, 2]


def test_servers_are_started_for_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["rollout.name=vllm", "rollout.mode=server"]
    for more, is_cuda, backend in (
        ([], False, ""),
        ([], True, "nccl"),
        (["rollout.server.weight_transfer=files"], True, ""),
        (["rollout.server.weight_transfer=broadcast"], False, "gloo"),
        (["model.lora_rank=3", "rollout.dtype=bf16"], True, ""),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_cuda=is_cuda: is_cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        settings = replica_settings(load_spec([], [], [*given, *more]).spec)
        transfer = {"backend": backend} if backend else None
        assert settings.options.get("weight_transfer_config") == transfer, more
        assert ("worker_extension_cls" in settings.options) == (backend == "gloo"), more
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = replica_settings(load_spec([], [], given).spec).arguments("m")
    assert json.loads(arguments[arguments.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}
    assert arguments[arguments.index("--load-format") + 1] == "dummy"
    extension = arguments[arguments.index("--worker-extension-cls") + 1]
    assert extension == "rlctl.rollout.closed_ports.ClosedPorts"


def test_servers_that_run_already_decide_unless_it_is_asked_for() -> None:
    urls, cpu, cuda = ["http://a:1", "http://b:1"], torch.device("cpu"), torch.device("cuda")
    has_vllm = importlib.util.find_spec("vllm") is not None
    assert _can_broadcast(urls, ["nccl", "nccl"], cuda, False) == has_vllm
    assert _can_broadcast(urls, ["gloo", "gloo"], cpu, True)
    assert not _can_broadcast(urls, ["nccl", ""], cuda, False)
    with pytest.raises(EnvironmentFailure, match="does not accept weights by broadcast") as caught:
        _can_broadcast(urls, ["nccl", "ipc"], cuda, True)
    assert "http://b:1" in str(caught.value.where)


def test_a_thread_that_waits_for_a_dead_server_does_not_hold_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, before = threading.Event(), threading.enumerate()  # others still wait for servers that failed
    future = weight_broadcast._in_background(never.wait)
    with pytest.raises(RunFailure, match="it takes too long within 0 s"):
        weight_broadcast._all_done([future], 0.05, "it takes too long")
    (thread,) = set(threading.enumerate()) - set(before)
    assert (thread.name, thread.daemon) == ("weights", True)
    never.set()
    assert random_model(1) is not None


class ManyServers(server_client.ServerClient):
    """A client of servers that answer a request when all of them have one."""

    def __init__(self, count: int) -> None:
        urls = [f"http://server-{number}" for number in range(count)]
        super().__init__(urls, load_spec([], [], []).spec.rollout.server)
        self.waiting = 0
        self.together: list[str] = []

    async def send(
        self, url: str, path: str, body: Any = None, timeout: float | None = None
    ) -> httpx.Response:
        self.waiting += 1
        while self.waiting % len(self.urls):
            await asyncio.sleep(0.001)
        if path not in self.together:
            self.together.append(path)
        return httpx.Response(200, json={"world_size": 2})


@pytest.mark.parametrize("count", [1, 128])
def test_all_servers_are_asked_at_the_same_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that wait for one another would never answer requests that are sent in turn."""
    client, sizes = ManyServers(count), []

    class Group:
        def __init__(self, urls: list[str], world_size: int) -> None:
            self.world_size, self.meeting = world_size, dict[str, str]()
            sizes.append(world_size)

        def join(self) -> None: ...
        def abort(self) -> None: ...

    monkeypatch.setattr(weight_broadcast, "_GlooGroup", Group)
    monkeypatch.setattr(weight_broadcast, "_CONNECT_S", 30.0)
    broadcast = WeightBroadcast(client, None, torch.device("cpu"))  # type: ignore[arg-type]
    broadcast.connect()
    client.run(client.everywhere(lambda url: client.send(url, "/collective_rpc")))
    assert sizes == [1 + 2 * count]
    assert client.together == ["/get_world_size", "/init_weight_transfer_engine", "/collective_rpc"]
    client.close()
