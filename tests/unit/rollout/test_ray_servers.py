"""Servers on a real Ray cluster of two nodes, which are both this machine: placed, restarted, and lost."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.rollout import replicas
from rlctl.rollout.build_vllm import _ray_hosts
from rlctl.rollout.replicas import Replicas, ReplicaSettings
from rlctl.rollout.server_access import KEY
from rlctl.rollout.server_process import ray_hosts
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.rollout import ServerSpec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
ROOT = Path(__file__).parents[3]
#: Replacement for `vllm serve`: it is healthy and returns its process id and model files.
STUB = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
host, port = sys.argv[sys.argv.index("--host") + 1], sys.argv[sys.argv.index("--port") + 1]
class Fine(BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/" or self.headers["Authorization"] == f"Bearer {os.environ['RLCTL_SERVER_KEY']}"
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.getpid()} {sorted(os.listdir(sys.argv[1]))}".encode())
print("an Error of the server", flush=True)
HTTPServer((host, int(port)), Fine).serve_forever()
"""
ACTOR_CPUS = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """Two nodes with the resources of one server each."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = started(Cluster)
        patched.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def started(kind: Callable[..., Any]) -> Any:
    """Two nodes; on a busy machine Ray's 30 seconds for a node may not do."""
    for is_last in (False, False, True):
        nodes = kind()
        try:
            for _ in range(2):
                nodes.add_node(**ACTOR_CPUS)
            return nodes
        except Exception:
            nodes.shutdown()
            if is_last:
                raise
    raise AssertionError


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answer(url: str) -> tuple[int, str]:
    """Process and files of the server at this address; 0: there is none."""
    import httpx

    try:
        pid, _, files = httpx.get(url, timeout=5, trust_env=False).text.partition(" ")
    except httpx.HTTPError:
        return 0, ""
    return int(pid), files


def test_servers_are_placed_restarted_and_missed(
    cluster: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(replicas, "SERVE", ("-c", STUB))
    monkeypatch.setenv(KEY, "a key")
    model = tmp_path / "config"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = ReplicaSettings({}, server=ServerSpec(start_timeout=120.0, max_restarts=1))
    with ray_hosts(2, gpus=0, trainer_gpus=0, seconds=120.0) as hosts:
        servers = Replicas(settings, lambda: model, tmp_path / "logs", hosts)
        servers.start()
        try:
            pids = [answer(url)[0] for url in servers.urls]
            assert len(set(pids)) == 2
            assert [answer(url)[1] for url in servers.urls] == ["['config.json', 'log']"] * 2
            nodes = {_node_of(host) for host in hosts}
            assert len(nodes) == 2
            psutil.Process(pids[0]).kill()
            wait_for(lambda: answer(servers.urls[0])[0] not in {0, pids[0]})
            servers.check()
            ray.kill(hosts[1]._actor)
            wait_for(lambda: servers._failure)
            with pytest.raises(RunFailure, match="machine or its Ray actor was lost"):
                servers.check()
            assert "an Error of the server" in (tmp_path / "logs/engine-0.log").read_text()
        finally:
            servers.close()
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def _node_of(host: object) -> str:
    actor_id = host._actor._actor_id.hex()  # type: ignore[attr-defined]
    from ray._private.state import actors

    return str(actors(actor_id)["Address"]["NodeID"])


def test_a_cluster_without_room_is_named(cluster: object) -> None:
    with (
        pytest.raises(EnvironmentFailure, match="no resources for 3 vLLM servers"),
        ray_hosts(3, gpus=0, trainer_gpus=0, seconds=3.0),
    ):
        pass


def test_without_a_cluster_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", _refuse)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with (
        pytest.raises(EnvironmentFailure, match=r"no Ray cluster answers at 127\.0\.0\.1:9") as caught,
        ray_hosts(1, gpus=0, trainer_gpus=0, seconds=1.0),
    ):
        pass
    assert "placement: nodes" in str(caught.value.fix)


def _refuse(**_: object) -> None:
    raise ConnectionError("nothing there")


def test_weights_must_reach_other_machines() -> None:
    given = ["rollout.name=vllm", "rollout.mode=server", "rollout.server.placement=ray"]
    with pytest.raises(UsageError, match="cannot read weights in the shared memory"):
        _ray_hosts(load_spec([], [], given).spec, broadcasts=False)


def test_ray_is_taken_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def placed_by_ray(*more: str) -> bool:
        given = ["rollout.name=vllm", "rollout.mode=server", *more]
        return load_spec([], [], given).spec.rollout.server.is_placed_by_ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not placed_by_ray()
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert placed_by_ray()
    assert not placed_by_ray("rollout.server.placement=nodes")
    assert not placed_by_ray("rollout.server.urls=[http://a:1]")
