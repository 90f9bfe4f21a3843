"""Requests per second that the recording endpoint answers on one core, in each wire format.

    python -m benchmarks.endpoint [--requests 1000] [--kib 64]

The endpoint runs in a process of its own, with a policy that answers at once and a renderer of no text:
what is measured is the work of the protocol (HTTP, JSON, checks, the conversation it continues, answer), as
requests per second of processor time. Every request is a conversation of `--kib` KiB that continues the last
reply of its episode, half of them streamed. The clients, in the first process, send prepared bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

import torch

from rlctl.batch import Task, Turn
from rlctl.environment.endpoint import FORMATS, Endpoint
from rlctl.environment.recorded_chat import RecordedChat
from rlctl.rollout.protocol import Sampling

TURN = Turn(torch.tensor([1, 2]), torch.zeros(2), torch.zeros(2, dtype=torch.int64), "stop")
CLIENTS = 8


class Tokenizer:
    """One token."""

    def decode(self, ids: Any) -> str:
        return ""

    def batch_decode(self, lists: Any, **_: Any) -> list[str]:
        return ["The answer is 4."] * len(lists)


class Renderer:
    """Reads nothing."""

    tokenizer, tool_role, shows_calls, takes_later_system = Tokenizer(), "tool", True, True

    def text(self, messages: Any, tools: Any = ()) -> str:
        return ""

    def encode(self, text: str, after: int | None = None) -> list[int]:
        return [1]

    def addition(self, *_: Any) -> list[int]:
        return [1]


class Sampler:
    """Answers at once."""

    async def sample(self, *_: Any) -> Turn:
        return TURN


def body(path: str, history: list[tuple[str, str]], *, streams: bool) -> bytes:
    """A request of a conversation of (role, text)."""
    messages = [{"role": role, "content": text} for role, text in history]
    tool: dict[str, Any] = {"name": "search", "description": "Searches."}
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    given: dict[str, Any] = {"model": "policy", "stream": streams, "messages": messages}
    if path == "/v1/chat/completions":
        given["tools"] = [{"type": "function", "function": {**tool, "parameters": schema}}]
    elif path == "/v1/messages":
        given |= {"max_tokens": 100, "tools": [{**tool, "input_schema": schema}]}
    else:
        given["input"] = given.pop("messages")
        given["tools"] = [{"type": "function", **tool, "parameters": schema}]
    return json.dumps(given).encode()


def serve(pipe: Any, num_requests: int) -> None:
    """Serves an episode per client until the requests of each format are answered."""

    async def episodes() -> None:
        for _ in FORMATS:
            chats = [
                RecordedChat(Renderer(), Sampler(), Task([1], ""), Sampling(100))
                for _ in range(CLIENTS)  # type: ignore[arg-type]
            ]
            endpoints = [Endpoint(chat) for chat in chats]
            for endpoint in endpoints:
                await endpoint.__aenter__()
            begun = time.process_time()
            pipe.send([(endpoint.root_url, endpoint.api_key) for endpoint in endpoints])
            while not pipe.poll():
                await asyncio.sleep(0.02)
            pipe.recv()
            pipe.send(time.process_time() - begun)
            for endpoint in endpoints:
                await endpoint.__aexit__()

    torch.set_num_threads(1)
    asyncio.run(episodes())


async def ask(url: str, key: str, path: str, content: bytes) -> bytes:
    """One request on a new connection, as the endpoint closes each."""
    host = url.removeprefix("http://")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    return answer


async def play(path: str, episodes: list[tuple[str, str]], num_requests: int, kib: int) -> None:
    """Conversations of some turns each, begun again with other words."""

    async def one(url: str, key: str, number: int) -> None:
        filler = "the quick brown fox asks for a number; " * (kib * 1024 // 39)
        history: list[tuple[str, str]] = []
        for turn in range(num_requests // CLIENTS):
            if turn % 8 == 0:
                history = [("user", f"{number} {turn} {filler}")]
            else:
                history += [("assistant", "The answer is 4."), ("user", f"And then? {turn}")]
            answer = await ask(url, key, path, body(path, history, streams=turn % 2 == 1))
            assert answer.startswith(b"HTTP/1.1 200"), answer[:400]

    await asyncio.gather(*(one(url, key, number) for number, (url, key) in enumerate(episodes)))


def main() -> None:
    """Prints a line per format."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--kib", type=int, default=64)
    given = arguments.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, given.requests))
    server.start()
    for path in FORMATS:
        episodes = ours.recv()
        asyncio.run(play(path, episodes, given.requests, given.kib))
        ours.send("ended")
        taken = ours.recv()
        count = given.requests // CLIENTS * CLIENTS
        print(f"{path:22} {count / taken:7.0f} requests per second of one core, bodies of {given.kib} KiB")
    server.join()


if __name__ == "__main__":
    main()
