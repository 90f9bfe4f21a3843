"""Each answer has the version of its weights: what a restarted or updated server answers is told apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.errors import RunFailure
from rlctl.rollout import server_client, weight_sync
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.reported_weights import WEIGHTS_HEADER, ReportedWeights, is_from
from tests.unit.rollout.stub_server import Server, engine_on, sample, versions_of


class App:
    """A server; completions end when they may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        while message.get("more_body"):
            message = await receive()
            self.bodies[-1] += message["body"]
        if scope["path"] == "/v1/completions":
            await self.may_end.wait()
        status = 500 if b"fails" in self.bodies[-1] else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})


async def asked(app: Any, path: str, body: Any = None, num_servers: int = 1) -> str | None:
    """The header of the answer; the body comes in two messages."""
    text, sent = json.dumps(body or {}).encode(), list[dict[str, Any]]()
    messages = [
        {"type": "http.request", "body": text[:5], "more_body": True},
        {"type": "http.request", "body": text[5:]},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    state = SimpleNamespace(args=SimpleNamespace(api_server_count=num_servers))
    await app({"type": "http", "path": path, "app": SimpleNamespace(state=state)}, receive, send)
    headers = dict(sent[0]["headers"])
    assert headers[b"a"] == b"b"
    value = headers.get(WEIGHTS_HEADER.encode())
    return None if value is None else value.decode()


def test_an_answer_says_which_weights_were_there_from_its_start_to_its_end() -> None:
    async def main() -> None:
        inner = App()
        app = ReportedWeights(inner)

        async def during(*calls: tuple[str, dict[str, str]]) -> str | None:
            inner.may_end.clear()
            answer = asyncio.create_task(asked(app, "/v1/completions"))
            await asyncio.sleep(0)
            for call in calls:
                await asked(app, *call)
            inner.may_end.set()
            return await answer

        reload = ("/collective_rpc", {"method": "reload_weights"})
        new, newer = [("/update_weight_version", {"new_version": tag}) for tag in ("1-a", "2-b")]
        assert await during() == " "  # a process that was not told
        assert await during(new) == " 1-a"
        assert await during() == "1-a 1-a"
        assert json.loads(inner.bodies[-2]) == {"new_version": "1-a"}
        assert await during(("/collective_rpc", {"method": "close_ports"})) == "1-a 1-a"
        assert await during(reload) == "1-a ?"
        assert await during() == "? ?"
        assert await during(newer) == "? 2-b"
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert await during((path, {}), newer) == "2-b 2-b"  # only of use if the tag is another one
            assert await during((path, {})) == "2-b ?"
            await asked(app, *newer)
        assert await during(("/update_weight_version", {"new_version": "fails"})) == "2-b 2-b"
        assert await asked(app, "/v1/completions", num_servers=4) is None

    asyncio.run(main())


def test_answers_without_the_header_are_those_of_servers_that_do_not_report() -> None:
    assert is_from({}, "2-b")
    assert is_from({WEIGHTS_HEADER: "2-b 2-b"}, "2-b")
    for value in ("", " ", " 2-b", "2-b ", "1-a 2-b", "2-b 1-a", "1-a 1-a", "? 2-b", "2-b 2-b 2-b"):
        assert not is_from({WEIGHTS_HEADER: value}, "2-b"), value


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for module in (server_client, weight_sync):
        monkeypatch.setattr(module, "RETRY_S", 0.01)
    stub = Server()
    yield stub
    stub.shutdown()
    stub.server_close()


@pytest.mark.parametrize("of", [" ", "{old} {old}", "{old} {new}", "{old} ?", " {new}", "lie lie"])
def test_answers_of_other_weights_are_sampled_again(server: Server, tmp_path: Path, of: str) -> None:
    """Although the server has the newest ones when it is asked for its version afterwards."""
    engine, model = engine_on([server], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    old = server.weight_version
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=2)
    new = server.weight_version
    right = f"{new} {new}"
    server.asked.clear()
    server.reports = [right] * 20 + [of.format(old=old, new=new)] * 2
    turns = sample(engine)
    assert versions_of(turns) == {2}
    assert server.paths().count("/v1/completions") == 6 + 2
    engine.close()


def test_a_server_that_never_has_the_newest_weights_is_named(server: Server, tmp_path: Path) -> None:
    engine, model = engine_on([server], tmp_path)
    engine.sync_weights(PlainWeights(model.state_dict().items()), policy_version=1)
    server.reports = ["lie lie"] * 100
    with pytest.raises(RunFailure, match="other weights than those that this run has sent") as caught:
        sample(engine)
    assert caught.value.where == server.url
    engine.close()
