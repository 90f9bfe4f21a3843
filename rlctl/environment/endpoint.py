"""The HTTP endpoint through which an agent program speaks with the policy: chat completions of one episode.

It listens on loopback only, for as long as the episode runs, and wants a random key that ends with it. It
answers nothing but `POST /v1/chat/completions`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import h11

from rlctl.environment.chat_completions import Refused, chunks

if TYPE_CHECKING:
    from rlctl.environment.chat_completions import RecordedChat

_PATH = b"/v1/chat/completions"
#: Largest request in bytes, and longest time in which one arrives.
_LARGEST, _READ_S = 8 << 20, 60.0


class Endpoint:
    """Serves one episode's chat while the block runs.

    Attributes:
        base_url, api_key: what an OpenAI client takes.
    """

    def __init__(self, chat: RecordedChat) -> None:
        self._chat = chat
        self._handlers: set[asyncio.Task[Any]] = set()
        self.api_key = secrets.token_urlsafe(32)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._host = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.base_url = f"http://{self._host}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.ensure_future(self._handle(reader, writer))
        self._handlers.add(handler)
        handler.add_done_callback(self._ended)

    def _ended(self, handler: asyncio.Task[None]) -> None:
        self._handlers.discard(handler)
        if not handler.cancelled():
            handler.exception()  # it has ended the episode, see `RecordedChat.failed`

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, and closes the connection."""
        try:
            kind = "application/json"
            try:
                async with asyncio.timeout(_READ_S):
                    request = await self._request(reader)
                answer = await self._chat.complete(request, reader.at_eof)
                status, body = 200, json.dumps(answer)
                if request.get("stream"):
                    usage = (request.get("stream_options") or {}).get("include_usage", False)
                    parts = [json.dumps(part) for part in chunks(answer, with_usage=usage)]
                    body = "".join(f"data: {part}\n\n" for part in [*parts, "[DONE]"])
                    kind = "text/event-stream"
            except Refused as refused:
                error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
                status, body = refused.status, json.dumps({"error": error | {"param": None}})
            data = body.encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the client sends nothing, or has gone
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> Any:
        """The body of an allowed request.

        Raises:
            Refused: it is not allowed, or not HTTP.
        """
        connection, body = h11.Connection(h11.SERVER), bytearray()
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.Request):
                    self._check(event.method, event.target, dict(event.headers))
                elif isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > _LARGEST:
                        raise Refused(413, "too_large", f"a request has at most {_LARGEST} bytes")
                elif isinstance(event, h11.EndOfMessage):
                    return json.loads(body)
                else:  # closed
                    raise ConnectionError
        except (h11.RemoteProtocolError, ValueError, RecursionError) as error:
            raise Refused(400, "invalid_request", "the request is not JSON over HTTP/1.1") from error

    def _check(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None:
        """Refuses a request without the key, for another host, of a web page, or to another path."""
        if headers.get(b"host") != self._host.encode() or b"origin" in headers:
            raise Refused(403, "forbidden", "requests of web pages and for other hosts are refused")
        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.api_key}".encode()):
            raise Refused(401, "invalid_api_key", "the key of a running episode is required")
        if (method, target) != (b"POST", _PATH):
            raise Refused(404, "not_found", f"only POST {_PATH.decode()} is served")
