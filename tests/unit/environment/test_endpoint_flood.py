"""Connections of other users to an agent's endpoint get no answer, and take nothing from the episodes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.environment import connections
from rlctl.environment.connections import HEADERS_S, MOST_OF_OTHERS, MOST_UNKNOWN, Listener
from rlctl.environment.endpoint import Endpoint
from rlctl.environment.peer_users import NOBODY, PeerUsers
from tests.scripted_engine import ScriptedEngine
from tests.unit.environment.test_recording_endpoint import QUESTION, ask, play

openai = pytest.importorskip("openai")
#: Opens connections to every port that it reads, sends the beginning of a request, and keeps them open.
ATTACK = """
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept, beginning = [], sys.argv[1].encode().decode("unicode_escape").encode()
for line in sys.stdin:
    for _ in range(1300):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", int(line)))
        kept.append(one)
    time.sleep(0.2)
    for one in kept:
        try:
            one.send(beginning)
        except OSError:
            pass
    print("open", flush=True)
time.sleep(1000)
"""
BEGINNINGS = {
    "nothing": "",
    "half a line": "POST /v1/chat/comp",
    "half the headers": "POST /v1/chat/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nX-A: ",
    "a wrong key and half a body": (
        "POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer x\\r\\n"
        "Content-Length: 100\\r\\n\\r\\n{"
    ),
}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """This process can open few more than the endpoint's limit and its own episodes need."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + MOST_UNKNOWN + 100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line was logged, and no connection is known."""
    monkeypatch.setattr(connections, "_unknowns", connections._Unknowns())


@contextlib.contextmanager
def attacker(beginning: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ATTACK, beginning]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("few_descriptors", "forgetful")
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_1300_half_open_requests_lose_no_episode(beginning: str, caplog: pytest.LogCaptureFixture) -> None:
    """Several episodes, each with an endpoint of its own, one after the other and at the same time."""
    most = 0

    with attacker(BEGINNINGS[beginning]) as process:
        assert process.stdin
        assert process.stdout

        async def agent(client: Any, endpoint: Endpoint) -> int:
            nonlocal most
            print(endpoint.base_url.rpartition(":")[2].partition("/")[0], file=process.stdin, flush=True)
            done = 0
            for _ in range(4):
                await ask(client, QUESTION)
                most, done = max(most, open_descriptors()), done + 1
                await asyncio.sleep(0.1)
            assert await asyncio.to_thread(process.stdout.readline) == "open\n"
            await ask(client, QUESTION)
            return done + 1

        before = open_descriptors()
        with caplog.at_level(logging.WARNING):
            episodes, returned = play(ScriptedEngine(lambda _: "ok"), agent, n=2)
    assert [episode.error for episode in episodes] == ["", ""]
    assert returned == [5, 5]
    assert most <= before + MOST_UNKNOWN + 50
    assert [record.name for record in caplog.records] in ([], [connections.__name__])


async def idle(port: int) -> float:
    """Seconds after which a connection that sends nothing is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    assert await reader.read() == b""
    writer.close()
    return time.monotonic() - started


@pytest.mark.usefixtures("forgetful")
def test_headers_have_few_seconds_however_slowly_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HEADERS_S <= 5
    monkeypatch.setattr("rlctl.environment.endpoint.HEADERS_S", 0.3)

    async def agent(_: Any, endpoint: Endpoint) -> None:
        port = int(endpoint.base_url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(200):  # would go on for ten seconds
                writer.write(b"X-%d: a\r\n" % number)
                await writer.drain()
                await asyncio.sleep(0.05)
                if reader.at_eof():
                    break
        assert number < 150
        assert await idle(port) > 0.2

    play(ScriptedEngine(lambda _: "ok"), agent)


@pytest.mark.usefixtures("forgetful")
def test_a_body_with_the_key_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.environment.endpoint.HEADERS_S", 0.3)

    async def agent(_: Any, endpoint: Endpoint) -> bytes:
        port = int(endpoint.base_url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"messages": [{"role": "user", "content": "2+2?"}]}'
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Authorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body[:10])
        await asyncio.sleep(0.6)
        writer.write(body[10:])
        answer = await reader.read()
        writer.close()
        return answer

    _, [answer] = play(ScriptedEngine(lambda _: "ok"), agent)
    assert answer.startswith(b"HTTP/1.1 200")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Callable[[], None]) -> None:
    line = await reader.readline()
    admit()
    writer.write(line)
    await writer.drain()


async def said(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello\n")
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED]
)
def test_the_accept_loop_outlives_every_error(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(number, "no")] * 50
    monkeypatch.setattr(connections, "_RETRY_S", 0.0)

    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        accept = loop.sock_accept

        async def fails(listening: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", fails)
        listener = Listener(echo)
        try:
            return await said(listener.port)
        finally:
            await listener.close()

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(asyncio.wait_for(main(), 30)) == b"hello\n"
    assert not failures
    assert len(caplog.records) == 1  # one line a minute


@pytest.mark.usefixtures("forgetful")
def test_whoever_shows_the_key_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest unknown connection gives way, one that is known never does; over all listeners."""
    monkeypatch.setattr(connections, "MOST_UNKNOWN", 4)
    monkeypatch.setattr(connections, "_UNDISTURBED_S", 0.0)

    async def main() -> None:
        first, second = Listener(echo_twice), Listener(echo_twice)
        known = await asyncio.open_connection("127.0.0.1", first.port)
        known[1].write(b"key\n")
        assert await known[0].readline() == b"key\n"
        strangers = [await asyncio.open_connection("127.0.0.1", second.port) for _ in range(20)]
        await asyncio.sleep(0.3)
        closed = [reader.at_eof() for reader, _ in strangers]
        assert closed[:10] == [True] * 10
        assert not closed[-1]
        assert 1 <= closed.count(False) <= 6
        known[1].write(b"more\n")
        assert await known[0].readline() == b"more\n"
        for _, writer in (known, *strangers):
            writer.close()
        await first.close()
        await second.close()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.usefixtures("forgetful")
