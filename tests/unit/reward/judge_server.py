"""A judge behind an OpenAI-compatible API that has one fault at a time, for tests."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-of-the-judge-1234567890"
MARK = re.compile(r'"mark": "([0-9a-f]+)"')
_BETWEEN = r"^(?:Response|response \d+):\n[0-9a-f]{16}\n(.*?)\n[0-9a-f]{16}$"
RESPONSE = re.compile(_BETWEEN, re.MULTILINE | re.DOTALL)


class JudgeServer:
    """Scores a response by its length, modulo 11, and responses of a group by their lengths over 100.

    Attributes:
        faults: what goes wrong in the next requests, one each; then nothing.
        always: what goes wrong in every request.
        requests: bodies that it got.
        keys: headers `Authorization` that it got.
        most_at_once: most requests that were in flight at the same time.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.always = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = self._in_flight = 0
        self.meets: threading.Barrier | None = None
        self.score: Callable[[str], float] = lambda text: float(len(text) % 11)
        self._lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                judge.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        if self.meets:
            self.meets.abort()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers one request, with the next fault."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body)
            self.keys.append(handler.headers.get("Authorization", ""))
            fault = self.faults.pop(0) if self.faults else self.always
            self._in_flight += 1
            self.most_at_once = max(self.most_at_once, self._in_flight)
        try:
            if self.meets:
                self.meets.wait(20)
            self._reply(handler, body, fault)
        except (ConnectionError, threading.BrokenBarrierError):
            pass
        finally:
            with self._lock:
                self._in_flight -= 1

    def _reply(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: str) -> None:
        status, headers, text = self._document(body, fault)
        if fault == "slow":
            time.sleep(1.5)
        if fault == "closes":
            handler.close_connection = True
            return
        data = text.encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if fault == "truncated":
            data, handler.close_connection = data[: len(data) // 2], True
        handler.wfile.write(data)

    def _document(self, body: dict[str, Any], fault: str) -> tuple[int, dict[str, str], str]:
        errors = {
            "429": (429, {"Retry-After": "7"}, "rate limit"),
            "500": (500, {}, "oops"),
            "503": (503, {}, "overloaded"),
            "401": (401, {}, f"Incorrect API key provided: {KEY}"),
            "404": (404, {}, "no such model"),
            "not json": (200, {}, "<html>gateway</html>"),
            "no choices": (200, {}, "{}"),
            "null": (200, {}, "null"),
            "huge": (200, {}, " " * (5 << 20)),
        }
        if fault in errors:
            return errors[fault]
        if fault == "wants max_completion_tokens" and "max_tokens" in body:
            return 400, {}, "Unsupported parameter: use 'max_completion_tokens' instead"
        if fault == "refuses n" and "n" in body:
            return 400, {}, "n is not supported"
        count = 1 if fault == "ignores n" else body.get("n", 1)
        choices = [self._choice(body, fault) for _ in range(count)]
        return 200, {}, json.dumps({"choices": choices})

    def _choice(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        asked = body["messages"][-1]["content"]
        mark = MARK.findall(asked)[-1]
        responses = RESPONSE.findall(asked)
        if "scores" in asked.rpartition("\n")[2]:
            scores = {f"response {n + 1}": min(1.0, len(r) / 100) for n, r in enumerate(responses)}
            said: dict[str, Any] = {"mark": mark, "scores": scores}
        else:
            said = {"mark": mark, "score": self.score(responses[0])}
        text = f"It is good {KEY if fault == 'echoes the key' else ''}.\n{json.dumps(said)}"
        texts = {
            "prose": "I give it a 7.",
            "another mark": text.replace(mark, "0" * 16),
            "text score": text.replace('"score": ', '"score": "') + '"}',
            "true": json.dumps({"mark": mark, "score": True}),
            "nan": f'{{"mark": "{mark}", "score": NaN}}',
            "out of range": json.dumps({"mark": mark, "score": 11}),
            "too few": json.dumps({"mark": mark, "scores": {"response 1": 0.5}}),
            "repeats the response": f"The response says {responses[-1] if responses else ''}",
            "fenced": f"```json\n{json.dumps(said)}\n```",
            "thoughts": f'<think>{{"mark": "{mark}", "score": 1}}</think>{text}',
            "with more": f"{text}\nThat is all.",
        }
        message: dict[str, Any] = {"role": "assistant", "content": texts.get(fault, text)}
        if fault == "reasoning only":
            message = {"role": "assistant", "content": None, "reasoning_content": text}
        elif fault == "reasoning beside":
            message["reasoning_content"] = f'{{"mark": "{mark}", "score": 1}}'
        return {"message": message, "finish_reason": "length" if fault == "reasoning only" else "stop"}


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """A server for the block."""
    server = JudgeServer()
    try:
        yield server
    finally:
        server.close()
