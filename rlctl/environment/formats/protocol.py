"""What the wire formats of the endpoint share: a request as it was read, a reply to be written, and errors.

A format is one file beside this one. It reads a request into a `ChatRequest`, whose messages and tools have
the form that chat templates take, and writes a `ChatReply` in its own shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlctl.environment.renderer import Message

#: Longest piece of text in one event of a stream, in characters.
_PIECE = 256


class Refused(Exception):
    """A request that is not answered; clients read the message and the code.

    Attributes:
        status: of HTTP.
        param: the field of the request that is wrong; empty: none in particular.
    """

    def __init__(self, status: int, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def wrong(param: str, what: str) -> Refused:
    """The refusal of a request with a wrong field."""
    return Refused(400, "invalid_request", f"{param}: {what}", param)


def unsupported(param: str, what: str) -> Refused:
    """The refusal of a field that asks for what cannot be recorded."""
    return Refused(400, "unsupported", f"{param}: {what}", param)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, the same for all formats.

    Attributes:
        messages: the conversation, in the form that chat templates take; arguments of calls are objects.
        tools: schemas, as chat completions have them.
        max_tokens: the request's own limit; None: that of the run.
        stop: texts at which the reply ends.
        ignored: fields that ask for another sampling than the run's, and their values.
        has_instructions: the first message stood in a field of its own.
        body: the request as it came, for fields that the answer repeats.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    streams: bool = False
    model: str = ""
    ignored: Mapping[str, Any] = field(default_factory=dict)
    has_instructions: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)

    def is_same(self, other: ChatRequest) -> bool:
        """Whether both ask for the same turn."""
        return (self.messages, self.tools, self.max_tokens, self.stop) == (
            other.messages,
            other.tools,
            other.max_tokens,
            other.stop,
        )


@dataclass(frozen=True, slots=True)
class CallOfTool:
    """A tool call of a reply."""

    id: str
    name: str
    arguments: dict[str, Any]

    @property
    def json(self) -> str:
        """The arguments as text."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A reply of the policy.

    Attributes:
        text: what it wrote before its tool calls.
        is_cut: it reached its limit of tokens.
        stop: the text of the request at which it ended; empty: none.
        num_read, num_sampled: tokens.
        in_use: fields of the request that are ignored → the run's values.
    """

    id: str
    created: int
    text: str
    calls: tuple[CallOfTool, ...]
    is_cut: bool
    stop: str
    num_read: int
    num_sampled: int
    in_use: Mapping[str, Any]

    @property
    def message(self) -> Message:
        """The reply as a client echoes it, in the form of `ChatRequest.messages`."""
        return assistant_message(self.text, [(call.id, call.name, call.arguments) for call in self.calls])


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a format's requests; any other one is an error.

    Attributes:
        used: fields that are read.
        without_effect: fields that change nothing here, such as names of users and of caches.
        refused: fields that ask for what cannot be recorded → the values that do not.
        sampling: fields that would change the distribution of the policy, which is the run's.
    """

    used: frozenset[str]
    without_effect: frozenset[str]
    refused: Mapping[str, Sequence[Any]]
    sampling: frozenset[str]

    def check(self, body: Any) -> dict[str, Any]:
        """Returns the fields that ask for another sampling, with their values.

        Raises:
            Refused: a field is unknown, or asks for what cannot be recorded.
        """
        if not isinstance(body, dict):
            raise Refused(400, "invalid_request", "the request is not a JSON object")
        ignored = {}
        for name, value in body.items():
            if value is None or name in self.used or name in self.without_effect:
                continue
            if name in self.sampling:
                ignored[name] = value
            elif name not in self.refused:
                raise Refused(400, "unknown_field", f"{name}: there is no such field", name)
            elif value not in self.refused[name]:
                what = f"{name}={_shown(value)} is not supported: leave it out"
                raise Refused(400, "unsupported", what, name)
        for name in ("stream", "store", "background"):
            if not isinstance(body.get(name) or False, bool):
                raise wrong(name, "give true or false")
        return ignored


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class WireFormat(Protocol):
    """A wire format: one module.

    Attributes:
        PATH: of its requests.
    """

    PATH: str

    def read(self, body: Any, conversation: Callable[[str], list[Message] | None]) -> ChatRequest:
        """Reads a request, as parsed from JSON.

        Args:
            conversation: number of an earlier reply → the messages up to it, without those that stood in a
                field of their own.

        Raises:
            Refused: it is wrong, or asks for what cannot be recorded.
        """

    def written(self, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
        """The answer."""

    def events(self, request: ChatRequest, reply: ChatReply) -> list[str]:
        """The answer as events of a stream."""

    def error(self, refused: Refused) -> dict[str, Any]:
        """The answer to a request that is refused."""


def event(kind: str, content: Mapping[str, Any]) -> str:
    """A named event of a stream, whose content repeats the name."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"


def pieces(text: str) -> Iterator[str]:
    """The text in the pieces that are streamed."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def assistant_message(text: str, calls: Sequence[tuple[str, str, Mapping[str, Any]]] = ()) -> Message:
    """A message of the policy with tool calls: id, name, arguments."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, name, arguments in calls
        ]
    return message


def tools_in(
    body: Mapping[str, Any], schema: Callable[[Any, str], dict[str, Any]], where: str = "tools[{}]"
) -> list[dict[str, Any]]:
    """The tools of a request, as chat completions describe them.

    Args:
        schema: a tool as the format has it, and where it stands → its description.
        where: how the format names the place of a tool.

    Raises:
        Refused: they are no list, one of them is wrong, or two have one name.
    """
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise wrong("tools", "give a list")
    schemas = []
    seen = set[str]()
    for index, tool in enumerate(tools):
        schemas.append(schema(tool, where.format(index)))
        name = schemas[-1]["function"]["name"]
        if name in seen:
            raise wrong(where.format(index), f"there is another tool of the name {name!r}")
        seen.add(name)
    return schemas


def refuse_fields(message: Mapping[str, Any], fields: Iterable[str], where: str, instead: str) -> None:
    """Refuses what stands in a message in another format's shape, which the policy would not read.

    Raises:
        Refused: one of the fields is there, and not empty.
    """
    for name in fields:
        if message.get(name):
            raise wrong(f"{where}.{name}", instead)


def takes_tools(ignored: dict[str, Any]) -> bool:
    """Whether OpenAI's `tool_choice` lets the policy call tools; `auto` and `none` are not ignored."""
    choice = ignored.get("tool_choice")
    if choice in ("auto", "none"):
        del ignored["tool_choice"]
    return bool(choice != "none")


def tool_schema(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool, as chat completions describe it.

    Raises:
        Refused: it has no name, or its parameters are no schema.
    """
    if not isinstance(name, str) or not name:
        raise wrong(where, "a tool needs a name")
    if not isinstance(parameters if parameters is not None else {}, dict):
        raise wrong(where, f"the parameters of {name} must be a JSON schema")
    function = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in function.items() if value is not None},
    }


def arguments_in(text: Any, where: str) -> dict[str, Any]:
    """The arguments of a tool call, which a message holds as JSON text or as an object.

    Raises:
        Refused: they are neither.
    """
    try:
        value = json.loads(text or "{}") if isinstance(text, str | None) else text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise wrong(where, "the arguments of a tool call are a JSON object")
    return value


def text_in(content: Any, kinds: Sequence[str], where: str) -> str:
    """The text of a message: text, or a list of parts of these kinds.

    Raises:
        Refused: a part is something else, such as an image.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "give text, or a list of parts")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            raise wrong(f"{where}[{place}]", "a part is an object with a type")
        if part.get("type", "text") not in kinds:
            raise unsupported(f"{where}[{place}]", f"type {part['type']!r}: the policy reads text only")
        if not isinstance(part.get("text"), str):
            raise wrong(f"{where}[{place}].text", "give text")
        texts.append(part["text"])
    return "".join(texts)


def positive(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is set: a positive integer.

    Raises:
        Refused: it is something else.
    """
    for name in names:
        value = body.get(name)
        if value is not None and (type(value) is not int or value < 1):
            what = f"{name}={_shown(value)}: give a positive integer"
            raise Refused(400, "invalid_request", what, name)
    return next((body[name] for name in names if body.get(name) is not None), None)


def stop_texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Texts at which a reply ends.

    Raises:
        Refused: they are no texts, or empty.
    """
    given = body.get(name) or []
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise wrong(name, "give texts that are not empty")
    return tuple(texts)


def joined_messages(messages: Sequence[Message], *, has_instructions: bool) -> list[Message]:
    """The conversation, checked: its system messages at the start are one, and tools answer calls.

    Args:
        has_instructions: the first message stood in a field of its own.

    Raises:
        Refused: a further system message follows such a field, or a tool's result answers no call.
    """
    found: list[Message] = []
    open_calls: list[str] = []
    for message in messages:
        role = message["role"]
        if role == "system" and has_instructions and found:
            what = "the request has a system prompt in a field of its own and in a message: use one of them"
            raise Refused(400, "two_system_prompts", what, "messages")
        if role == "tool":
            _close(open_calls, message)
        else:
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
        if role == "system" and len(found) == 1 and found[0]["role"] == "system":
            found[0] = {"role": "system", "content": f"{found[0]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    if not found:
        raise Refused(400, "invalid_request", "the request has no message", "messages")
    return found


def _close(open_calls: list[str], message: Message) -> None:
    """Marks a call of the last reply as answered; a result without an id answers the first one."""
    number = message.get("tool_call_id") or (open_calls[0] if open_calls else "")
    if number not in open_calls:
        what = f"a tool's result answers no call of the message before it ({number or 'it has no id'})"
        raise Refused(400, "tool_result_without_call", what, "messages")
    open_calls.remove(number)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:80]}…"
