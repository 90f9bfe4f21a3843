"""Requests to vLLM servers over HTTP, from any thread, on one event loop; what happens if servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import httpx

from rlctl.errors import RunFailure, first_line
from rlctl.processes import note_progress
from rlctl.rollout.server_access import EngineProgress, authorization, probe_interval
from rlctl.run_spec.rollout import ServerSpec

#: Longest time of a request that does not sample, in seconds.
SYNC_S = 600.0
#: How often something is tried with a server that fails.
TRIES = 3
RETRY_S = 1.0
#: Seconds for which an unused connection stays open; servers close theirs after 5.
_IDLE_S = 2.0
_Result = TypeVar("_Result")


class ServerFailed(RunFailure):
    """A server could not be reached, or failed; it may answer later."""


@contextlib.contextmanager
def readable(url: str, path: str) -> Iterator[None]:
    """Context in which a server's answer is read: something else than vLLM answers is its failure.

    Raises:
        ServerFailed: as above.
    """
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        message = f"a vLLM server answers {path} with something else than vLLM does: {first_line(error)}"
        raise ServerFailed(message, where=url) from error


class ServerClient:
    """Sends requests to servers.

    Args:
        settings: time limits of the servers.
        check: raises the failure of servers that this process has started, if there is one.

    Attributes:
        urls: of the servers.
        answer_timeout: seconds after which an engine that produces no token counts as hanging.
    """

    def __init__(
        self, urls: list[str], settings: ServerSpec, check: Callable[[], None] | None = None
    ) -> None:
        self.urls = urls
        self._check = check
        self._start_timeout = settings.start_timeout
        # Servers that the run starts are monitored by the process that starts them.
        self.answer_timeout = settings.answer_timeout if settings.urls else math.inf
        self._tls = httpx.create_ssl_context()  # takes 15 ms, so all clients share it
        self._unused = list[httpx.AsyncClient]()
        self._watching = list[asyncio.Task[None]]()
        self._num_watched = 0
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        # The watchdog monitors threads of this name. It never ends, so that a late call is refused.
        threading.Thread(target=self._loop.run_forever, name="rollouts-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of a coroutine, for any thread; a notebook has a loop of its own.

        Raises:
            RunFailure: the client was closed.
        """
        try:
            return self.start(work).result()
        except CancelledError as error:
            raise RunFailure("the connections to the vLLM servers are closed") from error

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Runs a coroutine; its future is cancelled if the client was closed."""
        return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop)

    async def _unless_closed(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if self._is_closed:
            work.close()
            raise asyncio.CancelledError
        return await work

    def close(self) -> None:
        """Cancels everything that runs, and refuses what follows; may be called more than once."""

        def cancel() -> None:
            self._is_closed = True
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)

    async def send(
        self, url: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = SYNC_S
    ) -> httpx.Response:
        """GETs, or POSTs `body`; each open request has a client of its own.

        The work of a common client per request would grow with their number.

        Raises:
            ServerFailed: the server cannot be reached, fails, or does not answer in time.
            RunFailure: it refuses the request.
        """
        client = self._unused.pop() if self._unused else self._client()
        try:
            answer = await client.request(
                "GET" if body is None else "POST",
                url + path,
                json=body,
                timeout=httpx.Timeout(timeout, connect=30),
            )
        except httpx.HTTPError as error:
            words = str(error) or type(error).__name__
            raise ServerFailed(f"a vLLM server fails at {path}: {words}", where=url) from error
        finally:
            self._unused.append(client)
        if answer.is_success:
            return answer
        words = f"{path} (HTTP {answer.status_code}): {' '.join(answer.text.split())[:500]}"
        if answer.is_client_error:
            raise RunFailure(f"vLLM refuses {words}", where=url)
        raise ServerFailed(f"a vLLM server fails at {words}", where=url)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=authorization(),
            limits=httpx.Limits(max_keepalive_connections=1, keepalive_expiry=_IDLE_S),
            verify=self._tls,
            trust_env=False,  # proxies of the environment are for external hosts, not for engines
        )

    async def everywhere(
        self, call: Callable[[str], Awaitable[_Result]], patience: float | None = None
    ) -> list[_Result]:
        """The results of a call for each server; see `watched` and `repeated`."""
        return await self.watched((self.repeated(call, url) for url in self.urls), patience)

    async def repeated(self, call: Callable[[str], Awaitable[_Result]], url: str) -> _Result:
        """The result of a call for a server; the whole call is repeated after the server has failed.

        Raises:
            RunFailure: the server fails repeatedly, or does not answer any more.
        """
        for _ in range(TRIES - 1):
            try:
                return await call(url)
            except ServerFailed as failure:
                await self.until_it_answers(url, failure)
        return await call(url)

    async def until_it_answers(self, url: str, failure: ServerFailed) -> None:
        """Waits until a server that has failed is healthy.

        Raises:
            RunFailure: it does not answer within `start_timeout`, or was given up.
        """
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            await asyncio.sleep(RETRY_S)
            if self._check:
                self._check()
            with contextlib.suppress(ServerFailed):
                await self.send(url, "/health", timeout=5)
                return
        raise RunFailure(f"a vLLM server does not answer any more: {failure.what}", where=url)

    async def watched(
        self, work: Iterable[Awaitable[_Result]], patience: float | None = None
    ) -> list[_Result]:
        """Returns the results; meanwhile checks regularly that every server's engine works.

        What runs at the same time shares these checks, and must have the same patience.

        Args:
            patience: in seconds; None: enough for an engine that is paused, or loads weights.

        Raises:
            RunFailure: an engine has produced no token for so long.
        """
        if not self._watching:
            patience = max(self.answer_timeout, SYNC_S) if patience is None else patience
            self._watching = [asyncio.create_task(_until_silent(url, patience)) for url in self.urls]
        self._num_watched += 1

        async def all_of_it() -> list[_Result]:
            return await asyncio.gather(*work)

        results = asyncio.create_task(all_of_it())
        watching = self._watching
        try:
            await asyncio.wait([results, *watching], return_when=asyncio.FIRST_COMPLETED)
            if not results.done():
                results.cancel()
                for task in watching:
                    if task.done():
                        task.result()  # raises
            return await results
        finally:
            self._num_watched -= 1
            if not self._num_watched:
                for task in watching:
                    task.cancel()
                self._watching = []


async def _until_silent(url: str, patience: float) -> None:
    """Checks every few seconds that a server's engine works; one that refuses connections is not silent.

    Raises:
        RunFailure: the engine has produced no token for `patience` seconds.
    """
    interval = probe_interval(patience)
    progress = EngineProgress(url)
    heard = time.monotonic()
    while (silence := time.monotonic() - heard) < patience:
        await asyncio.sleep(interval)
        with contextlib.suppress(httpx.HTTPError):
            if not await asyncio.to_thread(progress.is_seen, interval):
                continue
            note_progress()  # sampling may take longer than the watchdog's limit
        heard = time.monotonic()
    raise RunFailure(
        f"a vLLM server runs, but its engine has not answered for {silence:.0f} s",
        where=url,
        fix="see its log and start it again; rollout.server.answer_timeout sets this limit",
    )
