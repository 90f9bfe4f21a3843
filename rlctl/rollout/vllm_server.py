"""Rollouts from vLLM servers over HTTP, on this machine or others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
import json
import math
import threading
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, groupby
from typing import Any, TypeVar

import httpx
import numpy as np
from torch import Tensor

from rlctl.batch import Turn
from rlctl.errors import RunFailure, UsageError, failing_together
from rlctl.processes import note_progress
from rlctl.rollout.completions import MERGE_LORA, Completion, CompletionRollout, listed_tokens
from rlctl.rollout.protocol import EngineContext, Policy, Request, Sampling, SavedAdapter
from rlctl.rollout.replicas import Replicas
from rlctl.rollout.server_access import MODEL_NAME, ONE_TOKEN, EngineProgress, authorization, probe_interval
from rlctl.rollout.weight_broadcast import WeightBroadcast
from rlctl.rollout.weights import PublishedWeights, VersionedDir

#: Maximum number of open requests per rank. Each has a client of its own, because the work of a common one
#: per request grows with their number.
CONNECTIONS = 512
#: Seconds for which an unused connection stays open; servers close theirs after 5.
_IDLE_S = 2.0
#: Path at which a server takes tokens and returns them with the version of the weights of each.
GENERATE = "/inference/v1/generate"
_SYNC_S = 600.0
_RETRY_S = 1.0
_TRIES = 3
_CLOSED = "the connections to the vLLM servers are closed"
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class PublishedPaths:
    """The newest weight version and its directories, which every server can read.

    Attributes:
        weights: directory of a model, with LoRA of the frozen base; "": the weights were broadcast.
        adapter: directory of the LoRA adapter; "": there is none.
        tag: unique version string that each server reports for its weights.
    """

    weights: str = ""
    adapter: str = ""
    tag: str = ""

    @property
    def model(self) -> str:
        """Model name for requests; an adapter is served under its path, so that versions are not confused."""
        return self.adapter or MODEL_NAME


class _WeightsLost(Exception):
    """A server was restarted without the weights that were broadcast."""


class VLLMServerRollout(CompletionRollout):
    """A `RolloutEngine` on vLLM servers; each rank sends its requests round-robin to all of them.

    With adapters, servers receive the base once, and A and B after each update.

    Args:
        published: writes weights where the servers can read them; None on ranks that are neither the main one
            nor start servers.
        replicas: the servers that this process starts, if any; they start with the first weights.
        adapters: as `published`, for adapters; None without adapters, and on all ranks but the main one.
        broadcast: sends weights without files; None: weights are sent as files. None on all ranks but the
            main one.
        starts_empty: servers start with dummy weights and a loader that reads no files.
        held: closed after the servers have stopped.
    """

    def __init__(
        self,
        urls: list[str],
        context: EngineContext,
        *,
        published: PublishedWeights | None,
        replicas: Replicas | None,
        adapters: VersionedDir | None = None,
        broadcast: WeightBroadcast | None = None,
        starts_empty: bool = False,
        held: contextlib.ExitStack | None = None,
    ) -> None:
        names = context.model.generation_config
        super().__init__(context.tokenizer, names, policy_version=None)
        self._urls, self._rank, self._agree = urls, context.rank, context.agree
        self._published, self._replicas = published, replicas
        settings = context.spec.rollout.server
        self._start_timeout = settings.start_timeout
        # Servers that the run starts are monitored by the process that starts them.
        self._answer_timeout = settings.answer_timeout if settings.urls else math.inf
        self._adapters, self._takes_adapter = adapters, context.spec.syncs_adapter
        self._adapter_numbers = count(1)
        self._newest = PublishedPaths()
        self._broadcast, self._needs_broadcast = broadcast, settings.weight_transfer == "broadcast"
        self._starts_empty = starts_empty
        self._tls = httpx.create_ssl_context()  # takes 15 ms, so all clients share it
        self._held = held or contextlib.ExitStack()
        self.notes: list[str] = []
        self._lost: set[str] = set()  # servers that do not have the last broadcast weights
        self._restarted: set[str] = set()  # servers that were found with other weights while they sampled
        self._renewing = {url: asyncio.Lock() for url in urls}
        self._loop = _Loop()
        # The trainer's own requests do not wait for those in flight, here or at the servers.
        self._slots, self._slots_in_flight = asyncio.Semaphore(CONNECTIONS), asyncio.Semaphore(CONNECTIONS)
        self._unused = list[httpx.AsyncClient]()
        rollout = context.spec.rollout
        self._in_flight, self._cache = rollout.in_flight, rollout.stale_cache
        self._versions: dict[str, int] = {}  # number of updates by tag of this run
        self._salt: dict[str, str] = {}  # in flight, updates leave blocks of older weights in the cache
        self._calls, self._watching = count(), list[asyncio.Task[None]]()
        self.num_repeated = 0  # requests that were repeated, because their server failed

    @property
    def description(self) -> str:
        """Number of servers and kind of weight transfer, for the record of a run."""
        return f"{len(self._urls)} vLLM servers, weights by {'broadcast' if self._broadcast else 'files'}"

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; a collective: every rank waits for the main one.

        Raises:
            RunFailure: on every rank: a server rejected the weights, or cannot be reached.
            UsageError: a server does not accept the adapter.
        """
        self._policy_version = None
        self._agree("")  # waits until all ranks have their batches: the shared servers may still be sampling
        with failing_together(self._agree):
            # An engine that hangs is found before it should load. In flight, this would wait for open ones.
            if self._rank == 0 and self._newest.tag and not self._in_flight:
                probe = partial(self._send, path="/v1/completions", body=ONE_TOKEN)
                self._loop.run(self._everywhere(probe, self._answer_timeout))
        with contextlib.ExitStack() as stack:
            if self._replicas:  # broadcasts have a time limit per chunk
                stack.enter_context(self._replicas.loading(math.inf if self._starts_empty else _SYNC_S))
            self._sync(policy, policy_version)

    def _sync(self, policy: Policy, policy_version: int) -> None:
        adapter = policy.adapter() if self._takes_adapter else None
        weights = None  # the base of an adapter does not change
        if adapter is None or not self._newest.weights:
            weights = policy.weights(merged=adapter is None)
        if self._starts_empty and not self._newest.tag:
            with failing_together(self._agree):
                if self._published and self._replicas:  # they receive their weights afterwards
                    self._published.write_config()
                    self._replicas.start()
        last, newest, has_files = self._newest, self._newest, False
        with failing_together(self._agree):
            try:
                if self._published and self._rank == 0:
                    newest, has_files = self._publish(self._published, weights, adapter, policy_version)
            finally:
                for _ in weights or ():  # gathering is a collective, also on ranks that discard the weights
                    pass
        # Known on all ranks before a server has it: a server that one of them finds restarted gets it, too.
        self._newest = PublishedPaths(*map(self._agree, (newest.weights, newest.adapter, newest.tag)))
        self._versions[self._newest.tag] = policy_version
        with failing_together(self._agree):
            if self._rank == 0:
                load = partial(self._load, last=last.adapter, with_weights=has_files)
                self._loop.run(self._everywhere(load, max(self._answer_timeout, _SYNC_S)))
        if self._in_flight:  # later requests do not share cached blocks with earlier ones
            self._salt = {"cache_salt": self._newest.tag}
        self._lost.clear()
        self._policy_version = policy_version

    def each(self) -> dict[str, VLLMServerRollout]:
        """Samplers with the current weights of one server each, by its URL."""
        found = {url: copy.copy(self) for url in self._urls}
        for url, server in found.items():
            server._urls = [url]
        return found

    def close(self) -> None:
        """Stops the servers started here and removes the published weights."""
        self.cancel_requests()
        if self._broadcast:
            self._broadcast.close()
        if self._replicas:
            self._replicas.close()
        for versions in (self._published, self._adapters):
            if versions:
                versions.close()
        self._held.close()

    def sample_in_flight(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """Turns as of `sample`, for any number of threads, also during `sync_weights`.

        Raises:
            RunFailure: as `sample`.
        """
        completions = self._loop.run(self._generate_all(requests, sampling, next(self._calls)))
        return self._turns(completions, requests, sampling, policy_version=-1)  # each token has its version

    def cancel_requests(self) -> None:
        """Ends open requests, and refuses later ones."""
        self._loop.close()

    async def _generate_all(
        self, requests: Sequence[Request], sampling: Sampling, number: int
    ) -> list[Completion]:
        if not self._watching:
            patience = max(self._answer_timeout, _SYNC_S)  # a paused engine produces nothing
            self._watching = [asyncio.create_task(_until_silent(url, patience)) for url in self._urls]
        work = asyncio.gather(*(self._generate(request, sampling, number) for request in requests))
        return await _first(work, self._watching)

    async def _generate(self, request: Request, sampling: Sampling, number: int) -> Completion:
        for _ in range(_TRIES):
            urls = self._current_urls()
            url = urls[(self._rank + number) % len(urls)]  # requests of one call may share their beginning
            async with self._connection(self._slots_in_flight) as client:
                answer = await self._ask(client, url, GENERATE, self._generate_body(request, sampling))
                found = generated(answer.content, self._versions) if answer else None
                if found:
                    return found
                if answer:  # a restarted server has answered, whose weights nobody has renewed yet
                    with contextlib.suppress(_WeightsLost):
                        await self._renew(client, url)
        raise RunFailure("vLLM servers fail and are restarted repeatedly", where=" ".join(self._urls))

    def _generate_body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        parameters = self._parameters(sampling, request) | {"detokenize": False}
        body = {"model": MODEL_NAME, "token_ids": list(request.token_ids), "sampling_params": parameters}
        return body | ({} if self._cache == "keep" else self._salt)

    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._loop.run(self._complete_all(requests, sampling))

    async def _complete_all(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        completions: dict[int, Completion] = {}
        equal = groupby(requests, key=lambda request: request.token_ids)  # for one server, which shares them
        prompts = [number for number, (_, siblings) in enumerate(equal) for _ in siblings]

        async def ask(index: int, url: str) -> Completion | None:
            async with self._connection(self._slots) as client:
                answer = await self._ask(
                    client, url, "/v1/completions", self._body(requests[index], sampling)
                )
            if answer is None:
                return None
            return completion_of(answer.content, has_lists=listed_tokens(sampling) > 0)

        for _ in range(_TRIES):
            urls = self._current_urls()
            self._restarted.clear()
            places = {
                index: urls[(self._rank + prompt) % len(urls)]
                for index, prompt in enumerate(prompts)
                if index not in completions
            }
            found = await self._unless_silent(
                (ask(index, url) for index, url in places.items()), self._answer_timeout
            )
            # A server that started again may have answered some requests before its weights were renewed.
            current = await self._with_newest(set(places.values()) - self._restarted)
            completions |= {
                index: completion
                for (index, url), completion in zip(places.items(), found, strict=True)
                if completion is not None and url in current
            }
            if len(completions) == len(requests):
                return [completions[index] for index in range(len(requests))]
        raise RunFailure("vLLM servers fail and are restarted repeatedly", where=" ".join(self._urls))

    def _body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        body = {
            "model": self._newest.model,
            "prompt": list(request.token_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        first = {"priority": -1} if self._in_flight else {}
        return body | first | self._salt | self._parameters(sampling, request)

    def _current_urls(self) -> list[str]:
        """The servers with the newest weights.

        Raises:
            RunFailure: there is none.
        """
        urls = [url for url in self._urls if url not in self._lost]
        if not urls:
            raise RunFailure(
                "every vLLM server has restarted and lost the weights that were broadcast",
                where=" ".join(self._urls),
                fix="continue with --resume RUN_DIR; with rollout.server.weight_transfer=files a restarted "
                "server loads the weights itself",
            )
        return urls

    async def _with_newest(self, urls: set[str]) -> set[str]:
        """The servers with the newest weights; the others are updated, or not used until the next sync."""
        found = set()
        async with self._client(timeout=None) as client:
            for url in urls - self._lost:
                if await self._tag(client, url) == self._newest.tag:
                    found.add(url)
                else:
                    await self._renew_or_lose(client, url)
        return found

    async def _tag(self, client: httpx.AsyncClient, url: str) -> str:
        return str((await self._send(client, url, "/weight_info")).json()["weight_version"])

    async def _renew_or_lose(self, client: httpx.AsyncClient, url: str) -> None:
        if self._newest.weights:
            adapter = self._newest.adapter
            await self._load(client, url, last=adapter, with_weights=not adapter)
        else:
            self._lost.add(url)

    def _publish(
        self,
        published: PublishedWeights,
        weights: Iterator[tuple[str, Tensor]] | None,
        adapter: SavedAdapter | None,
        policy_version: int,
    ) -> tuple[PublishedPaths, bool]:
        """Broadcasts or writes a weight version; its directories, and whether servers must read weights."""
        newest = replace(self._newest, tag=f"{policy_version}-{uuid.uuid4().hex[:12]}")
        starts = self._replicas if self._replicas and not self._replicas.is_started else None
        if weights is not None and self._broadcast and self._forms_group(self._broadcast):
            if self._in_flight:  # chunk by chunk: until the last one, the weights are a mixture
                self._loop.run(self._everywhere(self._pause, _SYNC_S))
            self._broadcast.send(weights)
            weights, newest = None, replace(newest, weights="")
        if weights is not None:
            newest = replace(newest, weights=str(published.write(weights, policy_version)))
        if adapter and self._adapters:
            name = f"adapter-{next(self._adapter_numbers)}"  # unique: caches use it as a key
            newest = replace(newest, adapter=str(self._adapters.publish(name, adapter.save)))
        if starts:
            starts.start()  # each server loads the newest weights on start
        return newest, not (weights is None or starts)

    def _forms_group(self, broadcast: WeightBroadcast) -> bool:
        """Whether every server is in the group; if none can be formed, weights are sent as files from now on.

        Raises:
            RunFailure: the group cannot be formed, and a broadcast is required.
        """
        try:
            found: list[str] = []
            if broadcast.is_connected:
                found = self._loop.run(self._everywhere(self._tag, self._answer_timeout))
            if set(found) != {self._newest.tag}:  # a restarted server is not in the group any more
                broadcast.connect()
        except RunFailure as error:
            if self._needs_broadcast:
                raise
            self.notes.append(f"vLLM servers get new weights as files, which takes longer: {error.what}")
            self._broadcast = None
        return self._broadcast is not None

    async def _everywhere(
        self, call: Callable[[httpx.AsyncClient, str], Awaitable[_Result]], patience: float
    ) -> list[_Result]:
        async with self._client(timeout=_SYNC_S) as client:
            return await self._unless_silent((call(client, url) for url in self._urls), patience)

    async def _unless_silent(self, work: Iterable[Awaitable[_Result]], patience: float) -> list[_Result]:
        """Returns the results; meanwhile checks regularly that every server's engine works.

        Raises:
            RunFailure: an engine has produced no token for `patience` seconds.
        """
        watching = [asyncio.create_task(_until_silent(url, patience)) for url in self._urls]
        try:
            return await _first(asyncio.gather(*work), watching)
        finally:
            for task in watching:
                task.cancel()

    async def _load(self, client: httpx.AsyncClient, url: str, *, last: str, with_weights: bool) -> None:
        """Gives a server the newest weights; `last` is the adapter that it has, unless it was restarted."""
        newest = self._newest
        has_last = bool(last) and await self._has(client, url, last)
        if has_last and newest.adapter == last:
            return
        if self._in_flight:
            await self._pause(client, url)
        # A server without the last adapter was restarted, possibly without the current base.
        if with_weights or (last and not has_last):
            if self._starts_empty:
                overrides = {"overrides": {"load_config": {"load_format": "auto"}}}
                loader = {"method": "update_config", "kwargs": overrides}
                await self._send(client, url, "/collective_rpc", loader)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": newest.weights}}
            await self._send(client, url, "/collective_rpc", reload)
        if not self._in_flight:
            await self._reset_cache(client, url)
        if newest.adapter:
            await self._adapt(client, url, newest.adapter)
        if has_last:
            await self._send(client, url, "/v1/unload_lora_adapter", {"lora_name": last})
        await self._send(client, url, "/update_weight_version", {"new_version": newest.tag})
        if self._in_flight:
            await self._send(client, url, "/resume", {})

    async def _reset_cache(self, client: httpx.AsyncClient, url: str) -> None:
        """Drops what older weights computed; a server refuses that while open requests use it.

        Raises:
            RunFailure: it still refuses after `_SYNC_S`.
        """
        deadline = time.monotonic() + _SYNC_S
        while (answer := await self._send(client, url, "/reset_prefix_cache", {})).content:
            if answer.json().get("success", True):
                return
            if time.monotonic() > deadline:
                what = (
                    f"the server kept cached blocks of older weights: requests used them for {_SYNC_S:.0f} s"
                )
                raise RunFailure(what, where=url, fix="let no other client send requests to it")
            await asyncio.sleep(_RETRY_S)

    async def _pause(self, client: httpx.AsyncClient, url: str) -> None:
        """Open requests wait for `/resume`; with `recompute` new weights then read them again."""
        clears = str(self._cache == "recompute").lower()
        await self._send(client, url, f"/pause?mode=keep&clear_cache={clears}", {})

    async def _has(self, client: httpx.AsyncClient, url: str, adapter: str) -> bool:
        models = (await self._send(client, url, "/v1/models")).json()["data"]
        return any(model["id"] == adapter for model in models)

    async def _adapt(self, client: httpx.AsyncClient, url: str, adapter: str) -> None:
        try:
            named = {"lora_name": adapter, "lora_path": adapter}
            await self._send(client, url, "/v1/load_lora_adapter", named)
        except RunFailure as error:
            if await self._has(client, url, adapter):  # loaded by another rank in the meantime
                return
            raise UsageError(
                f"the adapter was not loaded: {error.what}", where=url, fix=MERGE_LORA
            ) from error

    async def _ask(
        self, client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]
    ) -> httpx.Response | None:
        """Samples; a server that could not be reached may return with other weights. None: it lost them."""
        try:
            return await self._send(client, url, path, body, partial(self._renew, client, url))
        except _WeightsLost:
            return None

    async def _renew(self, client: httpx.AsyncClient, url: str) -> None:
        """Gives a server the newest weights if it has others.

        Raises:
            _WeightsLost: it cannot get them.
        """
        self.num_repeated += 1
        async with self._renewing[url]:  # by one of the requests that failed
            if self._newest.adapter:
                await self._renew_or_lose(client, url)
            elif await self._tag(client, url) != self._newest.tag:
                self._restarted.add(url)
                await self._renew_or_lose(client, url)
        if url in self._lost:
            raise _WeightsLost

    async def _send(
        self,
        client: httpx.AsyncClient,
        url: str,
        path: str,
        body: dict[str, Any] | None = None,
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> httpx.Response:
        """GETs, or POSTs `body`; on failure waits for the server, renews its weights and retries."""
        method = "GET" if body is None else "POST"
        for tries_left in reversed(range(_TRIES)):
            try:
                response = await client.request(method, url + path, json=body)
            except httpx.HTTPError as error:
                words = str(error) or type(error).__name__
            else:
                if response.is_success:
                    return response
                words = " ".join(response.text.split())[:500]
                has_forgotten = renew and self._newest.adapter and response.status_code == 404
                if response.is_client_error and not has_forgotten:
                    raise RunFailure(f"vLLM refuses {path} (HTTP {response.status_code}): {words}", where=url)
            if tries_left:
                await self._until_it_answers(client, url, words)
                if renew:
                    await renew()
        raise RunFailure(f"a vLLM server repeatedly fails at {path}: {words}", where=url)

    async def _until_it_answers(self, client: httpx.AsyncClient, url: str, words: str) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            await asyncio.sleep(_RETRY_S)
            if self._replicas:
                self._replicas.check()
            try:
                if (await client.get(f"{url}/health", timeout=5)).is_success:
                    return
            except httpx.HTTPError:
                pass
            if time.monotonic() > deadline:
                raise RunFailure(f"a vLLM server does not answer any more: {words}", where=url)

    @contextlib.asynccontextmanager
    async def _connection(self, slots: asyncio.Semaphore) -> AsyncIterator[httpx.AsyncClient]:
        """A client for one request, which waits for it as long as it takes."""
        async with slots:
            client = self._unused.pop() if self._unused else self._client(timeout=None)
            try:
                yield client
            finally:
                self._unused.append(client)

    def _client(self, timeout: float | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=authorization(),
            timeout=httpx.Timeout(timeout, connect=30),
            limits=httpx.Limits(max_keepalive_connections=1, keepalive_expiry=_IDLE_S),
            verify=self._tls,
            trust_env=False,  # proxies of the environment are for external hosts, not for engines
        )


class _Loop:
    """An event loop in a thread, so that several threads, and a notebook's too, can wait for coroutines."""

    def __init__(self) -> None:
        self._loop, self._is_closed = asyncio.new_event_loop(), False
        # The watchdog monitors threads of this name. It never ends, so that a late call is refused.
        threading.Thread(target=self._loop.run_forever, name="rollouts-http", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of a coroutine.

        Raises:
            RunFailure: the loop was closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(self._unless_closed(work), self._loop).result()
        except CancelledError as error:
            raise RunFailure(_CLOSED) from error

    async def _unless_closed(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        if self._is_closed:
            work.close()
            raise RunFailure(_CLOSED)
        return await work

    def close(self) -> None:
        """Cancels everything that runs, and refuses what follows; may be called more than once."""

        async def cancel() -> None:
            self._is_closed = True
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()


async def _first(work: asyncio.Future[_Result], watching: Sequence[asyncio.Task[None]]) -> _Result:
    """The result of `work`, unless one of `watching` raises before."""
    everything: list[asyncio.Future[Any]] = [work, *watching]
    await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        for task in watching:
            if task.done():
                task.result()  # raises
    return await work


async def _until_silent(url: str, patience: float) -> None:
    """Checks every few seconds that a server's engine works. `_send` handles servers that refuse connections.

    Raises:
        RunFailure: the engine has produced no token for `patience` seconds.
    """
    interval, progress = probe_interval(patience), EngineProgress(url)
    heard = time.monotonic()
    while (silence := time.monotonic() - heard) < patience:
        await asyncio.sleep(interval)
        try:
            if not await asyncio.to_thread(progress.is_seen, interval):
                continue
            note_progress()  # sampling may take longer than the watchdog's limit
        except httpx.HTTPError:
            pass
        heard = time.monotonic()
    raise RunFailure(
        f"a vLLM server runs, but its engine has not answered for {silence:.0f} s",
        where=url,
        fix="see its log and start it again; rollout.server.answer_timeout sets this limit",
    )


def completion_of(answer: bytes, *, has_lists: bool) -> Completion:
    """Converts a server's answer to one request."""
    [choice] = json.loads(answer)["choices"]
    token_ids, log_probs = np.array(choice["token_ids"], dtype=np.int64), choice["logprobs"]
    lists = log_probs.get("top_logprobs") if has_lists else None
    listed = None
    if lists and all(lists) and next(iter(lists[0])).startswith("token_id:"):
        names = " ".join(chain.from_iterable(lists)).replace("token_id:", "")
        values = chain.from_iterable(map(dict.values, lists))
        listed = (
            np.fromiter(map(len, lists), dtype=np.int64),
            np.fromstring(names, dtype=np.int64, sep=" "),
            np.fromiter(values, dtype=np.float32),
        )
    of_tokens = np.array(log_probs["token_logprobs"], dtype=np.float32)
    routed = choice.get("routed_experts")  # a file of NumPy in base64
    experts = np.load(io.BytesIO(base64.b64decode(routed)), allow_pickle=False) if routed else None
    return Completion(token_ids, of_tokens, choice.get("finish_reason"), listed, experts=experts)


def generated(answer: bytes, versions: Mapping[str, int]) -> Completion | None:
    """Converts a server's answer at `GENERATE`; None: some token is of weights that this run did not send.

    Args:
        versions: number of updates by tag of the weights.

    Raises:
        RunFailure: the server does not report which weights sampled a token.
    """
    [choice] = json.loads(answer)["choices"]
    if "weight_versions" not in choice:
        what, fix = "the server does not report which weights sampled a token", "use vLLM 0.32 or newer"
        raise RunFailure(what, where="rollout.in_flight", fix=fix)
    spans, tokens = choice["weight_versions"] or [], choice["logprobs"]["content"]
    known = [versions.get(span["version"]) for span in spans]
    lengths = [span["end"] - span["start"] for span in spans]
    if None in known or sum(lengths) != len(tokens):
        return None
    lists = [token["top_logprobs"] for token in tokens]
    together = list(chain.from_iterable(lists))
    return Completion(
        np.array([token["token_id"] for token in tokens], dtype=np.int64),
        np.array([token["logprob"] for token in tokens], dtype=np.float32),
        choice.get("finish_reason"),
        (
            np.array([len(found) for found in lists], dtype=np.int64),
            np.array([one["token_id"] for one in together], dtype=np.int64),
            np.array([one["logprob"] for one in together], dtype=np.float32),
        ),
        np.repeat(np.array(known, dtype=np.int64), lengths),
    )
