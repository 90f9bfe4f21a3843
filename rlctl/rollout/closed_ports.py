"""Closes ports on which libraries listen for the members of a group, when the group is complete. No torch.

gloo opens a port for every group, also for one of a single process, and keeps it open. It does not
authenticate who connects. Closing the socket would disturb gloo's threads, so the kernel drops what arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import struct
from pathlib import Path

from rlctl.processes import is_loopback

_SO_ATTACH_FILTER = 26
#: A program of the kernel's packet filter with the one instruction "return 0": keep nothing of a packet.
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))


class ClosedPorts:
    """Extension of vLLM's workers (`--worker-extension-cls`)."""

    def close_ports(self) -> int:
        """See `close_group_ports`."""
        return close_group_ports()


def close_group_ports() -> int:
    """Closes this process's listening ports at loopback addresses; connections that exist stay.

    Does not close servers of Python's `socket`, such as an endpoint, and the port of a launcher's store.

    Returns:
        The number of ports that were closed.
    """
    pythons = {each.fileno() for each in gc.get_objects() if type(each) is socket.socket}
    store = os.environ.get("MASTER_PORT")
    count = 0
    for number in _sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
            if number in pythons:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                address = connection.getsockname()
                is_open = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                is_inet = connection.family in {socket.AF_INET, socket.AF_INET6}
                if is_open and is_inet and is_loopback(address[0]) and str(address[1]) != store:
                    program = struct.pack("HP", 1, ctypes.addressof(_DROP))
                    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                    count += 1
    return count


def _sockets() -> list[int]:
    """Descriptors of this process that are sockets."""
    descriptors = Path("/proc/self/fd")
    numbers = []
    for path in list(descriptors.iterdir()) if descriptors.is_dir() else ():
        with contextlib.suppress(OSError):  # that of the listing itself
            if str(path.readlink()).startswith("socket:"):
                numbers.append(int(path.name))
    return numbers
