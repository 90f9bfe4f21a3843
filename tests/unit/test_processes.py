"""Free ports."""

from __future__ import annotations

import random
import socket
import sys

import pytest

from rlctl import processes
from rlctl.processes import free_port


@pytest.mark.skipif(sys.platform != "linux", reason="ports of outgoing connections are read from /proc")
def test_a_free_port_is_none_that_an_outgoing_connection_gets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing = []
        for _ in range(20):
            with socket.create_connection(server.getsockname()) as client:
                outgoing.append(client.getsockname()[1])
    first = processes._first_outgoing_port()
    assert first <= min(outgoing)
    assert all(processes._LOWEST_PORT <= free_port() < first for _ in range(200))


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        used = server.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [used])
        assert free_port() not in {used, 0}


def test_ports_leave_the_generator_of_the_run_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    free_port()
    assert random.random() == expected


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_elsewhere_has_no_free_port_here(host: str) -> None:
    with pytest.raises(OSError, match=r"assign|known|resolution|service"):
        free_port(host)
