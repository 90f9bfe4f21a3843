"""Which ports the processes of a job have open."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys

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


#: Prints those of the ports in its arguments that accept a connection.
_CONNECT = """
import socket, sys
for port in sys.argv[1:]:
    with socket.socket() as client:
        client.settimeout(0.5)
        if client.connect_ex(("127.0.0.1", int(port))) == 0:
            print(port)
"""


def accepting(job: Job) -> list[int]:
    """Listening ports of the job's processes that accept a connection, of another user if this is root."""
    main, ports = psutil.Process(job.pid), set()
    for process in (main, *main.children(recursive=True)):
        try:
            connections = process.net_connections("tcp4")
        except psutil.Error:  # it has ended
            continue
        ports |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    is_root = os.getuid() == 0 and shutil.which("setpriv")
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if is_root else []
    python = ["/usr/bin/env", "python3", "-I"] if is_root else [sys.executable, "-I"]
    command = [*as_nobody, *python, "-c", _CONNECT, *map(str, sorted(ports))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    return [int(port) for port in done.stdout.split()]
