"""A model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp …): chat completions. No torch.

Each response is a separate request with its own seed, storage and retries. The server applies its own chat
template and its weights cannot be hashed, so the key of stored responses is the server address and the model
attributes that the server reports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import httpx

from rlctl.data.prompts import messages_of
from rlctl.data.schema import Row
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError, typed_line
from rlctl.evaluate.request import KEY_VARIABLE, SERVER, EvaluateRequest, Target, check_url, lengths
from rlctl.evaluate.samples import Pair, Response, SampledModel
from rlctl.rollout.protocol import step_seed

#: Attempts per request, and seconds between them: doubled each time, plus up to 25 % random jitter.
TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
#: Maximum `Retry-After` in seconds; a longer one is an error.
LONGEST_RETRY_AFTER_S = 300.0
_CONNECT_S = 10.0
#: Seconds between checks for an interruption.
_STOP_S = 0.5
_RETRIED = {408, 409, 425, 429}
#: Finish reasons of incomplete responses.
_UNFINISHED = {None, "abort", "error"}
#: Disables the server's sampling defaults: vLLM reads generation_config.json, llama.cpp uses top-k 40.
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
#: The length limit of OpenAI's newer models, which refuse `max_tokens`.
_NEW_LIMIT = "max_completion_tokens"
_KEY_FIX = f"put a valid key into the environment variable {KEY_VARIABLE}"
_FIXES = {
    401: _KEY_FIX,
    403: _KEY_FIX,
    404: "correct --base-url, which ends where /chat/completions begins, or the model's name",
}
_CONTEXT_EXCEEDED = re.compile(r"context.{0,3}(length|size|window)", re.IGNORECASE)


class ServedModel(SampledModel):
    """A model on a server and its questions; token counts come from the server.

    Raises:
        UsageError: the server does not have this model, or has several and none was named.
        EnvironmentFailure: the server cannot be reached, or rejects the key.
    """

    def __init__(self, request: EvaluateRequest, rows: Sequence[Row]) -> None:
        self._url = check_url(request.base_url)
        self._request = request
        self._neutral: dict[str, Any] = dict(_NEUTRAL)
        self._limit = "max_tokens"  # name of the length limit
        self._num_empty = 0  # responses that ended without text
        card = self._find_model(request.model_or_run)
        self._name = str(card["id"])
        context = card.get("max_model_len")
        self.sampling, _ = lengths(request, Target("", []), context if isinstance(context, int) else None)
        self.rows, self.overlong = list(rows), set()
        self.prompts = [row.prompt_text for row in rows]
        self.identities = [json.dumps(messages_of(row), sort_keys=True) for row in rows]
        served = {"base_url": self._url, "root": card.get("root")}
        unknown = dict.fromkeys(("run_dir", "step", "sha256", "template_sha256"))
        self.model = {"path": self._name} | unknown | served
        self.settings = {"model": served | {"name": self._name, "context": context}, "engine": SERVER}
        self.about_sampling = {"engine": SERVER, "dtype": None}

    @property
    def notes(self) -> list[str]:
        """Messages for the user about the sampling."""
        found = []
        if not self._neutral:
            found.append(f"the server does not accept {', '.join(_NEUTRAL)}: it uses its own defaults")
        if self._num_empty:
            count = "1 response" if self._num_empty == 1 else f"{self._num_empty:,} responses"
            where = "the server may put text into a field for reasoning, which is not graded"
            found.append(f"{count} ended without content: {where}")
        return found

    def sample(self, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Response]]:
        """See `SampledModel.sample`."""
        arrived: SimpleQueue[dict[Pair, Response] | None] = SimpleQueue()
        stopping = threading.Event()
        with ThreadPoolExecutor(1) as thread:  # a separate event loop: in a notebook one is already running
            work = thread.submit(lambda: asyncio.run(self._ask_all(pairs, arrived, stopping)))
            work.add_done_callback(lambda _: arrived.put(None))
            try:
                while (batch := arrived.get()) is not None:
                    yield batch
                work.result()
            finally:
                stopping.set()

    async def _ask_all(
        self,
        pairs: Sequence[Pair],
        arrived: SimpleQueue[dict[Pair, Response] | None],
        stopping: threading.Event,
    ) -> None:
        """Puts every response into `arrived`, until the first failure or until `stopping` is set."""
        limits = httpx.Limits(max_connections=self._request.concurrency)
        async with httpx.AsyncClient(limits=limits, **self._options()) as client:
            open_requests: dict[asyncio.Task[Response | None], Pair] = {}
            waiting = iter(pairs)
            try:
                while not stopping.is_set():
                    while len(open_requests) < self._request.concurrency and (pair := next(waiting, None)):
                        open_requests[asyncio.create_task(self._response(client, pair))] = pair
                    if not open_requests:
                        return
                    done, _ = await asyncio.wait(
                        open_requests, timeout=_STOP_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    ended = [(open_requests.pop(task), task) for task in done]
                    good = [(pair, task.result()) for pair, task in ended if task.exception() is None]
                    arrived.put({pair: response for pair, response in good if response is not None})
                    if failure := next((error for _, task in ended if (error := task.exception())), None):
                        raise failure
            finally:
                for task in open_requests:
                    task.cancel()
                await asyncio.gather(*open_requests, return_exceptions=True)

    async def _response(self, client: httpx.AsyncClient, pair: Pair) -> Response | None:
        """Requests one response; None if the question is too long for the model's context."""
        question, sample = pair
        sampling, messages = self.sampling, list(messages_of(self.rows[question]))
        body = {
            "model": self._name,
            "messages": messages,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": step_seed(self._request.seed, question, f"evaluation/{sample}") & 0x7FFFFFFF,
        }
        if messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        where = f"{self._url}/chat/completions, question {question}"
        problem = ""
        for attempt in range(TRIES):
            pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt) * random.uniform(1.0, 1.25)
            neutral, limit = self._neutral, self._limit
            asked = body | neutral | {limit: sampling.max_response_length}
            try:
                answer = await client.post(f"{self._url}/chat/completions", json=asked)
            except (httpx.TransportError, httpx.DecodingError) as error:
                problem = typed_line(error)
            else:
                if answer.is_success:
                    try:
                        response = _read(answer.json())
                        self._num_empty += not response.text and not response.truncated
                        return replace(response, text=_without_key(response.text))
                    except (ValueError, KeyError, IndexError, TypeError) as error:
                        problem = f"an answer that cannot be read ({typed_line(error)}): {_said(answer)}"
                elif answer.status_code in _RETRIED or answer.status_code >= 500:
                    problem = _said(answer)
                    pause = max(pause, _retry_after(answer, where))
                elif answer.status_code in {400, 422} and any(name in answer.text for name in neutral):
                    self._neutral = {}
                    continue
                elif answer.status_code == 400 and limit != _NEW_LIMIT and _NEW_LIMIT in answer.text:
                    self._limit = _NEW_LIMIT
                    continue
                elif answer.status_code == 400 and _CONTEXT_EXCEEDED.search(answer.text):
                    self.overlong.add(question)
                    return None
                else:
                    what = f"the server refuses the request: {_said(answer)}"
                    raise RunFailure(what, where=where, fix=_FIXES.get(answer.status_code))
            if attempt < TRIES - 1:
                await asyncio.sleep(pause)
        raise RunFailure(
            f"the server failed {TRIES} times in a row, the last time with: {problem}",
            where=where,
            fix="start the same command again later: stored responses are not sampled again",
        )

    def _find_model(self, name: str | None) -> Mapping[str, Any]:
        """Model entry of the server's `/models` list; only the name if the server lists no models."""
        listing = f"{self._url}/models"
        try:
            with httpx.Client(**self._options()) as client:
                answer = client.get(listing)
        except (httpx.TransportError, httpx.DecodingError) as error:
            what, fix = f"the server does not answer: {typed_line(error)}", "start it, or correct --base-url"
            raise EnvironmentFailure(what, where=self._url, fix=fix) from error
        if answer.status_code in {401, 403}:
            what = f"the server requires a key: {_said(answer)}"
            raise EnvironmentFailure(what, where=self._url, fix=_KEY_FIX)
        if answer.status_code >= 500:
            fix = "see its log, or wait until it has loaded the model"
            raise EnvironmentFailure(f"the server fails: {_said(answer)}", where=listing, fix=fix)
        cards: dict[str, Mapping[str, Any]] = {}
        with suppress(ValueError, KeyError, TypeError):
            cards = {card["id"]: card for card in answer.json()["data"] if isinstance(card["id"], str)}
        if name is None and len(cards) == 1:
            [name] = cards
        if name is not None and (name in cards or not cards):
            return cards.get(name, {"id": name})
        names = ", ".join(cards)
        if name is not None:
            raise UsageError(f"the server has no model `{name}`", where=self._url, fix=f"it serves {names}")
        name_one = "name one: rlctl evaluate MODEL --engine openai …"
        if cards:
            raise UsageError(f"the server serves several models: {names}", where=self._url, fix=name_one)
        fix = f"correct --base-url (most end with /v1), or {name_one}"
        raise UsageError(f"the server lists no models: {_said(answer)}", where=listing, fix=fix)

    def _options(self) -> dict[str, Any]:
        key = os.environ.get(KEY_VARIABLE)
        if key and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise UsageError(  # the message must not contain the key
                "the key contains spaces, line ends or other characters that are not valid in an HTTP header",
                where=f"the environment variable {KEY_VARIABLE}",
                fix="set it again, without a line end",
            )
        is_local = httpx.URL(self._url).host in {"localhost", "127.0.0.1", "::1"}
        return {
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(self._request.timeout, connect=_CONNECT_S),
            "trust_env": not is_local,  # no proxy for a local server
        }


