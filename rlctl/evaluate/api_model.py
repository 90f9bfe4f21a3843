"""A model behind an API of OpenAI's form (`--engine openai:URL`): no weights, no log-probs. No torch.

Every response is a request of its own with its own seed, so a server that ignores `n` changes nothing, and
each is stored when it arrives.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from threading import Event
from typing import TYPE_CHECKING, Any

import httpx

from rlctl.data.prompts import messages_of, place_of
from rlctl.data.schema import Row
from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.evaluate.request import API_ENGINE, Plan, lengths
from rlctl.evaluate.samples import Pair, Response
from rlctl.retries import BUSY, retry_after
from rlctl.rollout.seeds import derived_seed

if TYPE_CHECKING:
    from rlctl.rollout.protocol import Sampling

#: Environment variable with the key; it is only sent, never stored.
KEY = "OPENAI_API_KEY"
#: Requests at a time, at most.
MAX_CONCURRENT = 32
#: Tries of a request that the server refuses for its load, or that fails on the way.
TRIES = 8
#: Seconds before the second try, doubled before each other one; and the longest that a server may ask for.
RETRY_S, MAX_RETRY_S = 1.0, 120.0
#: Seconds for one response, from the request to its last byte.
TIMEOUT_S = 1800.0
#: Reasons for which a response ends by itself, as different servers call them. A call of a tool ends it too.
_ENDED = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call"}
_CUT_OFF = {"length", "max_tokens"}


class ApiModel:
    """A model behind an API and its questions; attributes as of `LocalModel`.

    Raises:
        UsageError: the URL is not one, or a question cannot be asked in this way.
    """

    tokenizer = None
    num_overlong = 0  # the server refuses prompts that are too long

    def __init__(self, plan: Plan) -> None:
        self._request = plan.request
        self._url = _base_url(plan.engine)
        self.rows = plan.questions.rows
        if plan.environment.is_multi_turn:
            message = f"{API_ENGINE}:URL samples single responses, not episodes of {plan.environment.name}"
            raise UsageError(message, where="--engine", fix="choose hf or vllm")
        for row in self.rows:
            _check(row)
        self.prompts = [row.prompt_text for row in self.rows]
        self.identities = [json.dumps(messages_of(row), sort_keys=True) for row in self.rows]
        self.sampling: Sampling = lengths(self._request, plan.target, None)[0]
        self.about_sampling: dict[str, Any] = {"engine": API_ENGINE, "url": self._url}
        if plan.chat_template_kwargs:
            self.about_sampling["chat_template_kwargs"] = dict(plan.chat_template_kwargs)
        name = plan.target.model_path
        self.model = {"path": name, "run_dir": None, "step": None, "sha256": None, "template_sha256": None}
        self.settings = {"model": name} | self.about_sampling
        self._limit_key = "max_tokens"
        self._is_stopped = Event()

    def sample(self, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Response]]:
        """Yields responses as they arrive; none that the server ended, for example by a filter of contents.

        Raises:
            UsageError, EnvironmentFailure: the server refuses the request, or its key.
            RunFailure: the server cannot be reached, or its answer is not of OpenAI's form.
        """
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        count = min(MAX_CONCURRENT, self._request.batch_size)
        waiting = iter(pairs)
        with (
            httpx.Client(headers=headers, timeout=httpx.Timeout(TIMEOUT_S, connect=30.0)) as client,
            ThreadPoolExecutor(count) as threads,
        ):

            def start(number: int) -> dict[Future[Response | None], Pair]:
                return {threads.submit(self._ask, client, pair): pair for pair in islice(waiting, number)}

            running = start(count)
            try:
                while running:
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    arrived = {running.pop(future): future for future in done}
                    responses = {pair: one.result() for pair, one in arrived.items() if not one.exception()}
                    yield {pair: response for pair, response in responses.items() if response is not None}
                    for future in arrived.values():
                        future.result()  # raises what failed, after the others are stored
                    running |= start(len(done))
            finally:
                self._is_stopped.set()
                for future in running:
                    future.cancel()
                client.close()  # ends the requests that are under way

    def _ask(self, client: httpx.Client, pair: Pair) -> Response | None:
        question, sample = pair
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model["path"],
            "messages": list(messages_of(self.rows[question])),
            "n": 1,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": derived_seed(self._request.seed, question, sample) % (1 << 31),
        }
        extra = self.about_sampling.get("chat_template_kwargs")
        if extra:
            body["chat_template_kwargs"] = extra  # of vLLM and SGLang
        where = place_of(self.rows[question])
        while True:
            limit_key = self._limit_key
            answer = self._post(client, body | {limit_key: sampling.max_response_length}, where)
            if (
                answer.status_code == 400
                and "max_completion_tokens" in answer.text
                and limit_key == "max_tokens"
            ):
                self._limit_key = "max_completion_tokens"  # the name of newer models of OpenAI
                continue
            return _response(self._checked(answer, where), sampling.max_response_length, self._url)

    def _post(self, client: httpx.Client, body: dict[str, Any], where: str) -> httpx.Response:
        """Sends a request until the server accepts or refuses it.

        Raises:
            RunFailure: every try failed on the way, or the server was too busy each time.
        """
        reason = ""
        for number in range(TRIES):
            pause = RETRY_S * 2.0**number
            try:
                answer = self._answer(client, body)
                if answer.status_code not in BUSY:
                    return answer
                reason = f"status {answer.status_code}: {_message(answer)}"
                pause = retry_after(answer.headers) or pause
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            if number + 1 == TRIES or self._is_stopped.wait(min(pause, MAX_RETRY_S)):
                break
        message = (
            f"{TRIES} tries to sample a response to {where} failed; the last: {' '.join(reason.split())}"
        )
        fix = "repeat the command when it answers: the responses so far are stored"
        raise RunFailure(message, where=self._url, fix=fix)

    def _answer(self, client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
        """One answer; a server that sends it in small pieces has the same time as any other.

        Raises:
            httpx.HTTPError: it failed on the way, or is not complete after `TIMEOUT_S`.
        """
        end = time.monotonic() + TIMEOUT_S
        with client.stream("POST", f"{self._url}/chat/completions", json=body) as answer:
            pieces = []
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"the answer is not complete after {TIMEOUT_S:g} s")
            headers = {name: text for name, text in answer.headers.items() if name != "content-encoding"}
            return httpx.Response(answer.status_code, headers=headers, content=b"".join(pieces))

    def _checked(self, answer: httpx.Response, where: str) -> Any:
        """The content of an answer.

        Raises:
            UsageError, EnvironmentFailure: the server refuses the request, or the key.
            RunFailure: the answer is not JSON.
        """
        said = f"the server answers {answer.status_code}: {_message(answer)}"
        if answer.status_code in {401, 403}:
            raise EnvironmentFailure(said, where=self._url, fix=f"set {KEY} to the server's key")
        if answer.status_code == 404:
            fix = "check the URL, which ends before /chat/completions, and the model's name at the server"
            raise UsageError(said, where=self._url, fix=fix)
        if not answer.is_success:
            raise UsageError(f"{said} (to {where})", where=self._url, fix="change the options that it names")
        try:
            return answer.json()
        except ValueError as error:
            raise RunFailure(f"the answer is not JSON: {error}", where=self._url) from None


def _base_url(engine: str) -> str:
    url = engine.removeprefix(f"{API_ENGINE}:").rstrip("/").removesuffix("/chat/completions")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in {"http", "https"} or not parsed.host or parsed.userinfo or parsed.query:
        message = f"`{url}` is not the address of an API"
        raise UsageError(message, where="--engine", fix=f"for example {API_ENGINE}:http://127.0.0.1:8000/v1")
    return url


def _check(row: Row) -> None:
    """Refuses a row that a request of this form cannot ask."""
    if row.tools:
        raise UsageError(
            "the row has tools, which are not sent", where=place_of(row), fix="choose hf or vllm"
        )
    if row.prompt[-1].role == "assistant":
        message = "the prompt ends with a reply that the response is to continue"
        raise UsageError(message, where=place_of(row), fix="choose hf or vllm")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _message(answer: httpx.Response) -> str:
    """What a server says about an error, on one line."""
    try:
        found = answer.json()
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = answer.text
    return _one_line(text)[:300]


def _response(content: Any, max_tokens: int, url: str) -> Response | None:
    """The response in an answer; None if the server ended it.

    Thoughts in a field of their own are put before the text, in marks that all graders know. A response is
    cut off if the server says so, or if it has as many tokens as it may, whatever the server says.

    Raises:
        RunFailure: the answer has another form, or does not say how many tokens the response has.
    """
    try:
        choice = content["choices"][0]
        message = choice["message"]
        reason = choice.get("finish_reason")
        text = _text_of(message.get("content"))
        thoughts = _text_of(message.get("reasoning_content") or message.get("reasoning"))
        num_tokens = content["usage"]["completion_tokens"]
        if not isinstance(num_tokens, int) or num_tokens < 0:
            raise ValueError(f"completion_tokens is {num_tokens!r}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"an answer is not of OpenAI's form: {type(error).__name__}: {' '.join(str(error).split())}"
        fix = "it needs choices[0].message and usage.completion_tokens"
        raise RunFailure(what, where=url, fix=fix) from None
    truncated = reason in _CUT_OFF or num_tokens >= max_tokens
    if not truncated and reason not in _ENDED:
        return None
    if thoughts:
        is_open = truncated and not text
        text = f"<think>\n{thoughts}" if is_open else f"<think>\n{thoughts}\n</think>\n\n{text}"
    return Response(text, truncated, num_tokens)


def _text_of(content: Any) -> str:
    """The text of a message, which may be absent or a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content is a {type(content).__name__}")
    return content or ""
