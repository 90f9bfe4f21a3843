"""Answers the requests of one episode, whatever their wire format, and records the tokens of its replies."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.environment.conversation import Conversation, Reply
from rlctl.environment.formats.protocol import CallOfTool, ChatReply, ChatRequest, Refused
from rlctl.environment.protocol import LimitReached
from rlctl.environment.renderer import ChatRenderer, Message
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.batch import Task, Turn
    from rlctl.environment.protocol import Sampler
    from rlctl.rollout.protocol import Sampling

_log = logging.getLogger(__name__)
#: Where the text of a reply ends and its tool calls begin.
_CALLS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<｜tool▁calls?▁begin｜>|<\|python_tag\|>|\A\s*\{")
#: Seconds in which a client has read an answer that it waited for, if it asks the same again.
_READ_S = 1.0
#: Fields that a request may set and the run does not follow → the values in use; others have none.
_IN_USE: dict[str, Any] = {
    **{"tool_choice": "auto", "parallel_tool_calls": True},
    **{"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1},
}


@dataclass(slots=True, eq=False)
class Said:
    """A reply, and the conversation that ends with it.

    Attributes:
        reply: as the client reads it.
        keys: the conversation as the client knows it, for comparison.
        conversation: with the reply as it was sampled.
        was_read: whether the client has read the answer to its end; pending while it is sent; None: it is
            not sent.
    """

    request: ChatRequest
    reply: ChatReply
    keys: list[Message]
    conversation: Conversation
    was_read: asyncio.Future[bool] | None = None

    def sending(self) -> asyncio.Future[bool]:
        """Whoever sends the answer tells the result whether it was read."""
        self.was_read = asyncio.get_running_loop().create_future()
        return self.was_read

    async def is_unread(self) -> bool:
        """Whether the client did not read the answer that was sent; waits for a moment if it may still."""
        if self.was_read is None:
            return False
        await asyncio.wait({self.was_read}, timeout=_READ_S)
        return not (self.was_read.done() and self.was_read.result())


class RecordedChat:
    """Answers the requests of one episode, one at a time.

    A request whose messages begin with an earlier reply and all that led to it continues from the tokens of
    that reply. Any other request is rendered anew, and begins a new sequence of the episode.

    Args:
        sampling: the run's distribution, which answers name where a request asks for another one.

    Attributes:
        limit: the limit that refused a request; empty: none.
        is_refused: the last request was refused for another reason.
        reply: the last reply.
        messages: the conversation that it ends.
        counts: numbers of the episode.
        failed: gets the exception of an engine, which ends the episode.
    """

    #: ignored fields of which a line was logged
    _told: set[str] = set()  # noqa: RUF012

    def __init__(
        self, renderer: ChatRenderer, sampler: Sampler, task: Task, sampling: Sampling | None = None
    ) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._task = task
        self._sampling = sampling
        self._said: list[Said] = []
        self._lock = asyncio.Lock()
        self._request = ChatRequest([], [])
        self._stop = ""  # the text at which the last turn ended
        self._usage = (0, 0)
        self.limit = ""
        self.is_refused = False
        self.reply: Reply | None = None
        self.messages: tuple[Message, ...] = ()
        self.counts = {"num_tool_calls": 0.0, "tool_errors": 0.0}
        self.failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def answered(self, request: ChatRequest, is_gone: Callable[[], bool]) -> Said:
        """The reply to a request; one that its client never read is given again, and not sampled again.

        Args:
            is_gone: whether the client does not wait any more.

        Raises:
            Refused: the template takes no such conversation, or a limit of the episode is reached.
            ConnectionError: the client had gone before its turn came.
        """
        async with self._lock:
            if is_gone():
                raise ConnectionError
            unread = await self._unread_answer(request)
            if unread:
                return unread
            self._request = request
            try:
                conversation = self._conversation(request)
                reply = await conversation.reply()
            except LimitReached as limit:
                self.limit = limit.reason
                code = "context_length_exceeded" if limit.reason == "context_overflow" else limit.reason
                what = "prompt is too long: " if limit.reason == "context_overflow" else ""
                raise Refused(400, code, f"{what}a limit of the episode is reached: {limit.reason}") from None
            except UsageError as error:
                raise Refused(400, "invalid_messages", error.what, "messages") from None
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise
            return self._remembered(request, conversation, reply)

    async def _unread_answer(self, request: ChatRequest) -> Said | None:
        """The answer to the same request, if its client did not read it to the end."""
        for said in reversed(self._said):
            if said.request.is_same(request) and await said.is_unread():
                return said
        return None

    def _remembered(self, request: ChatRequest, conversation: Conversation, reply: Reply) -> Said:
        if self._stop:  # the recorded tokens end with it, the client reads what stands before
            reply = replace(reply, content=reply.content.partition(self._stop)[0], is_cut=False)
        self.reply = reply
        self.messages = tuple(conversation.messages)
        self.counts["num_tool_calls"] += len(reply.calls)
        self.counts["tool_errors"] += bool(reply.problem)
        self.is_refused = False
        answer = self._reply(request, reply)
        keys = [_key(message) for message in (*request.messages, answer.message)]
        said = Said(request, answer, keys, conversation)
        self._said.append(said)
        return said

    def conversation_before(self, number: str) -> list[Message] | None:
        """The messages up to the reply with this number, without that of a field of its own; None: none."""
        for said in self._said:
            if said.reply.id == number:
                return [*said.request.messages[said.request.has_instructions :], said.reply.message]
        return None

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
        """See `Sampler.sample`; applies the request's limit and stop texts, and counts tokens."""
        self._stop = ""
        limit = max_tokens or self._request.max_tokens
        shortened = self._stopped if self._request.stop else None
        turn = await self._sampler.sample(token_ids, limit, shortened)
        self._usage = len(token_ids), len(turn.token_ids)
        return turn

    def _stopped(self, turn: Turn) -> Turn:
        """The turn up to the first token with which its text contains a stop text of the request."""
        ids = turn.token_ids.tolist()
        text = self._text(ids)
        contained = [(text.index(stop), stop) for stop in self._request.stop if stop in text]
        if not contained:
            return turn
        end, self._stop = min(contained)
        low = 1
        high = len(ids)
        while low < high:  # the fewest tokens whose text contains it
            middle = (low + high) // 2
            if self._text(ids[:middle])[end:].startswith(self._stop):
                high = middle
            else:
                low = middle + 1
        return _first_tokens(turn, low)

    def _text(self, ids: list[int]) -> str:
        from rlctl.environment.single_turn import decode

        return decode(self._renderer.tokenizer, [ids])[0]

    def watch(self, pid: int) -> None:
        """See `Sampler.watch`."""
        self._sampler.watch(pid)

    def _conversation(self, request: ChatRequest) -> Conversation:
        """The conversation that ends with the request's messages; the policy speaks next."""
        messages = request.messages
        tools = request.tools
        keys = [_key(message) for message in messages]
        known = [
            said for said in self._said if said.request.tools == tools and said.keys == keys[: len(said.keys)]
        ]
        if known:
            said = max(known, key=lambda one: len(one.keys))
            continued = copy.copy(said.conversation)
            continued.messages = [*continued.messages, *self._shown(messages[len(said.keys) :])]
            return continued
        if (
            any(message["role"] == "system" for message in messages[1:])
            and not self._renderer.takes_later_system
        ):
            what = "the model's chat template does not show a system message that follows others"
            raise Refused(
                400, "two_system_prompts", f"{what}: put all of it into the first message", "messages"
            )
        shown = self._shown(messages)
        task = replace(self._task, messages=tuple(shown))
        if keys != [_key(_with_objects(message)) for message in self._task.messages]:
            task = replace(task, prompt_ids=self._renderer.encode(self._renderer.text(shown, tools)))
        return Conversation(self._renderer, self, task, tools)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them."""
        shown_messages = []
        for message in messages:
            shown = dict(message)
            if shown["role"] == "tool":
                shown["role"] = self._renderer.tool_role
            if "tool_calls" in shown and not self._renderer.shows_calls:
                calls = [json.dumps(call["function"], ensure_ascii=False) for call in shown.pop("tool_calls")]
                written = [f"<tool_call>{call}</tool_call>" for call in calls]
                shown["content"] = "\n".join(filter(None, [shown["content"], *written]))
            shown_messages.append(shown)
        return shown_messages

    def _reply(self, request: ChatRequest, reply: Reply) -> ChatReply:
        """The reply as a client reads it."""
        text = _CALLS.split(reply.content, maxsplit=1)[0] if reply.calls else reply.content
        calls = [CallOfTool(f"call_{uuid.uuid4().hex}", call.name, call.arguments) for call in reply.calls]
        return ChatReply(
            id=uuid.uuid4().hex,
            created=int(time.time()),
            text=text,
            calls=tuple(calls),
            is_cut=reply.is_cut,
            stop=self._stop,
            num_read=self._usage[0],
            num_sampled=self._usage[1],
            in_use=self._in_use(request.ignored),
        )

    def _in_use(self, ignored: Mapping[str, Any]) -> dict[str, Any]:
        """The run's values of the fields that a request sets in vain; a line says so, once per field."""
        of_run = dict(_IN_USE)
        sampling = self._sampling
        if sampling:
            of_run |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            of_run["temperature"] = 0.0 if sampling.greedy else sampling.temperature
        in_use = {name: of_run.get(name) for name in ignored}
        for name, value in in_use.items():
            if value != ignored[name] and name not in self._told:
                self._told.add(name)
                asked = json.dumps(ignored[name], default=str)[:80]
                has = f"the run's value is {value}" if value is not None else "the run has no such setting"
                _log.warning("the agent asks for %s=%s, which is ignored: %s", name, asked, has)
        return in_use


def _first_tokens(turn: Turn, count: int) -> Turn:
    """The first tokens of a turn, which then has no token that ends it."""
    import torch

    places = torch.arange(count)
    dropped = len(turn.token_ids) - count
    return replace(
        turn,
        token_ids=turn.token_ids[:count],
        log_probs=turn.log_probs[:count],
        versions=turn.versions[:count],
        finish_reason="length",
        kept=None if turn.kept is None else turn.kept[places],
        most_likely=None if turn.most_likely is None else turn.most_likely[places],
        experts=None if turn.experts is None else turn.experts[: len(turn.experts) - dropped],
    )


def _key(message: Message) -> Message:
    """What must be equal for a message to be the same; white space around a reply may be lost on the way."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": message["content"].strip()}


def _with_objects(message: Mapping[str, Any]) -> Message:
    """A message of a row, whose calls may have their arguments as text."""
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    plain = {"role": "assistant", "content": message.get("content") or ""}
    return plain | ({"tool_calls": calls} if calls else {})


def _object(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
