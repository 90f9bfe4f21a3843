"""A run on two nodes: each node's first rank starts servers there, and all ranks ask all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.rollout import build_vllm, weight_broadcast
from rlctl.rollout.engines import EngineContext, build_rollout
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.vllm_server import VLLMServerRollout
from rlctl.run_spec.load import load_spec
from tests.unit.rollout.stub_server import Server, sample, versions_of
from tests.unit.rollout.test_hf_rollout import TOKENIZER, random_model
from tests.unit.rollout.test_weight_broadcast import Worker

RANKS = 4  # two of each node
SPEC = ("rollout.name=vllm", "rollout.mode=server", "trainer.nnodes=2", "trainer.n_gpus_per_node=2",
        "rollout.server.replicas=1", "data.train_batch_size=64")  # fmt: skip


class Meeting:
    """What `Ranks.first` does, among threads."""

    def __init__(self) -> None:
        self.barrier, self.said = threading.Barrier(RANKS), [""] * RANKS

    def first(self, rank: int, text: str) -> str:
        self.said[rank] = text
        self.barrier.wait(60)
        found = next(filter(None, self.said), "")
        self.barrier.wait(60)
        return found


@dataclass
class Started:
    """Log directory of a node → the server that stands for its `vllm serve`; nodes whose server fails."""

    servers: dict[str, Server] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    found = Started()

    class StubReplicas:
        def __init__(self, settings: Any, model: Callable[[], Path], log_dir: Path, hosts: Any) -> None:
            assert settings.options["weight_transfer_config"] == {"backend": "gloo"}
            assert (settings.server.replicas, hosts) == (1, ())
            self.name, self.model, self.is_started = log_dir.name, model, False
            found.servers[self.name] = self.server = Server()
            Worker(self.server)

        @property
        def urls(self) -> list[str]:
            return [self.server.url]

        def start(self) -> None:
            assert (self.model() / "config.json").exists()
            if self.name in found.failing:
                raise EnvironmentFailure("a vLLM server does not start: out of memory")
            self.is_started = True

        def loading(self, seconds: float) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def check(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(build_vllm, "Replicas", StubReplicas)
    monkeypatch.setattr(build_vllm.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(weight_broadcast, "_GLOO_S", 3.0)
    yield found
    for server in found.servers.values():
        server.shutdown()
        server.server_close()


def on_all(tmp_path: Path, *more: str) -> list[Any]:
    meeting, model = Meeting(), random_model(1)
    spec = load_spec([], [], [*SPEC, *more]).spec

    def build(rank: int) -> Any:
        return build_rollout(
            EngineContext(
                spec=spec,
                model_path="",
                model=model,
                tokenizer=TOKENIZER,
                device=torch.device("cpu"),
                rank=rank,
                world_size=RANKS,
                agree=partial(meeting.first, rank),
                run_dir=tmp_path,
            )
        )

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(build, range(RANKS)))


def sync(all_engines: list[VLLMServerRollout]) -> list[Any]:
    weights = list(random_model(2).state_dict().items())

    def one(engine: VLLMServerRollout) -> Any:
        try:
            return engine.sync_weights(PlainWeights(weights), policy_version=1)
        except (RunFailure, EnvironmentFailure) as error:
            return error

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(one, all_engines))


def test_servers_of_both_nodes_get_weights_and_answer_all_ranks(started: Started, tmp_path: Path) -> None:
    found = on_all(tmp_path, "rollout.server.weight_transfer=broadcast")
    servers = started.servers
    assert servers.keys() == {"engines", "node-1"}
    urls = [servers["engines"].url, servers["node-1"].url]
    assert [engine._urls for engine in found] == [urls] * RANKS
    assert sync(found) == [None] * RANKS
    for engine in (found[0], found[3]):
        assert versions_of(sample(engine)) == {1}
    offsets = [dict(server.asked)["/init_weight_transfer_engine"]["init_info"]["rank_offset"]
               for server in servers.values()]  # fmt: skip
    assert sorted(offsets) == [1, 2]
    for engine in found:
        engine.close()


def test_a_node_whose_server_does_not_start_ends_the_run_on_every_rank(
    started: Started, tmp_path: Path
) -> None:
    found = on_all(tmp_path, "rollout.server.weight_transfer=broadcast")
    started.failing.add("node-1")
    assert [type(error).__name__ for error in sync(found)] == [
        "RunFailure", "RunFailure", "EnvironmentFailure", "RunFailure",
    ]  # fmt: skip
    for engine in found:
        engine.close()
