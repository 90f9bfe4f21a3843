"""Chat completions, as OpenAI's API has them, that continue one episode and record its tokens."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.environment.conversation import Conversation, Reply
from rlctl.environment.protocol import LimitReached
from rlctl.environment.renderer import ChatRenderer, Message, encodable
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn
    from rlctl.environment.protocol import Sampler

#: Where the text of a reply ends and its tool calls begin.
_CALLS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<｜tool▁calls?▁begin｜>|<\|python_tag\|>|\A\s*\{")
#: Fields of a request that would change the reply in ways that cannot be recorded → the only value allowed.
_REFUSED = {
    "n": 1,
    "stop": [],
    "logprobs": False,
    "modalities": ["text"],
    "response_format": {"type": "text"},
}


class Refused(Exception):
    """A request that is not answered; clients read the message and the code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class _Said:
    """A reply, and the conversation that ends with it."""

    messages: list[Message]  # as the client knows them
    tools: Sequence[Mapping[str, Any]]
    conversation: Conversation  # with the reply as it was sampled
    answer: dict[str, Any]


class RecordedChat:
    """Answers the requests of one episode, one at a time.

    A request whose messages begin with an earlier reply and all that led to it continues from the tokens of
    that reply. Any other request is rendered anew, and begins a new sequence of the episode.

    Attributes:
        limit: the limit that refused a request; empty: none.
        reply: the last reply.
        messages: the conversation that it ends.
        counts: numbers of the episode.
        failed: gets the exception of an engine, which ends the episode.
    """

    def __init__(self, renderer: ChatRenderer, sampler: Sampler, task: Task) -> None:
        self._renderer, self._sampler, self._task = renderer, sampler, task
        self._said: list[_Said] = []
        self._lock = asyncio.Lock()
        self._max_tokens: int | None = None
        self._usage = (0, 0)
        self._is_lost = False  # the client of the last answer had gone
        self.limit = ""
        self.reply: Reply | None = None
        self.messages: tuple[Message, ...] = ()
        self.counts = {"num_tool_calls": 0.0, "tool_errors": 0.0}
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def complete(self, request: Any, is_gone: Callable[[], bool]) -> dict[str, Any]:
        """The chat completion of a request, as parsed from JSON.

        Args:
            is_gone: whether the client does not wait any more. The same request then gets the answer later.

        Raises:
            Refused: the request is wrong, or a limit of the episode is reached.
        """
        messages, tools = _read(request)
        async with self._lock:
            if is_gone():
                raise ConnectionError
            last = self._said[-1] if self._is_lost else None
            if last and (last.messages[:-1], last.tools) == (messages, tools):
                self._is_lost = is_gone()
                return last.answer
            try:
                conversation = self._conversation(messages, tools)
                self._max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
                reply = await conversation.reply()
            except LimitReached as limit:
                self.limit = limit.reason
                code = "context_length_exceeded" if limit.reason == "context_overflow" else limit.reason
                raise Refused(400, code, f"a limit of the episode is reached: {limit.reason}") from None
            except UsageError as error:
                raise Refused(400, "invalid_messages", error.what) from None
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise
            self.reply, self.messages = reply, tuple(conversation.messages)
            self.counts["num_tool_calls"] += len(reply.calls)
            self.counts["tool_errors"] += bool(reply.problem)
            self._is_lost = is_gone()
            answer = self._answer(request, reply)
            seen = [*messages, _plain(answer["choices"][0]["message"])]
            self._said.append(_Said(seen, tools, conversation, answer))
            return answer

    async def result_of(self, running: asyncio.Future[Any]) -> Any:
        """The result of the program that sends the requests; it is cancelled if the engine fails.

        Raises:
            BaseException: the engine's, or the program's.
        """
        try:
            await asyncio.wait([running, self.failed], return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()
            return running.result()
        finally:
            running.cancel()

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Turn:
        """See `Sampler.sample`; applies the request's own limit, and counts tokens for its `usage`."""
        turn = await self._sampler.sample(token_ids, max_tokens or self._max_tokens)
        self._usage = len(token_ids), len(turn.token_ids)
        return turn

    def _conversation(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> Conversation:
        """The conversation that ends with these messages; the policy speaks next."""
        known = [
            said
            for said in self._said
            if said.tools == tools and said.messages == messages[: len(said.messages)]
        ]
        if known:
            said = max(known, key=lambda one: len(one.messages))
            found = copy.copy(said.conversation)
            found.messages = [*found.messages, *self._shown(messages[len(said.messages) :])]
            return found
        shown = self._shown(messages)
        task = replace(self._task, messages=tuple(shown))
        if messages != [_plain(message) for message in self._task.messages]:
            task = replace(task, prompt_ids=self._renderer.encode(self._renderer.text(shown, tools)))
        return Conversation(self._renderer, self, task, tools)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them."""
        found = []
        for message in messages:
            shown = dict(message)
            if shown["role"] == "tool":
                shown["role"] = self._renderer.tool_role
            if "tool_calls" in shown and not self._renderer.shows_calls:
                calls = [json.dumps(call["function"], ensure_ascii=False) for call in shown.pop("tool_calls")]
                written = [f"<tool_call>{call}</tool_call>" for call in calls]
                shown["content"] = "\n".join(filter(None, [shown["content"], *written]))
            found.append(shown)
        return found

    def _answer(self, request: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
        text: str | None = reply.content
        finish_reason = "length" if reply.is_cut else "tool_calls" if reply.calls else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reply.calls:
            message["content"] = _CALLS.split(reply.content, maxsplit=1)[0] or None
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call in reply.calls
            ]
        read, sampled = self._usage
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(request.get("model", "")),
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}],
            "usage": {
                "prompt_tokens": read,
                "completion_tokens": sampled,
                "total_tokens": read + sampled,
            },
        }


def chunks(answer: Mapping[str, Any], *, with_usage: bool) -> list[dict[str, Any]]:
    """A chat completion as the parts of a stream."""
    [choice] = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    steps = [(delta, None), ({}, choice["finish_reason"])]
    found = [
        head | {"choices": [{"index": 0, "delta": part, "finish_reason": reason}]} for part, reason in steps
    ]
    return [*found, head | {"choices": [], "usage": answer["usage"]}] if with_usage else found


def _read(request: Any) -> tuple[list[Message], Sequence[Mapping[str, Any]]]:
    """The messages and tools of a request.

    Raises:
        Refused: it is wrong, or asks for what cannot be recorded.
    """
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise Refused(400, "invalid_request", "the request has no list `messages`")
    if not isinstance(request.get("stream_options") or {}, dict):
        raise Refused(400, "invalid_request", "stream_options: give an object")
    for name, allowed in _REFUSED.items():
        if request.get(name) not in (None, allowed):
            raise Refused(400, "unsupported", f"{name}={request[name]!r} is not supported: leave it out")
    for name in ("max_tokens", "max_completion_tokens"):
        value = request.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(400, "invalid_request", f"{name}={value!r}: give a positive integer")
    tools, choice = request.get("tools") or [], request.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise Refused(400, "unsupported", f"tool_choice={choice!r} is not supported: use auto or none")
    try:
        messages = [_plain(message) for message in request["messages"]]
        if not all(isinstance(tool["function"]["name"], str) for tool in tools):
            raise TypeError("a name is text")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"
        what = f"messages or tools cannot be read ({found}): give role and text, and functions with names"
        raise Refused(400, "invalid_request", what) from error
    return encodable(messages), [] if choice == "none" else encodable(tools)


def _plain(message: Mapping[str, Any]) -> Message:
    """A message in one of the forms that a client may write, in the form that templates take."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    role = {"developer": "system"}.get(message["role"], message["role"])
    if not isinstance(content, str) or not isinstance(role, str):
        raise TypeError("role and content are text")
    found: Message = {"role": role, "content": content}
    found |= {key: str(message[key]) for key in ("name", "tool_call_id") if message.get(key)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": str(call["function"]["name"]),
                    "arguments": json.loads(call["function"]["arguments"] or "{}"),
                },
            }
            for call in calls
        ]
    return found
