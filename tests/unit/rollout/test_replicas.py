"""Servers of this machine that cannot even be started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.rollout import server_process
from rlctl.rollout.build_vllm import replica_settings
from rlctl.rollout.replicas import Replicas, ReplicaSettings
from rlctl.rollout.server_access import KEY
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.rollout import ServerSpec

OPTIONS = {"dtype": "float32", "max_model_len": 8}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "a key")


def test_a_machine_that_starts_no_process_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    settings = ReplicaSettings(OPTIONS, server=ServerSpec(start_timeout=60.0))
    servers = Replicas(settings, lambda: tmp_path, tmp_path / "logs")
    begun = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=os.strerror(errno.EAGAIN)):
        servers.start()
    assert time.monotonic() - begun < 30
    with pytest.raises(RunFailure, match="cannot be started"):
        servers.check()


def test_further_arguments_come_last() -> None:
    settings = ReplicaSettings({**OPTIONS, "block_size": 32})
    assert settings.arguments("model")[-2:] == ["--block-size", "32"]


STUB = """
import signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
hangs = []
class Fine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def do_POST(self):  # what needs the engine
        while hangs: time.sleep(1)
        self.do_GET()
signal.signal(signal.SIGUSR1, lambda number, frame: hangs.append(number))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Fine).serve_forever()
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["server", "engine"])
def test_a_server_that_hangs_is_ended_and_started_again_as_often_as_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    started, popen = [], subprocess.Popen

    def stub(command: list[str], **options: Any) -> Any:
        port = command[command.index("--port") + 1]
        started.append(popen([sys.executable, "-c", STUB, port], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", stub)
    monkeypatch.setattr(server_process, "_STOP_S", 0.5)
    settings = ReplicaSettings(OPTIONS, server=ServerSpec(answer_timeout=1.0, max_restarts=1))
    servers = Replicas(settings, lambda: tmp_path, tmp_path / "logs")
    servers.start()
    try:
        for attempt in (0, 1):
            wait_for(servers._replicas[0].is_ready.is_set)
            os.kill(started[attempt].pid, number)
            wait_for(lambda attempt=attempt: started[attempt].poll() is not None)
        wait_for(lambda: servers._failure)
        assert len(started) == 2
        with pytest.raises(RunFailure, match="its engine has not answered"):
            servers.check()
    finally:
        servers.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_servers_of_several_nodes_listen_where_the_other_nodes_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.7")  # as set where the ranks meet
    given = ["rollout.name=vllm", "rollout.mode=server", "data.train_batch_size=64"]
    one = replica_settings(load_spec([], [], given).spec)
    several = replica_settings(load_spec([], [], [*given, "trainer.nnodes=2"]).spec)
    assert (one.host, several.host) == ("127.0.0.1", "127.0.0.7")
    (url,) = Replicas(several, lambda: tmp_path, tmp_path / "logs").urls
    assert url.startswith("http://127.0.0.7:")
    assert "--max-num-seqs" not in several.arguments("model")


def test_an_address_of_another_machine_is_refused_at_once(tmp_path: Path) -> None:
    settings = ReplicaSettings(OPTIONS, host="192.0.2.1")
    with pytest.raises(UsageError, match=r"192\.0\.2\.1.* no address of this machine"):
        Replicas(settings, lambda: tmp_path, tmp_path / "logs")
