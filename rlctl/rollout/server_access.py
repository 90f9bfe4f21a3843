"""Requests to vLLM servers: the key that they need, and whether a server's engine works.

vLLM's own key guards only some paths. `RequireKey` runs in the server in front of all of them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from rlctl.processes import SERVER_KEY
from rlctl.rollout.reported_weights import ReportedWeights

#: Environment variable with the key.
KEY = SERVER_KEY
#: Environment variable of a server with the host and port at which the run reaches it; unset: not checked.
HOST = "RLCTL_SERVER_HOST"
#: Name of the served model.
MODEL_NAME = "policy"
#: The smallest request that an engine must process.
ONE_TOKEN = {"model": MODEL_NAME, "prompt": [0], "max_tokens": 1}
#: Longest timeout of a check in seconds, and interval between two checks.
_PROBE_S = 5.0


def probe_interval(patience: float) -> float:
    """Seconds between two checks of a server that may be silent for `patience` seconds."""
    return min(_PROBE_S, patience / 4)


def authorization() -> dict[str, str]:
    """Headers of every request to a server."""
    key = os.environ.get(KEY, "")
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(method: str, url: str, timeout: float, body: Any = None) -> httpx.Response:
    """Sends a request to a server.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: it cannot be reached, or does not answer within `timeout` seconds.
    """
    # trust_env=False: proxies of the environment are for external hosts, not for engines.
    headers = authorization()
    return httpx.request(method, url, json=body, headers=headers, timeout=timeout, trust_env=False)


class EngineProgress:
    """Whether the engine of a server produces tokens; a server whose engine hangs still answers `/health`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._counted = ""

    def is_seen(self, timeout: float) -> bool:
        """Whether it has produced tokens since the last call, or produces one within `timeout` seconds.

        Raises:
            httpx.HTTPError: the server cannot be reached.
        """
        with contextlib.suppress(httpx.ReadTimeout, httpx.WriteTimeout):
            lines = ask("GET", f"{self._url}/metrics", timeout).text.splitlines()
            before = self._counted
            self._counted = "".join(filter(_counts_tokens, lines))
            if before != self._counted:
                return True
            return ask("POST", f"{self._url}/v1/completions", timeout, ONE_TOKEN).is_success
        return False


def _counts_tokens(line: str) -> bool:
    return line.startswith(("vllm:generation_tokens_total", "vllm:prompt_tokens_total"))


class RequireKey:
    """ASGI middleware of a server: refuses requests without the key, for another host, or of a web page.

    Answers report the version of the weights (`ReportedWeights`).

    Raises:
        KeyError: the server was started without a key.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = ReportedWeights(app)
        self._expected = f"Bearer {os.environ[KEY]}".encode()
        self._host = os.environ.get(HOST, "").encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers a refused request with 401; passes on all others, and the server's start and end."""
        headers = dict(scope.get("headers", ()))
        has_key = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
        is_ours = b"origin" not in headers and self._host in {b"", headers.get(b"host")}
        if scope["type"] == "lifespan" or (has_key and is_ours):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"a key is required"})
