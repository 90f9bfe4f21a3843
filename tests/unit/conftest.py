"""Pages in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium; tests that use it are skipped if it is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no chromium is installed")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = started.chromium.launch(executable_path=executable, args=options)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[[Path], Any]]:
    """Opens a file and fails on dialogs, messages, errors and requests."""
    complaints: list[str] = []

    def dismissed(dialog: Any) -> None:
        complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.on("dialog", dismissed)
    page.on("console", lambda message: complaints.append(f"console {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error {error}"))
    page.on("request", lambda request: complaints.append(f"request {request.url}"))

    def go(path: Path) -> Any:
        page.goto(path.as_uri())
        complaints.remove(f"request {path.as_uri()}")
        return page

    yield go
    page.close()
    assert [each[:99] for each in complaints if not each.startswith("request data:")] == []


@pytest.fixture
def loaded_from_elsewhere(browser: Any) -> Callable[[Path, str], list[str]]:
    """Opens a file with markup injected before its `<main`, and returns the network requests.

    Fails where the injected script changed the title.
    """

    def go(path: Path, title: str) -> list[str]:
        evil = (
            "<script>document.title='run'</script><img src='https://evil.test/x' onerror='document.title=1'>"
        )
        path.write_text(path.read_text().replace("<main", f"{evil}<main", 1))
        page = browser.new_page()
        loaded: list[str] = []
        page.on("requestfinished", lambda request: loaded.append(request.url))
        page.goto(path.as_uri())
        assert page.title() == title
        page.close()
        return [url for url in loaded if url.startswith("http")]

    return go


@pytest.fixture
def serving() -> Iterator[Callable[[Any], Any]]:
    """Starts servers of the page of runs, and ends them."""
    from rlctl.report.serve import PageServer

    servers: list[Any] = []

    def start(pages: Any) -> PageServer:
        server = PageServer(pages)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel of rlctl."""
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheels"))


def built(kind: str, source: Path, target: Path) -> Path:
    """Builds a `wheel` or an `sdist` without network, from the environment's hatchling."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (file,) = target.glob("rlctl-*")
    return file
