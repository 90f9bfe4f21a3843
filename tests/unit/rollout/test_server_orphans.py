"""Nothing is left of a vLLM server whose trainer, or which itself, was killed; a stub stands for vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.rollout.server_process import SERVE, LocalHost
from tests.hooks import keepers_are_fast
from tests.processes import Job, wait_until_ended

STUB = """
import os, signal, socket, sys, time
def main():
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # the engine
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.argv.append("engine")
        time.sleep(1000)
    port = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    print("ready", flush=True)
    time.sleep(1000)
"""


def trainer(log: str, deaf: bool, path: str) -> int:
    """Starts a server, and waits to be killed."""
    os.environ["PYTHONPATH"] = f"{path}:{os.environ['PYTHONPATH']}"
    host = LocalHost("127.0.0.1")
    arguments = [*SERVE, "--port", str(host.port), *["--deaf"] * deaf]
    host.start(arguments, {}, Path(), Path(log))
    assert host._process
    print(host._process.pid, host.port, flush=True)
    time.sleep(1000)
    return 0


@pytest.fixture(params=[False, True], ids=["", "deaf"])
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Job, psutil.Process, int]]:
    """A trainer, its server and the server's port."""
    module = tmp_path / "stub" / "vllm" / "entrypoints" / "cli"
    module.mkdir(parents=True)
    for folder in (module, module.parent, module.parent.parent):
        (folder / "__init__.py").write_text("")
    (module / "main.py").write_text(STUB)
    log = tmp_path / "server.log"
    job = Job(
        trainer,
        str(log),
        request.param,
        str(tmp_path / "stub"),
        log=tmp_path / "log",
        before=keepers_are_fast,
    )
    job.wait_for(lambda: log.exists() and "ready" in log.read_text())
    pid, port = map(int, job.output.split())
    server = psutil.Process(pid)
    known = [server, *server.children(recursive=True)]
    yield job, server, port
    job.end()
    for process in known:
        if process.is_running():
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["trainer", "trainer, server stopped", "server"])
def test_no_process_and_no_port_is_left_within_15_s(
    serving: tuple[Job, psutil.Process, int], how: str
) -> None:
    job, server, port = serving
    family = [server, *server.children(recursive=True)]
    assert len(family) == 2  # with its engine
    if "stopped" in how:
        os.killpg(server.pid, signal.SIGSTOP)
    if how == "server":
        server.kill()
    else:
        job.signal(signal.SIGKILL)
        job.wait()
    assert wait_until_ended([process.pid for process in family], timeout=15) == []
    assert not [c for c in psutil.net_connections("inet") if c.laddr and c.laddr.port == port]
