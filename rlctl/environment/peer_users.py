"""Tells whose process is at the other end of a connection of this machine, as `ss -e` does.

Linux lets every user ask for the owner of a socket, by its addresses, at a netlink socket: see
sock_diag(7) for the structures that are written and read here.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
#: The netlink header; the request up to its socket; the addresses of the socket; its interface and cookie.
_HEADER, _REQUEST, _ADDRESSES, _REST = (
    struct.Struct(form) for form in ("=IHHII", "=BBBxI", "!HH4s12x4s12x", "=III")
)
_ANY_STATE = _NO_COOKIE = 0xFFFFFFFF
#: Bytes before the user's number and the socket's inode in an answer.
_UID_AT = _HEADER.size + 4 + _ADDRESSES.size + _REST.size + 12
_ANSWER_S = 1.0
#: The other end is closed, so that nobody owns it.
NOBODY = -1


class PeerUsers:
    """Asks the kernel; where it does not answer, nothing is known of any connection."""

    def __init__(self) -> None:
        self._kernel: socket.socket | None = None
        with contextlib.suppress(OSError, AttributeError):  # another system, or a sandbox
            self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
            self._kernel.settimeout(_ANSWER_S)

    def user_of(self, connection: socket.socket) -> int | None:
        """The user's number of the process that opened an accepted TCP connection over IPv4.

        Returns:
            None: it cannot be told. `NOBODY`: the other end is closed.
        """
        if self._kernel is None:
            return None
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:
            return NOBODY
        addresses = there[1], here[1], socket.inet_aton(there[0]), socket.inet_aton(here[0])
        asked = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ANY_STATE)
        asked += _ADDRESSES.pack(*addresses) + _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
        try:
            length = _HEADER.size + len(asked)
            self._kernel.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + asked)
            answer = self._kernel.recv(4096)
        except OSError:
            self.close()
            return None
        if len(answer) < _UID_AT + 8 or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
            return NOBODY
        user, inode = struct.unpack_from("=II", answer, _UID_AT)
        return int(user) if inode else NOBODY  # a socket that its process has closed seems to be root's

    def close(self) -> None:
        """Closes the socket; nothing is known of later connections."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None
