"""Serves the page of runs on this machine's loopback interface, and keeps it up to date.

Every user of the machine, and every page in a browser on it, can reach the port. So an answer needs the key
in the address, and a `Host` that names the loopback interface: another name that was made to lead here (DNS
rebinding) is refused. Only GET is answered. No file has an address: there are the page and the state of its
runs. The page may load nothing from elsewhere, and no other page may show it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, ClassVar
from urllib.parse import parse_qs

from rlctl.errors import EnvironmentFailure, RlctlError, first_line, visible
from rlctl.processes import LOOPBACK
from rlctl.report.run_page import run_page
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.open_run import RunState, is_running, phase_of, read_state
from rlctl.track.run_dir import FAILURE_FILE, SPEC_FILE, SUMMARY_FILE

#: Most connections that have not shown the key: a further one ends the oldest.
MOST_CONNECTIONS = 32
#: Seconds in which a connection must send something.
SILENCE_S = 10.0
#: Minimum seconds between two renderings, and as a multiple of the duration of the last: the run has the
#: processor first.
BETWEEN_S, BETWEEN_DURATIONS = 2.0, 10.0
#: Names of the loopback interface in the address of a page; the port may be that of a tunnel.
HOSTS = frozenset({"localhost", LOOPBACK, "[::1]"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class RunPages:
    """The page of runs as their files are now. Threads share it.

    Args:
        runs: run directories.
        render: makes the page from the run directories and a version.
    """

    def __init__(self, runs: Sequence[Path], render: Callable[[Sequence[Path], str], str] = run_page) -> None:
        self._runs = runs
        self._render = render
        self._lock = threading.Lock()
        self._version = ""
        self._page = ""
        self._next = 0.0  # time of the next rendering, on the monotonic clock
        self._states: list[RunState] = []

    def page(self) -> str:
        """The newest page.

        Raises:
            UsageError: the files of a run are damaged.
        """
        with self._lock:
            self._update()
            if not self._page:
                began = time.monotonic()
                self._page = self._render(self._runs, self._version)
                ended = time.monotonic()
                self._next = ended + max(BETWEEN_S, BETWEEN_DURATIONS * (ended - began))
            return self._page

    def state(self) -> dict[str, Any]:
        """Version of the newest page, a line about each run, and whether any of them is running."""
        with self._lock:
            self._update()
            running = [is_running(path) for path in self._runs]
            lines = [self._line(state, is_live=now) for state, now in zip(self._states, running, strict=True)]
            return {"version": self._version, "runs": lines, "isRunning": any(running)}

    def _update(self) -> None:
        """Takes over a new version of the files, if it is time for a rendering."""
        if time.monotonic() < self._next:
            return
        version = version_of(self._runs)
        if version != self._version:
            self._version = version
            self._page = ""
            self._states = [read_state(path) for path in self._runs]
            self._next = time.monotonic() + BETWEEN_S

    def _line(self, state: RunState, *, is_live: bool) -> str:
        name = f"{state.path.name}: " if len(self._runs) > 1 else ""
        total = f" of {state.total_steps:,}" if state.total_steps else ""
        step = f"{state.step:,}{total} steps" if state.step else "before the first step"
        return visible(f"{name}{phase_of(state.path) if is_live else state.state}, {step}", keep="")


def version_of(runs: Sequence[Path]) -> str:
    """A text that changes with the files of runs that a page shows."""
    seen = [
        (str(file), status.st_size, status.st_mtime_ns) for file in _files(runs) if (status := _status(file))
    ]
    running = [is_running(path) for path in runs]
    return hashlib.sha256(repr((seen, running)).encode()).hexdigest()[:16]


def _files(runs: Sequence[Path]) -> Iterator[Path]:
    for path in runs:
        yield from (path / name for name in (METRICS_FILE, SPEC_FILE, SUMMARY_FILE, FAILURE_FILE))
        yield from sorted((path / "rollouts").glob("*.parquet"))


def _status(file: Path) -> Any:
    try:
        return file.stat()
    except OSError:
        return None


class PageServer(ThreadingMixIn, TCPServer):
    """Answers requests for the page of runs on a port of the loopback interface.

    Args:
        pages: the page and its state.
        port: 0: a free one.

    Raises:
        EnvironmentFailure: the port cannot be used.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = socket.SOMAXCONN  # from a full queue the kernel resets any connection

    def __init__(self, pages: RunPages, port: int = 0) -> None:
        self.pages = pages
        self.key = secrets.token_urlsafe(24)
        self._connections: dict[socket.socket, None] = {}  # without key, oldest first
        self._lock = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            what = f"port {port} cannot be used: {error.strerror}"
            raise EnvironmentFailure(
                what, where="--port", fix="leave it out: a free port is taken"
            ) from error

    @property
    def address(self) -> str:
        """The address of the page, with its key."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/?key={self.key}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a connection in a thread, and ends the oldest one if there are too many."""
        with self._lock:
            self._connections[request] = None
            oldest = next(iter(self._connections))
            is_full = len(self._connections) > MOST_CONNECTIONS
            if is_full:
                del self._connections[oldest]
        if is_full:
            self._end(oldest)
        super().process_request(request, client_address)

    def keep(self, request: socket.socket) -> None:
        """A connection that has shown the key: others do not end it."""
        with self._lock:
            self._connections.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Closes the port and all connections."""
        super().server_close()
        with self._lock:
            connections = list(self._connections)
            self._connections = {}
        for connection in connections:
            self._end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke off is no error."""

    @staticmethod
    def _end(connection: socket.socket) -> None:
        try:
            connection.shutdown(socket.SHUT_RDWR)  # its thread, which waits for it, closes it
        except OSError:
            return


