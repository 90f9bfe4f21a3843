"""Rollouts from vLLM servers, over HTTP; on this machine or on others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import httpx
import torch
from torch import Tensor

from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure
from rlctl.rollout.completions import LOGPROBS_MODE, Completion, CompletionRollout, Request
from rlctl.rollout.handover import Handover
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.replicas import MODEL_NAME, Replicas

#: Requests one rank has open at once; each is a prompt with all its responses. The client's work per
#: request grows with their number.
CONNECTIONS = 128
_SYNC_S = 600.0
_RETRY_S = 1.0
_TRIES = 3


class VLLMServerRollout(CompletionRollout):
    """A `RolloutEngine` on vLLM servers; a rank's requests go round all of them.

    Args:
        urls: where the servers answer.
        tokenizer: decodes responses.
        generation_config: of the model.
        device: where the tensors lie that `generate` returns.
        rank: this process among the run's.
        agree: gives every rank the first text among theirs that is not empty.
        handover: hands weights over; None on all ranks but the main one.
        replicas: the servers of this process, if it has any; they start with the first weights.
        start_timeout: seconds to wait for a server that went away.
    """

    def __init__(
        self,
        urls: list[str],
        tokenizer: Any,
        generation_config: Any,
        *,
        device: torch.device | str,
        rank: int,
        agree: Callable[[str], str],
        handover: Handover | None,
        replicas: Replicas | None,
        start_timeout: float,
    ) -> None:
        super().__init__(tokenizer, generation_config, policy_version=None, device=device)
        self._urls, self._rank, self._agree = urls, rank, agree
        self._handover, self._replicas = handover, replicas
        self._start_timeout = start_timeout
        self._newest = ""  # where the last weights lie

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; a collective: every rank waits for the main one.

        Raises:
            RunFailure: on every rank; a server refused the weights, or cannot be reached.
        """
        self._policy_version = None
        self._agree("")  # every rank has its batch: servers are all ranks', and sample for some of them still
        weights, newest, failure = iter(named_tensors), "", None
        if self._handover:
            try:
                newest = self._hand_over(self._handover, weights, policy_version)
            except RlctlError as error:
                failure = error
        for _ in weights:  # gathering is a collective, even for ranks that keep nothing
            pass
        others = self._agree(str(failure or ""))
        if failure:
            raise failure
        if others:
            raise RunFailure(others)
        self._newest = self._agree(newest)
        self._policy_version = policy_version

    def close(self) -> None:
        """End the servers started here, and remove the weights handed over."""
        if self._replicas:
            self._replicas.close()
        if self._handover:
            self._handover.close()

    def _complete(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        return asyncio.run(self._complete_all(requests, sampling))

    async def _complete_all(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        turn = asyncio.Semaphore(CONNECTIONS)  # the client's own queue is slow when it is long
        async with self._client(timeout=None) as client:

            async def ask(url: str, request: Request) -> httpx.Response:
                body = {"model": MODEL_NAME, "prompt": request.prompt_ids, "return_token_ids": True}
                async with turn:
                    return await self._ask(client, url, body | self._parameters(sampling, request))

            answers = await asyncio.gather(
                *(
                    ask(self._urls[(self._rank + index) % len(self._urls)], request)
                    for index, request in enumerate(requests)
                )
            )
        return [
            _completion(choice)
            for answer in answers
            for choice in sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        ]

    def _hand_over(
        self, handover: Handover, weights: Iterator[tuple[str, Tensor]], policy_version: int
    ) -> str:
        """Bring a version to every server; returns where it lies."""
        path = str(handover.write(weights, policy_version))
        if self._replicas and not self._replicas.is_started:
            self._replicas.start()  # each loads the newest weights when it starts
        else:
            asyncio.run(self._load_everywhere(path))
        return path

    async def _load_everywhere(self, path: str) -> None:
        async with self._client(timeout=_SYNC_S) as client:
            await asyncio.gather(*(self._load(client, url, path) for url in self._urls))

    async def _load(self, client: httpx.AsyncClient, url: str, path: str) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._post(client, url, "/collective_rpc", reload)
        await self._post(client, url, "/reset_prefix_cache", {})

    async def _ask(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> httpx.Response:
        """Sample; a server that was away may have come back with the weights it once started with."""

        async def renew() -> None:
            await self._load(client, url, self._newest)

        return await self._post(client, url, "/v1/completions", body, renew)

    async def _post(
        self,
        client: httpx.AsyncClient,
        url: str,
        path: str,
        body: dict[str, Any],
        renew: Callable[[], Awaitable[None]] | None = None,
    ) -> httpx.Response:
        """Ask a server; one that went away is waited for, renewed and asked again."""
        for tries_left in reversed(range(_TRIES)):
            try:
                response = await client.post(url + path, json=body)
            except httpx.HTTPError as error:
                words = str(error) or type(error).__name__
            else:
                if response.is_success:
                    return response
                words = " ".join(response.text.split())[:500]
                if response.is_client_error:
                    raise RunFailure(f"vLLM refuses {path} (HTTP {response.status_code}): {words}", where=url)
            if tries_left:
                await self._until_it_answers(client, url, words)
                if renew:
                    await renew()
        raise RunFailure(f"a vLLM server fails at {path} again and again: {words}", where=url)

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

    @staticmethod
    def _client(timeout: float | None) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        # A proxy of the environment is for the world outside, not for engines.
        return httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=30), limits=limits, trust_env=False)


def reachable(urls: list[str], seconds: float) -> None:
    """Wait until every server answers, and make sure that each was started as a run needs it.

    Raises:
        EnvironmentFailure: one does not answer for so many seconds, or was started otherwise.
    """
    deadline = time.monotonic() + seconds
    for url in urls:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                    break
                words = "it is not healthy"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                words = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"no vLLM server answers: {words}",
                    where=f"rollout.server.urls: {url}",
                    fix="start it there, with the options docs/rollout-engines.md shows",
                )
            time.sleep(_RETRY_S)
        _check_settings(url)


def _check_settings(url: str) -> None:
    """Log-probs before the temperature look plausible, and weigh every sample wrongly."""
    where = f"rollout.server.urls: {url}"
    fix = "start it with the options docs/rollout-engines.md shows"
    answer = httpx.get(f"{url}/server_info?config_format=json", timeout=_SYNC_S, trust_env=False)
    if not answer.is_success:
        what = "the server takes no weights: vLLM's development mode is off"
        raise EnvironmentFailure(what, where=where, fix=f"{fix}, VLLM_SERVER_DEV_MODE=1 among them")
    mode = answer.json()["vllm_config"]["model_config"]["logprobs_mode"]
    if mode != LOGPROBS_MODE:
        what = f"the server reports {mode}, which are not of the distribution it samples from"
        raise EnvironmentFailure(what, where=where, fix=f"{fix}, --logprobs-mode {LOGPROBS_MODE} among them")


def _completion(choice: dict[str, Any]) -> Completion:
    return Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"])
