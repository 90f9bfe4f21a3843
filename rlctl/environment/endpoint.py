"""The HTTP endpoint through which an agent program speaks with the policy, in one of three wire formats.

It listens on loopback only, for as long as the episode runs, and wants a random key that ends with it. It
answers nothing but `POST` to the paths of the formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import h11

from rlctl.environment.connections import HEADERS_S, Listener
from rlctl.environment.formats import chat_completions, messages, responses
from rlctl.environment.formats.protocol import Refused, WireFormat
from rlctl.tool_calls import encodable

if TYPE_CHECKING:
    from rlctl.environment.recorded_chat import RecordedChat

FORMATS: dict[str, WireFormat] = {form.PATH: form for form in (chat_completions, messages, responses)}
#: Largest request in bytes. A larger one is read up to `_DROPPED`, so that its client reads the refusal.
_LARGEST, _DROPPED = 8 << 20, 64 << 20
#: Seconds in which a body arrives, and in which a client reads an answer.
_BODY_S, _READ_S = 60.0, 60.0
#: Seconds for which the end of a stream is held back, so that a client that leaves has not got it.
_BEFORE_END_S = 0.005
#: Escapes in JSON that may stand for half of a character.
_SURROGATE = re.compile(rb"\\u[dD]")


class Endpoint:
    """Serves one episode's chat while the block runs.

    Attributes:
        base_url, api_key: what an OpenAI client takes.
        root_url: what an Anthropic client takes as its base URL.
    """

    def __init__(self, chat: RecordedChat) -> None:
        self._chat = chat
        self.api_key = secrets.token_urlsafe(32)
        self._keys = {
            b"authorization": f"Bearer {self.api_key}".encode(),
            b"x-api-key": self.api_key.encode(),
        }

    async def __aenter__(self) -> Self:
        self._listener = Listener(self._handle)
        self._host = f"127.0.0.1:{self._listener.port}"
        self.root_url = f"http://{self._host}"
        self.base_url = f"{self.root_url}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    async def _handle(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Callable[[], None]
    ) -> None:
        """Answers one request, and closes the connection."""
        with contextlib.suppress(TimeoutError, ConnectionError):  # the client sends nothing, or has gone
            incoming = _Incoming(
                reader, self._checked, lambda: writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            )
            try:
                async with asyncio.timeout(HEADERS_S) as limit:
                    body = await incoming.body(admit, limit)
                request = incoming.form.read(_parsed(body), self._chat.conversation_before)
                said = await self._chat.answered(request, reader.at_eof)
            except Refused as refused:
                if incoming.is_allowed:
                    self._chat.is_refused = not self._chat.limit
                content = json.dumps(incoming.form.error(refused))
                await _send(reader, writer, refused.status, "application/json", [content])
                return
            kind = "text/event-stream" if request.streams else "application/json"
            if request.streams:
                parts = incoming.form.events(request, said.reply)
            else:
                parts = [json.dumps(incoming.form.written(request, said.reply))]
            was_read = said.sending()
            try:
                was_read.set_result(await _send(reader, writer, 200, kind, parts))
            finally:
                if not was_read.done():
                    was_read.set_result(False)

    def _checked(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> None:
        """Refuses a request without the key, for another host, of a web page, or to another path."""
        if headers.get(b"host") != self._host.encode() or b"origin" in headers:
            raise Refused(403, "forbidden", "requests of web pages and for other hosts are refused")
        given = [hmac.compare_digest(headers.get(name, b""), key) for name, key in self._keys.items()]
        if not any(given):
            raise Refused(401, "invalid_api_key", "the key of a running episode is required")
        path = target.partition(b"?")[0].decode(errors="replace")
        if method != b"POST" or path not in FORMATS:
            raise Refused(404, "not_found", f"only POST {', '.join(FORMATS)} are served")


class _Incoming:
    """One request.

    Attributes:
        form: its wire format, as far as its path shows it.
        is_allowed: it has the key, and is for a path that is served.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        check: Callable[[bytes, bytes, Mapping[bytes, bytes]], None],
        go_on: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._check = check
        self._go_on = go_on
        self.form: WireFormat = chat_completions
        self.is_allowed = False

    async def body(self, admit: Callable[[], None], limit: asyncio.Timeout) -> bytes:
        """The body of an allowed request; `limit` is extended for one with the key.

        Raises:
            Refused: it is not allowed, or not HTTP.
            ConnectionError: its client has gone.
        """
        connection = h11.Connection(h11.SERVER)
        body = bytearray()
        length = 0
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await self._reader.read(1 << 18))
                elif isinstance(event, h11.Request):
                    path = event.target.partition(b"?")[0].decode(errors="replace")
                    named = [form for start, form in FORMATS.items() if path.startswith(start)]
                    self.form = named[0] if named else self.form
                    self._check(event.method, event.target, dict(event.headers))
                    self.is_allowed = True
                    admit()
                    if connection.they_are_waiting_for_100_continue:  # curl, before a large body
                        self._go_on()
                    limit.reschedule(asyncio.get_running_loop().time() + _BODY_S)
                elif isinstance(event, h11.Data):
                    length += len(event.data)
                    if length <= _LARGEST:
                        body += event.data
                    elif length > _DROPPED:
                        break
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:  # closed
                    raise ConnectionError
        except h11.RemoteProtocolError as error:
            raise Refused(400, "invalid_request", "the request is not HTTP/1.1") from error
        if length > _LARGEST:
            raise Refused(413, "too_large", f"a request has at most {_LARGEST} bytes")
        return bytes(body)


def _parsed(body: bytes) -> Any:
    """The JSON value of a body.

    Raises:
        Refused: it is none.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_refused_constant)
        return encodable(value) if _SURROGATE.search(body) else value
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_request", "the body is not JSON") from error


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, kind: str, parts: list[str]
) -> bool:
    """Sends an answer; whether its client has read it to the end.

    A client that closes its end of the connection while data of ours wait there resets the connection.
    """
    if reader.at_eof():
        return False
    data = [part.encode() for part in parts]
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {sum(map(len, data))}\r\nConnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + b"".join(data[:-1]))
        if len(data) > 1:
            await writer.drain()
            await asyncio.sleep(_BEFORE_END_S)
            if reader.at_eof():
                return False
        writer.write(data[-1])
        await writer.drain()
        writer.write_eof()
        async with asyncio.timeout(_READ_S):
            while await reader.read(1 << 16):
                pass
    except (OSError, TimeoutError):
        return False
    return True
