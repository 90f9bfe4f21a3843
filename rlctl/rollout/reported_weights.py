"""The version of the weights that a server answers with, in a header of every answer. No torch.

A server that was restarted answers with the weights it was started with until it gets the newest ones, and
may get them while it answers. Its version afterwards does not show which ones an answer is from.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

#: Name of the header. Its value: the version when the answer began, a space, and when it ended.
WEIGHTS_HEADER = "x-rlctl-weights"
#: While weights are replaced: no version has this name.
_REPLACED = "?"
_SETS = "/update_weight_version"
_CALLS_WORKERS = "/collective_rpc"
_REPLACES = frozenset({_CALLS_WORKERS, "/update_weights", "/start_weight_update", "/finish_weight_update"})
#: Methods of workers that leave the weights as they are.
_HARMLESS = frozenset({"close_ports"})


class ReportedWeights:
    """ASGI middleware that adds the header; not to answers of servers of several processes.

    The version is the one that this process was told, which a new process was not.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._version = ""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Passes on everything; changes of weights are noted."""
        if scope["type"] != "http" or _has_siblings(scope):
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        values = dict[str, Any]()
        if path in {_SETS, _CALLS_WORKERS}:
            receive, values = await _read(receive)
        if path in _REPLACES and values.get("method") not in _HARMLESS:
            self._version = _REPLACED
        new = str(values.get("new_version", "")) if path == _SETS else ""
        before = self._version

        async def report(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                if new and message["status"] == 200:
                    self._version = new
                value = f"{before} {self._version}".encode()
                message["headers"] = [*message.get("headers", ()), (WEIGHTS_HEADER.encode(), value)]
            await send(message)

        await self._app(scope, receive, report)


def _has_siblings(scope: Mapping[str, Any]) -> bool:
    """Whether other processes of the server get a part of the requests."""
    settings = getattr(getattr(scope.get("app"), "state", None), "args", None)
    return (getattr(settings, "api_server_count", None) or 1) > 1


async def _read(receive: Callable[[], Awaitable[Any]]) -> tuple[Callable[[], Awaitable[Any]], dict[str, Any]]:
    """A function that yields the messages of a request once more, and the values of its body."""
    messages = list[Any]()
    body = b""
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
        body += messages[-1].get("body", b"")
    try:
        values = json.loads(body)
    except ValueError:
        values = None

    async def again() -> Any:
        return messages.pop(0) if messages else await receive()

    return again, values if isinstance(values, dict) else {}


def is_from(headers: Mapping[str, str], version: str) -> bool:
    """Whether an answer is from these weights alone; also if its server does not report any."""
    value = headers.get(WEIGHTS_HEADER)
    return value is None or value.split(" ") == [version, version]
