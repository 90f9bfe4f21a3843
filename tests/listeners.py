"""Which ports the processes of a job have open."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from tests.processes import Job


def assert_on_loopback(job: Job) -> None:
    """Asserts that no process of the job can be reached from another machine, over TCP or UDP."""
    main = psutil.Process(job.pid)
    open_ports = [
        (process.cmdline(), each.laddr)
        for process in (main, *main.children(recursive=True))
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and each.laddr)
    ]
    assert open_ports  # gloo's at least
    assert all(ipaddress.ip_address(address.ip).is_loopback for _, address in open_ports), open_ports