def test_the_kernel_holds_a_flood_until_it_is_accepted() -> None:
    """From a full queue it would reset honest connections, too."""

    async def main() -> list[bytes]:
        listener, loop = Listener(echo), asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            address = "127.0.0.1", listener.port
            clients = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(400)]
            for client in clients:  # nothing was accepted yet: the loop is busy here
                client.sendall(b"hello\n")
                client.setblocking(False)
            assert not connections._unknowns._waiting
            answers = await asyncio.gather(*(loop.sock_recv(client, 10) for client in clients))
        await listener.close()
        return answers

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [b"hello\n"] * 400


@pytest.mark.usefixtures("forgetful")
def test_a_loop_that_was_held_up_reads_before_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client shares the loop: it sends its key a few passes after a hold-up, when its time is over."""
    monkeypatch.setattr(connections, "MOST_UNKNOWN", 4)
    monkeypatch.setattr(connections, "_UNDISTURBED_S", 0.05)

    async def main() -> None:
        listener = Listener(echo_twice)
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(socket.socket()) for _ in range(8)]
            for connection in opened:
                connection.connect(("127.0.0.1", listener.port))
            loop = asyncio.get_running_loop()
            while len(connections._unknowns._waiting) < 4:
                await asyncio.sleep(0)
            first = opened[0]
            first.setblocking(False)
            loop.call_soon(time.sleep, 0.2)
            for _ in range(6):  # the client's own way to its request
                await asyncio.sleep(0)
            first.send(b"key\n")
            answer = await asyncio.wait_for(loop.sock_recv(first, 10), 10)
            assert answer == b"key\n"
        await listener.close()

    asyncio.run(asyncio.wait_for(main(), 30))


async def echo_twice(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Callable[[], None]
) -> None:
    for _ in range(2):
        line = await reader.readline()
        admit()
        writer.write(line)
        await writer.drain()


def test_nothing_is_left_open(forgetful: None) -> None:
    """Neither the port nor connections, of whatever kind, after the episode."""

    async def main() -> None:
        listener = Listener(echo)
        opened = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(10)]
        await asyncio.sleep(0.1)
        await listener.close()
        for reader, writer in opened:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", listener.port)

    before = open_descriptors()
    asyncio.run(main())
    assert open_descriptors() == before
    assert not connections._unknowns._waiting


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection: that of the client, and that which was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), 5)
        server.settimeout(5)
        return client, server.accept()[0]


def test_whose_process_is_at_the_other_end() -> None:
    users = PeerUsers()
    if users._kernel is None:
        pytest.skip("no netlink here")
    client, accepted = connected()
    with client, accepted:
        assert users.user_of(accepted) == os.getuid()
        client.close()
        assert users.user_of(accepted) == NOBODY
    gone, reset = connected()
    with reset:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        assert users.user_of(reset) == NOBODY
    users.close()
    client, accepted = connected()
    with client, accepted:
        assert users.user_of(accepted) is None


@contextlib.contextmanager
def as_another_user(connect: Callable[[], None]) -> Iterator[None]:
    """Calls a function again and again in a process of another user; it must import nothing."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            while True:
                with contextlib.suppress(OSError):
                    connect()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_users_flood_takes_few_places_and_none_of_this_user(caplog: pytest.LogCaptureFixture) -> None:
    """It opens up to 2,000 connections a second."""
    most: list[int] = []

    async def agent(client: Any, endpoint: Endpoint) -> int:
        port, kept = int(endpoint.base_url.rpartition(":")[2].partition("/")[0]), deque(maxlen=400)

        def connect() -> None:
            one = socket.socket()
            one.setblocking(False)
            kept.append(one)
            one.connect_ex(("127.0.0.1", port))
            time.sleep(0.0005)

        with as_another_user(connect):
            for _ in range(5):
                await asyncio.sleep(0.2)
                most.append(len(connections._unknowns._of_others))
                assert not connections._unknowns._waiting
                await ask(client, QUESTION)
        return len(most)

    with caplog.at_level(logging.WARNING):
        _, returned = play(ScriptedEngine(lambda _: "ok"), agent)
    assert returned == [5]
    assert 0 < max(most) <= MOST_OF_OTHERS
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("forgetful")
def test_others_take_no_place_of_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key they are served, and the newest of them gives way, or the oldest that had its passes."""
    users = iter([os.getuid() + 1] * 20 + [os.getuid()])
    monkeypatch.setattr(connections, "MOST_OF_OTHERS", 4)
    monkeypatch.setattr(PeerUsers, "user_of", lambda *_: next(users))

    async def main() -> None:
        listener = Listener(echo_twice)
        known = await asyncio.open_connection("127.0.0.1", listener.port)
        known[1].write(b"key\n")
        assert await known[0].readline() == b"key\n"
        strangers = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(19)]
        own = await asyncio.open_connection("127.0.0.1", listener.port)
        own[1].write(b"hello\n")
        assert await own[0].readline() == b"hello\n"
        await asyncio.sleep(0.1)
        assert sum(not reader.at_eof() for reader, _ in strangers) == 4
        known[1].write(b"more\n")
        assert await known[0].readline() == b"more\n"
        for _, writer in (known, own, *strangers):
            writer.close()
        await listener.close()
        assert connections._unknowns._others_begun == 0
        assert not connections._unknowns._of_others

    asyncio.run(asyncio.wait_for(main(), 30))
