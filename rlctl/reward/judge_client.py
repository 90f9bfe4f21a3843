"""Asks a judge, a model behind an OpenAI-compatible API, many questions at the same time.

What the network or a busy server causes is repeated with growing pauses; what a question cannot get is a
`Failure`, never a score. Keys come from an environment variable, and appear in no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlctl.errors import first_line
from rlctl.processes import is_this_machine
from rlctl.retries import BUSY, retry_after
from rlctl.reward.judge_questions import Answer, JudgeQuestion, JudgeReply, Unreadable
from rlctl.reward.protocol import Failure
from rlctl.run_spec.base import seconds

if TYPE_CHECKING:
    import httpx

    from rlctl.run_spec.rollout import JudgeSpec

#: In place of the key.
MASK = "***"

#: Largest answer in bytes, and longest pause between two tries in seconds.
_LARGEST, _LONGEST_PAUSE_S = 4 << 20, 60.0
#: Characters of a server's error that are shown.
_SHOWN = 300


class _Again(Exception):
    """A try failed, and another one may not."""

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        super().__init__(why)
        self.pause_s = pause_s  # that the server asks for; None: none. 0: at once


class _Refused(Exception):
    """The server refuses the question: another try would not help."""


class JudgeClient:
    """Asks questions within the limits of the section `reward.judge`.

    Args:
        pause: waits so many seconds.
    """

    def __init__(self, spec: JudgeSpec, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._spec = spec
        self._pause = pause
        self._key = os.environ.get(spec.key_variable, "").strip()
        self._url = f"{str(spec.url).rstrip('/')}/chat/completions"
        self._limit_name = "max_tokens"
        self._takes_n = True
        self._calls_left = 0

    def ask(
        self, questions: Sequence[JudgeQuestion[Answer]], votes: int
    ) -> list[list[JudgeReply[Answer]] | Failure]:
        """So many replies to each question, or why there are none, in order.

        It is one step: the limits of a step begin anew.
        """
        if not questions:
            return []
        with ThreadPoolExecutor(1, "judge") as thread:  # a notebook's own loop may run in this one
            return thread.submit(asyncio.run, self._ask(questions, votes)).result()

    async def _ask(
        self, questions: Sequence[JudgeQuestion[Answer]], votes: int
    ) -> list[list[JudgeReply[Answer]] | Failure]:
        import httpx

        self._calls_left = self._spec.calls_per_step or 2**62
        slots = asyncio.Semaphore(self._spec.concurrency)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        is_here = is_this_machine(urlsplit(self._url).hostname or "")
        limits = httpx.Limits(max_connections=self._spec.concurrency)
        async with httpx.AsyncClient(
            headers=headers, timeout=seconds(self._spec.timeout), limits=limits, trust_env=not is_here
        ) as client:
            tasks = [asyncio.create_task(self._answered(client, slots, one, votes)) for one in questions]
            await asyncio.wait(tasks, timeout=seconds(self._spec.step_timeout))
            late = Failure(f"the judge took longer than reward.judge.step_timeout={self._spec.step_timeout}")
            found: list[list[JudgeReply[Answer]] | Failure] = []
            for task in tasks:
                found.append(task.result() if task.done() else late)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def _answered(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, question: JudgeQuestion[Answer], votes: int
    ) -> list[JudgeReply[Answer]] | Failure:
        """All votes on one question; a server that ignores `n` is asked again."""
        replies: list[JudgeReply[Answer]] = []
        why = ""
        tries = 0
        while len(replies) < votes and tries <= self._spec.retries:
            pause_s: float | None = 0.0
            try:
                async with slots:
                    if self._calls_left <= 0:
                        most = self._spec.calls_per_step
                        raise _Refused(f"the calls of a step are used up: reward.judge.calls_per_step={most}")
                    self._calls_left -= 1
                    texts = await self._texts(client, question.messages, votes - len(replies))
                before = len(replies)
                for text in texts:
                    try:
                        replies.append(JudgeReply(question.read(text), self._masked(text)))
                    except Unreadable as error:
                        why = f"{error}: {text[-_SHOWN:]!r}"
                if len(replies) > before:
                    continue
            except _Again as again:
                why = str(again)
                pause_s = again.pause_s
            except _Refused as refused:
                return Failure(self._masked(str(refused)))
            tries += 1
            if tries <= self._spec.retries and pause_s != 0.0:
                await self._pause(_pause_after(tries, pause_s))
        if len(replies) >= votes:
            return replies[:votes]
        return Failure(self._masked(f"the judge gave no answer in {tries} tries; the last one: {why}"))

    async def _texts(
        self, client: httpx.AsyncClient, messages: list[dict[str, str]], count: int
    ) -> list[str]:
        """What the judge says, without its reasoning; up to `count` texts.

        Raises:
            _Again, _Refused: it says nothing.
        """
        import httpx

        spec = self._spec
        asked: dict[str, Any] = {"model": spec.model, "messages": messages, self._limit_name: spec.max_tokens}
        asked |= {} if spec.temperature is None else {"temperature": spec.temperature}
        asked |= {"n": count} if count > 1 and self._takes_n else {}
        try:
            async with (
                asyncio.timeout(seconds(spec.timeout)),
                client.stream("POST", self._url, json=asked) as response,
            ):
                body = await _body(response)
        except TimeoutError as error:
            raise _Again(f"no answer within {spec.timeout}") from error
        except httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {first_line(error)}") from error
        text = body.decode(errors="replace")
        if response.status_code in BUSY:
            asked_s = retry_after(response.headers)
            pause_s = None if asked_s is None else max(0.1, asked_s)  # 0 would be at once
            raise _Again(f"status {response.status_code}: {text[:_SHOWN]}", pause_s)
        if response.status_code == 400 and self._adapts(text, asked):
            raise _Again(f"status 400: {text[:_SHOWN]}", 0.0)
        if not response.is_success:
            fix = f" (the key is read from {spec.key_variable})" if response.status_code in {401, 403} else ""
            raise _Refused(f"the judge refuses with status {response.status_code}{fix}: {text[:_SHOWN]}")
        return _contents(text)

    def _adapts(self, error: str, asked: dict[str, Any]) -> bool:
        """Whether another form of the request may be accepted, from now on."""
        if "max_completion_tokens" in error and self._limit_name == "max_tokens":
            self._limit_name = "max_completion_tokens"
            return True
        self._takes_n = self._takes_n and "n" not in asked
        return "n" in asked or ("max_tokens" in asked and self._limit_name != "max_tokens")

    def _masked(self, text: str) -> str:
        return text.replace(self._key, MASK) if self._key else text


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _LARGEST:
            raise _Again(f"it answered more than {_LARGEST >> 20} MiB", 0.0)
    return bytes(body)


def _contents(text: str) -> list[str]:
    """The contents of the choices; raises `_Again` where there are none."""
    try:
        choices = json.loads(text)["choices"]
        contents = [choice["message"].get("content") for choice in choices]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _Again(f"its answer is no chat completion: {text[:_SHOWN]!r}", 0.0) from error
    said = [content for content in contents if isinstance(content, str) and content.strip()]
    if not said:
        cut = any(choice.get("finish_reason") == "length" for choice in choices)
        why = "it was cut before it answered: raise reward.judge.max_tokens" if cut else "it said nothing"
        raise _Again(why, 0.0)
    return said


def _pause_after(tries: int, asked_s: float | None) -> float:
    """Seconds until the next try: those that the server asks for, or a random time that doubles."""
    own_s = 0.5 * 2.0 ** (tries - 1) * random.uniform(0.5, 1.0)
    return min(_LONGEST_PAUSE_S, max(own_s, asked_s or 0.0))