def _without_key(text: str) -> str:
    key = os.environ.get(KEY_VARIABLE)
    return text.replace(key, "***") if key else text


def _said(answer: httpx.Response) -> str:
    """Status and start of the response body, without the key."""
    text = " ".join(_without_key(answer.text).split())[:300]
    return f"HTTP {answer.status_code}" + (f", {text}" if text else "")


def _read(answer: Any) -> Response:
    """Parses a chat completion.

    Raises:
        ValueError, KeyError, IndexError, TypeError: it is not a chat completion, or is unfinished.
    """
    choice = answer["choices"][0]
    reason, message = choice["finish_reason"], choice["message"]
    # Some servers omit `content` if all text is in a field for reasoning, which is not the answer.
    has_reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = _text(message.get("content") if has_reasoning else message["content"])
    num_tokens = answer["usage"]["completion_tokens"]
    if reason in _UNFINISHED:
        raise ValueError(f"finish_reason is {reason}")
    if not isinstance(num_tokens, int):
        raise TypeError("`completion_tokens` is not a number")
    return Response(text, truncated=reason == "length", num_tokens=num_tokens)


def _text(content: Any) -> str:
    """The text of `content`: null, a text, or a list of parts, of which those without text are thoughts.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(content, list):
        return "".join(_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    if not isinstance(content, str | None):
        raise TypeError(f"`content` is of type {type(content).__name__}, not text")
    return content or ""


def _retry_after(answer: httpx.Response, where: str) -> float:
    """Seconds of the `Retry-After` header; 0 without one, and for a date.

    Raises:
        RunFailure: the time exceeds `LONGEST_RETRY_AFTER_S`.
    """
    given = answer.headers.get("Retry-After", "").strip()
    seconds = float(given) if given.isdecimal() else 0.0
    if seconds > LONGEST_RETRY_AFTER_S:
        raise RunFailure(
            f"the server requests a pause of {seconds:.0f} seconds (HTTP {answer.status_code})",
            where=where,
            fix="start the same command again after that: stored responses are not sampled again",
        )
    return seconds