class _Handler(BaseHTTPRequestHandler):
    """Answers one request: HTTP/1.0, one request a connection."""

    server: PageServer
    timeout = SILENCE_S
    server_version, sys_version = "rlctl", ""
    #: Address → what it answers with, and its content type.
    _ANSWERS: ClassVar[dict[str, tuple[Callable[[RunPages], str], str]]] = {
        "/": (lambda pages: pages.page(), "text/html"),
        "/state": (lambda pages: json.dumps(pages.state()), "application/json"),
    }

    def parse_request(self) -> bool:
        """Reads line and headers of the request; refuses all methods but GET."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered", Allow="GET")
            return False
        return True

    def do_GET(self) -> None:
        """Answers, if the request may be answered."""
        address, _, query = self.path.partition("?")
        if not self._names_loopback():
            self._say(HTTPStatus.FORBIDDEN, "this name is none of the loopback interface")
        elif not self._has_key(query):
            self._say(HTTPStatus.FORBIDDEN, "no such key: use the address that rlctl report has printed")
        elif address not in self._ANSWERS:
            self._say(HTTPStatus.NOT_FOUND, "nothing has this address")
        else:
            self.server.keep(self.connection)
            self._answer(*self._ANSWERS[address])

    def _names_loopback(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        name = hosts[0].strip().lower() if len(hosts) == 1 else ""
        port = name.rpartition(":")[2]
        return (name.removesuffix(f":{port}") if port.isdecimal() else name) in HOSTS

    def _has_key(self, query: str) -> bool:
        try:
            keys = parse_qs(query, max_num_fields=4, errors="replace").get("key", [])
        except ValueError:  # too many fields
            return False
        return len(keys) == 1 and hmac.compare_digest(
            keys[0].encode("utf-8", "replace"), self.server.key.encode()
        )

    def _answer(self, content: Callable[[RunPages], str], kind: str) -> None:
        try:
            text = content(self.server.pages)
        except RlctlError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception as error:  # files change while they are read
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {first_line(error)}")
        else:
            self._send(HTTPStatus.OK, text, kind)

    def _say(self, status: HTTPStatus, words: str, **headers: str) -> None:
        self._send(status, f"{visible(words)}\n", "text/plain", **headers)

    def _send(self, status: HTTPStatus, text: str, kind: str, **headers: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        sizes = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in (_HEADERS | sizes | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers a request that is no HTTP, or too long; without repeating it."""
        self._say(HTTPStatus(code), HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Requests are not logged: they contain the key."""


def tunnel(server: PageServer) -> str:
    """The command that makes the page's address work on another machine."""
    port = server.server_address[1]
    host = shlex.quote(socket.gethostname())
    return f"ssh -L {port}:{LOOPBACK}:{port} {host}"
