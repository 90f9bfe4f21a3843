"""`rlctl report --serve`: who gets an answer, and that the page follows a run."""

from __future__ import annotations

import http.client
import json
import os
import platform
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer

from rlctl.cli.app import run
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.report import serve
from rlctl.report.serve import MOST_CONNECTIONS, PageServer, RunPages, version_of
from rlctl.track.heartbeats import Beat, NodeFile
from rlctl.track.run_dir import HOLDER_FILE
from tests.cli.test_report_command import a_run

LIMIT_S = 20.0


@pytest.fixture
def server(serving: Callable[[RunPages], PageServer], tmp_path: Path) -> PageServer:
    """Serves a text in place of a page."""
    return serving(RunPages([a_run(tmp_path / "a")], lambda _, version: f"the page {version}"))


def answer(
    server: PageServer, path: str | None = None, *, method: str = "GET", host: str | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    """Status, text and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=LIMIT_S)
    try:
        connection.putrequest(method, path or f"/?key={server.key}", skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read().decode(), response.headers
    finally:
        connection.close()


def test_it_listens_on_the_loopback_interface_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert len(server.key) >= 32
    status, text, headers = answer(server)
    assert (status, text[:9]) == (200, "the page ")
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/?key=", "/?key=x", "/state", "/?Key={key}", "/?key={key}x", "/?key={key}&key={key}"),
        *("/?key=%C3%A9", "/?key=%00", "/?a=1&b=2&c=3&d=4&key={key}", "//[?key=x"),
    ],
)
def test_without_the_key_nothing_is_answered(path: str, server: PageServer) -> None:
    status, text, _ = answer(server, path.format(key=server.key))
    assert status == 403
    assert server.key not in text
    assert "the page" not in text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "localhost:80", "LOCALHOST:8888", "127.0.0.1", "[::1]:9")),
        *((name, 403) for name in ("evil.test", "evil.test:80", "localhost.evil.test", "127.0.0.1.nip.io")),
        *(
            (name, 403)
            for name in ("", "localhost:x", "x@localhost", "0.0.0.0", "localhost, evil.test", "::1")
        ),
    ],
)
def test_other_names_that_lead_here_are_refused(host: str, status: int, server: PageServer) -> None:
    """DNS rebinding: the browser sends the name that its page has."""
    assert answer(server, host=host)[0] == status


@pytest.mark.parametrize(
    "method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"]
)
def test_only_get_is_answered(method: str, server: PageServer) -> None:
    status, text, headers = answer(server, method=method)
    assert (status, headers["Allow"]) == (405, "GET")
    assert "the page" not in text


@pytest.mark.parametrize(
    "path",
    [
        *("/../spec.yaml", "/spec.yaml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/state/"),
        *("/..%2fspec.yaml", "/metrics.jsonl", "file:///etc/passwd", "/index.html"),
    ],
)
def test_no_file_has_an_address(path: str, server: PageServer) -> None:
    assert answer(server, f"{path}?key={server.key}")[0] == 404


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\xff\r\n\r\n", b"GET\r\n\r\n", b"G" * 70_000 + b"\r\n", b""]
)
def test_what_is_no_request_ends_its_connection(sent: bytes, server: PageServer) -> None:
    with socket.create_connection(server.server_address[:2], timeout=LIMIT_S) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"the page" not in client.recv(1000)
    assert answer(server)[0] == 200


def test_idle_connections_keep_nobody_out(server: PageServer) -> None:
    idle = [
        socket.create_connection(server.server_address[:2], timeout=LIMIT_S)
        for _ in range(2 * MOST_CONNECTIONS)
    ]
    try:
        assert answer(server)[0] == 200
        ended = sum(client.recv(1) == b"" for client in idle[:MOST_CONNECTIONS])
        assert ended == MOST_CONNECTIONS
    finally:
        for client in idle:
            client.close()


def test_a_port_in_use_is_named(server: PageServer, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be used"):
        PageServer(server.pages, server.server_address[1])


def test_a_version_is_rendered_once_and_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now, rendered = a_run(tmp_path / "a"), [0.0], []
    monkeypatch.setattr(serve.time, "monotonic", lambda: now[0])

    def render(_: Any, version: str) -> str:
        rendered.append(version)
        now[0] += 1.0  # seconds
        return f"page {version}"

    pages = RunPages([path], render)
    assert pages.page() == pages.page() == f"page {version_of([path])}"
    with (path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7}\n')
    assert pages.state()["version"] == rendered[0] != version_of([path])
    now[0] += serve.BETWEEN_DURATIONS
    assert pages.state()["version"] == version_of([path])
    assert pages.page() == f"page {version_of([path])}"
    assert len(rendered) == 2


def test_the_state_names_the_phase_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "BETWEEN_S", 0.0)
    path = a_run(tmp_path / "a")
    log = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").unlink()
    (path / HOLDER_FILE).write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
    NodeFile(path, 0, size=1).write(0, Beat(1, 1, "loading the model\x1b[2J", 0.0, "host", 1))
    pages = RunPages([path])
    first = pages.state()
    assert first["isRunning"]
    assert first["runs"] == ["loading the model\\x1b[2J, before the first step"]
    assert "no step was logged" in pages.page()
    pages = RunPages([path])
    (path / "metrics.jsonl").write_text(log)
    (path / HOLDER_FILE).unlink()
    last = pages.state()
    assert (last["isRunning"], last["runs"]) == (False, ["died, 6 of 160 steps"])
    assert last["version"] != first["version"]


def test_damaged_files_are_an_answer(serving: Callable[[RunPages], PageServer], tmp_path: Path) -> None:
    path = a_run(tmp_path / "a")
    (path / "metrics.jsonl").write_text('{"step": 1}\nno\n{"step": 2}\n')
    status, text, _ = answer(serving(RunPages([path])))
    assert status == 503
    assert "metrics.jsonl:2" in text


def test_the_command_serves_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The browser is given a file of this user: others can read its command line."""
    path, seen = a_run(tmp_path / "a"), {}

    def visit(link: Path) -> None:
        try:
            address = link.read_text().partition("url=")[2].partition('"')[0]
            seen["address"], seen["mode"] = address, link.parent.stat().st_mode & 0o077
            with urllib.request.urlopen(address, timeout=LIMIT_S) as response:
                seen["page"] = response.read().decode()
        finally:
            time.sleep(0.3)  # the main thread enters its loop
            signal_main()

    def opened(link: str) -> None:
        assert "key=" not in link
        threading.Thread(target=visit, args=(Path(unquote(urlsplit(link).path)),), daemon=True).start()

    monkeypatch.setattr(typer, "launch", opened)
    assert run(["report", str(path), "--serve", "--open"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == seen["address"]
    assert seen["mode"] == 0
    assert 'id="live"' in seen["page"]
    assert "connect-src 'self'" in seen["page"]
    assert not (path / "report.html").exists()
    assert "Ctrl-C" in printed.err
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", urlsplit(seen["address"]).port), timeout=LIMIT_S)


def signal_main() -> None:
    import _thread

    _thread.interrupt_main()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "--out", "x.html"], "not written"),
        (["--port", "8000"], "add --serve"),
        (["--serve", "--port", "70000"], "65535"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(a_run(tmp_path / "a")), *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_run_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path), "--serve"]) == 2
    assert "not a run directory" in capsys.readouterr().err
    with pytest.raises(UsageError):
        RunPages([tmp_path]).page()
