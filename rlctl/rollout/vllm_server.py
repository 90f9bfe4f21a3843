"""Rollouts from vLLM servers over HTTP, on this machine or others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
import json
from collections.abc import Mapping, Sequence
from itertools import chain, count, groupby
from typing import Any

import numpy as np

from rlctl.batch import Turn
from rlctl.errors import RunFailure
from rlctl.rollout.completions import Column, Completion, CompletionRollout, listed_tokens
from rlctl.rollout.protocol import EngineContext, EngineReport, Policy, Request, Sampling
from rlctl.rollout.reported_weights import is_from
from rlctl.rollout.server_access import MODEL_NAME
from rlctl.rollout.server_client import TRIES, ServerClient, ServerFailed, readable
from rlctl.rollout.turn_checks import LARGEST_LOG_PROB
from rlctl.rollout.weight_sync import WeightSync

#: Maximum number of open requests per rank, and of those in flight.
CONNECTIONS = 512
_UNKNOWN = "it samples with other weights than those that this run has sent"
#: Path at which a server takes tokens and returns them with the version of the weights of each.
GENERATE = "/inference/v1/generate"


class VLLMServerRollout(CompletionRollout):
    """A `RolloutEngine` on vLLM servers; each rank sends its requests round-robin to all of them.

    Args:
        held: closed with the engine: what it has started or written.
    """

    def __init__(
        self,
        context: EngineContext,
        client: ServerClient,
        weights: WeightSync,
        held: contextlib.ExitStack,
    ) -> None:
        super().__init__(context.tokenizer, context.model.generation_config, policy_version=None)
        self._client = client
        self._weights = weights
        self._held = held
        self._urls = client.urls
        self._rank = context.rank
        self._in_flight = context.spec.rollout.in_flight
        # The trainer's own requests do not wait for those in flight, here or at the servers.
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._slots_in_flight = asyncio.Semaphore(CONNECTIONS)
        self._calls = count()
        self._num_repeated = 0  # requests that were repeated, because their server failed

    def report(self) -> EngineReport:
        """Number of servers and kind of weight transfer, and what the servers' failures led to."""
        transfer = "broadcast" if self._weights.broadcast else "files"
        return EngineReport(
            description=f"{len(self._urls)} vLLM servers, weights by {transfer}",
            notes=tuple(self._weights.notes),
            num_repeated=self._num_repeated,
        )

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; a collective: every rank waits for the main one.

        Raises:
            RunFailure: on every rank: a server rejected the weights, or cannot be reached.
            UsageError: a server does not accept the adapter.
        """
        self._policy_version = None
        self._weights.sync(policy, policy_version)
        self._policy_version = policy_version

    def each(self) -> dict[str, VLLMServerRollout]:
        """Samplers with the current weights of one server each, by its URL."""
        servers = {url: copy.copy(self) for url in self._urls}
        for url, server in servers.items():
            server._urls = [url]
        return servers

    def close(self) -> None:
        """Stops the servers started here and removes the published weights."""
        self.cancel_requests()
        self._held.close()

    def cancel_requests(self) -> None:
        """Ends open requests, and refuses later ones."""
        self._client.close()

    def sample_in_flight(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """Turns as of `sample`, for any number of threads, also during `sync_weights`.

        Raises:
            RunFailure: as `sample`.
        """
        # Requests of one call may share their beginning.
        shares = {next(self._calls): dict(enumerate(requests))}
        completions = self._sampled(shares, sampling, is_ahead=True)
        return self._turns(completions, requests, sampling, policy_version=-1)  # each token has its version

    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        equal = groupby(requests, key=lambda request: request.token_ids)  # for one server, which shares them
        prompts = [number for number, (_, siblings) in enumerate(equal) for _ in siblings]
        num_servers = len(self._current_urls())
        shares: dict[int, dict[int, Request]] = {}
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            shares.setdefault(prompt % num_servers, {})[index] = request
        return self._sampled(shares, sampling, is_ahead=False)

    def _sampled(
        self, shares: Mapping[int, Mapping[int, Request]], sampling: Sampling, *, is_ahead: bool
    ) -> list[Completion]:
        """The completions of all requests, by the places that the shares of the servers give."""
        patience = None if self._in_flight else self._client.answer_timeout
        work = (self._share(*share, sampling, is_ahead=is_ahead) for share in shares.items())
        parts = self._client.run(self._client.watched(work, patience))
        completions = {number: completion for of_server in parts for number, completion in of_server.items()}
        return [completions[number] for number in range(len(completions))]

    async def _share(
        self, number: int, requests: Mapping[int, Request], sampling: Sampling, *, is_ahead: bool
    ) -> dict[int, Completion]:
        """The completions of requests to one server; it gets those again that it has failed to answer."""
        client = self._client
        weights = self._weights
        completions: dict[int, Completion] = {}
        tries_left = TRIES  # in a row that bring nothing
        while tries_left:
            urls = self._current_urls()
            url = urls[(self._rank + number) % len(urls)]
            missing = [number for number in requests if number not in completions]
            asked = [self._ask(url, requests[number], sampling, is_ahead=is_ahead) for number in missing]
            answers = dict(zip(missing, await asyncio.gather(*asked), strict=True))
            failure = next((each for each in answers.values() if isinstance(each, ServerFailed)), None)
            if failure:
                await client.until_it_answers(url, failure)
            # In flight, an answer has its versions. Otherwise a restarted server may have given some answers
            # before it failed to give the others, or all of them.
            is_current = self._in_flight or await client.repeated(weights.is_current, url)
            fine = {p: each for p, each in answers.items() if is_current and isinstance(each, Completion)}
            completions |= fine
            if len(completions) == len(requests):
                return completions
            tries_left = TRIES if fine else tries_left - 1
            self._num_repeated += len(requests) - len(completions)
            await client.repeated(weights.renew, url)
        words = f": {failure.what}" if failure else ""
        raise RunFailure(f"vLLM servers fail and are restarted repeatedly{words}", where=url)

    async def _ask(
        self, url: str, request: Request, sampling: Sampling, *, is_ahead: bool
    ) -> Completion | ServerFailed:
        """What a server samples, or why it does not, as far as a restart may be the cause."""
        async with self._slots_in_flight if is_ahead else self._slots:
            path, body = self._request(request, sampling, is_ahead=is_ahead)
            try:
                response = await self._client.send(url, path, body, timeout=None)
            except ServerFailed as failure:
                return failure
            except RunFailure as refusal:
                if await self._client.repeated(self._weights.is_current, url):
                    raise
                return ServerFailed(refusal.what, where=url)  # it does not know the adapter any more
        answer = response.content
        unknown = ServerFailed(_UNKNOWN, where=url)
        if not (self._in_flight or is_from(response.headers, self._weights.newest.tag)):
            return unknown
        try:
            with readable(url, path):
                if self._in_flight:
                    completion = generated(answer, self._weights.versions)
                else:
                    completion = completion_of(answer, has_lists=listed_tokens(sampling) > 0)
                if completion is not None:
                    _check(completion, request.limit(sampling))
        except ServerFailed as failure:
            return failure
        return completion or unknown

    def _request(self, request: Request, sampling: Sampling, *, is_ahead: bool) -> tuple[str, dict[str, Any]]:
        """Path and body of a request."""
        weights = self._weights
        parameters = self._parameters(sampling, request)
        if not self._in_flight:
            body: dict[str, Any] = {
                "model": weights.newest.adapter or MODEL_NAME,
                "prompt": list(request.token_ids),
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            return "/v1/completions", body | parameters
        body = {
            "model": MODEL_NAME,
            "token_ids": list(request.token_ids),
            "sampling_params": parameters | {"detokenize": False},
            "priority": 0 if is_ahead else -1,
        }
        if not (is_ahead and weights.cache == "keep"):  # updates leave blocks of older weights in the cache
            body["cache_salt"] = weights.salt
        return GENERATE, body

    def _current_urls(self) -> list[str]:
        """The servers with the newest weights.

        Raises:
            RunFailure: there is none.
        """
        urls = [url for url in self._urls if url not in self._weights.lost]
        if not urls:
            raise RunFailure(
                "every vLLM server has restarted and lost the weights that were broadcast",
                where=" ".join(self._urls),
                fix="continue with --resume RUN_DIR; with rollout.server.weight_transfer=files a restarted "
                "server loads the weights itself",
            )
        return urls


def _check(completion: Completion, limit: int) -> None:
    """Raises a `ValueError` for what no engine samples: it would train on wrong numbers."""
    ids = completion.token_ids
    log_probs = completion.log_probs
    if not (ids.ndim == log_probs.ndim == 1 and len(ids) == len(log_probs) <= limit):
        raise ValueError(f"tokens {ids.shape}, log-probs {log_probs.shape}, of at most {limit}")
    if completion.listed is not None and len(completion.listed[0]) != len(ids):
        raise ValueError(f"{len(ids)} tokens, lists for {len(completion.listed[0])}")
    if len(ids) and (ids.min() < 0 or np.nanmax(log_probs, initial=-np.inf) > LARGEST_LOG_PROB):
        raise ValueError("a token below 0, or a log-prob above 0")


def _token_ids(values: list[int]) -> Column:
    """(t,) int64; a `ValueError` for what NumPy would round or parse: a number with decimals, a text."""
    column = np.array(values)
    if column.size and column.dtype.kind != "i":
        raise ValueError(f"tokens of type {column.dtype}")
    return column.astype(np.int64)


def completion_of(answer: bytes, *, has_lists: bool) -> Completion:
    """Converts a server's answer to one request."""
    [choice] = json.loads(answer)["choices"]
    token_ids = _token_ids(choice["token_ids"])
    log_probs = choice["logprobs"]
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
        message = "the server does not report which weights sampled a token"
        fix = "use vLLM 0.32 or newer"
        raise RunFailure(message, where="rollout.in_flight", fix=fix)
    spans = choice["weight_versions"] or []
    tokens = choice["logprobs"]["content"]
    known = [versions.get(span["version"]) for span in spans]
    lengths = [span["end"] - span["start"] for span in spans]
    if None in known or sum(lengths) != len(tokens):
        return None
    lists = [token["top_logprobs"] for token in tokens]
    together = list(chain.from_iterable(lists))
    return Completion(
        token_ids=_token_ids([token["token_id"] for token in tokens]),
        log_probs=np.array([token["logprob"] for token in tokens], dtype=np.float32),
        finish_reason=choice.get("finish_reason"),
        listed=(
            np.array([len(tokens) for tokens in lists], dtype=np.int64),
            _token_ids([token["token_id"] for token in together]),
            np.array([token["logprob"] for token in together], dtype=np.float32),
        ),
        versions=np.repeat(np.array(known, dtype=np.int64), lengths),
    )
