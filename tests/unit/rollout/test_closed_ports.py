"""Ports of gloo's groups are closed when the groups are complete; what uses the groups goes on."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlctl.engine.ranks import Ranks
from rlctl.processes import OTHER_KEYS, SERVER_KEY
from rlctl.rollout.closed_ports import close_group_ports
from rlctl.rollout.server_process import LocalHost
from tests.processes import on_ranks


def accepting() -> list[int]:
    """Listening ports of this process that accept a connection."""
    found = []
    for each in psutil.Process().net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.ip.startswith("127."):
            with socket.socket() as client:
                client.settimeout(0.3)
                found += [each.laddr.port] * (client.connect_ex((each.laddr.ip, each.laddr.port)) == 0)
    return found


def _closing(ranks: Ranks) -> tuple[int, int, float, bool, float]:
    dist.barrier()
    before = len(accepting())
    with socket.create_server(("127.0.0.1", 0)) as own:
        closed = close_group_ports()
        assert [port for port in accepting() if port != own.getsockname()[1]] == []
        is_own_open = own.getsockname()[1] in accepting()
    total = torch.ones(3)
    dist.all_reduce(total)
    later = dist.new_group(backend="gloo")  # a group that is formed afterwards has ports of its own
    more = torch.ones(1)
    dist.all_reduce(more, group=later)
    return before, closed, float(total.sum()), is_own_open, float(more)


def test_a_complete_group_needs_no_port(tmp_path: Path) -> None:
    for before, closed, total, is_own_open, more in on_ranks(2, _closing, where=tmp_path):
        assert before >= 1
        assert closed >= 1
        assert total == 6.0
        assert is_own_open
        assert more == 2.0


def test_a_server_gets_its_key_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OTHER_KEYS, SERVER_KEY, "HF_TOKEN", "RANK"):
        monkeypatch.setenv(name, "0123456789abcdef")
    host = LocalHost("127.0.0.1")
    host.start(["-c", "import os; print(*os.environ)"], {}, tmp_path, tmp_path / "log")
    while host.poll() is None:
        time.sleep(0.05)
    names = (tmp_path / "log").read_text().split()
    assert {SERVER_KEY, "HF_TOKEN"} <= set(names)
    assert not {*OTHER_KEYS, "RANK"} & set(names)
