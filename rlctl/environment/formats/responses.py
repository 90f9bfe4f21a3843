"""Responses, as OpenAI's API has them; `previous_response_id` names a reply of the same episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlctl.environment.formats.chat_completions import error
from rlctl.environment.formats.protocol import (
    ChatReply,
    ChatRequest,
    Fields,
    Refused,
    arguments_in,
    assistant_message,
    event,
    joined_messages,
    names,
    pieces,
    positive,
    refuse_fields,
    takes_tools,
    text_in,
    tool_schema,
    tools_in,
    unsupported,
    wrong,
)
from rlctl.environment.renderer import Message

__all__ = ["FIELDS", "PATH", "error", "events", "read", "written"]

PATH = "/v1/responses"
FIELDS = Fields(
    used=names("input instructions model tools max_output_tokens stream previous_response_id text"),
    without_effect=names(
        "access_programs include metadata moderation prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier service_tier store stream_options user "
        "max_tool_calls"
    ),
    refused={
        "background": [False],
        "background_options": [],
        "context_management": [[]],
        "conversation": [],
        "image": [],
        "prompt": [],
        "top_logprobs": [0],
        "truncation": ["disabled"],
    },
    sampling=names("temperature top_p reasoning tool_choice parallel_tool_calls"),
)
_PARTS = ("input_text", "output_text", "text")


def read(body: Any, conversation: Callable[[str], list[Message] | None]) -> ChatRequest:
    """See `WireFormat.read`."""
    ignored = FIELDS.check(body)
    _check_text(body.get("text") or {})
    instructions = body.get("instructions")
    given = body.get("input")
    if not isinstance(instructions or "", str):
        raise wrong("instructions", "give text")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    previous = body.get("previous_response_id")
    if previous is not None:
        known = conversation(str(previous).removeprefix("resp_"))
        if known is None:
            raise Refused(
                400, "previous_response_not_found", f"no response {previous} in this episode", "input"
            )
        messages += known
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        _append_items(messages, given)
    else:
        raise wrong("input", "give text, or a list of items")
    return ChatRequest(
        messages=joined_messages(messages, has_instructions=bool(instructions)),
        tools=tools_in(body, _tool) if takes_tools(ignored) else [],
        max_tokens=positive(body, "max_output_tokens"),
        streams=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
        has_instructions=bool(instructions),
        body=body,
    )


def _check_text(text: Any) -> None:
    form = text.get("format") or {"type": "text"} if isinstance(text, dict) else None
    if form != {"type": "text"}:
        raise unsupported("text.format", "only text is supported: leave it out")


def _append_items(messages: list[Message], items: list[Any]) -> None:
    """Appends items; those that the policy said one after the other are one message."""
    text: list[str] = []
    calls: list[tuple[str, str, dict[str, Any]]] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise wrong(where, "an item is an object")
        refuse_fields(item, ("tool_calls", "function_call"), where, "calls are items function_call")
        kind = item.get("type") or "message"
        role = item.get("role")
        if kind == "reasoning":
            continue
        if kind == "function_call":
            calls.append(_call(item, where))
        elif kind == "message" and role == "assistant":
            if calls:  # the next turn
                _end_turn(messages, text, calls)
            text.append(text_in(item.get("content"), _PARTS, f"{where}.content"))
        else:
            _end_turn(messages, text, calls)
            messages.append(_other(item, kind, role, where))
    _end_turn(messages, text, calls)


def _end_turn(messages: list[Message], text: list[str], calls: list[tuple[str, str, dict[str, Any]]]) -> None:
    if text or calls:
        messages.append(assistant_message("".join(text), calls))
    text.clear()
    calls.clear()


def _call(item: Mapping[str, Any], where: str) -> tuple[str, str, dict[str, Any]]:
    number = item.get("call_id")
    name = item.get("name")
    if not isinstance(number, str) or not isinstance(name, str):
        raise wrong(where, "a function_call has call_id, name and arguments")
    return number, name, arguments_in(item.get("arguments"), f"{where}.arguments")


def _other(item: Mapping[str, Any], kind: str, role: Any, where: str) -> Message:
    """The message of an item that the policy did not say."""
    if kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise wrong(f"{where}.call_id", "give the id of a function_call")
        text = text_in(item.get("output"), _PARTS, f"{where}.output")
        return {"role": "tool", "content": text, "tool_call_id": item["call_id"]}
    if kind != "message":
        raise unsupported(f"{where}.type", f"{kind!r} is not supported")
    if role not in ("user", "system", "developer"):
        raise wrong(f"{where}.role", f"{role!r} is not one of user, assistant, system and developer")
    text = text_in(item.get("content"), _PARTS, f"{where}.content")
    return {"role": "user" if role == "user" else "system", "content": text}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, "a tool is an object with a name")
    if tool.get("type", "function") != "function":
        raise unsupported(f"{where}.type", f"{tool['type']!r}: only functions are supported")
    return tool_schema(tool.get("name"), tool.get("description"), tool.get("parameters"), where)


def written(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """See `WireFormat.written`; fields of the request that are ignored have the values in use."""
    usage = {
        "input_tokens": reply.num_read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_read + reply.num_sampled,
    }
    status = "incomplete" if reply.is_cut else "completed"
    ended = {"status": status, "completed_at": reply.created, "output": _output(reply), "usage": usage}
    if reply.is_cut:
        ended["incomplete_details"] = {"reason": "max_output_tokens"}
    return _head(request, reply) | ended


def _head(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """The answer before the policy spoke."""
    body = request.body
    return {
        "temperature": None,
        "top_p": None,
        "tool_choice": "none" if body.get("tool_choice") == "none" else "auto",
        "parallel_tool_calls": True,
        **reply.in_use,
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "model": request.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "output": [],
        "previous_response_id": body.get("previous_response_id"),
        "text": {"format": {"type": "text"}},
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _output(reply: ChatReply) -> list[dict[str, Any]]:
    status = "incomplete" if reply.is_cut else "completed"
    items: list[dict[str, Any]] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{reply.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for call in reply.calls:
        items.append(
            {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
            | {"arguments": call.json, "status": status}
        )
    return items


def events(request: ChatRequest, reply: ChatReply) -> list[str]:
    """See `WireFormat.events`."""
    head = _head(request, reply)
    steps: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": head}),
        ("response.in_progress", {"response": head}),
    ]
    for index, item in enumerate(_output(reply)):
        place = {"output_index": index, "item_id": item["id"]}
        is_text = item["type"] == "message"
        empty: dict[str, Any] = {"content": []} if is_text else {"arguments": ""}
        begun = item | empty | {"status": "in_progress"}
        steps.append(("response.output_item.added", {"output_index": index, "item": begun}))
        steps += _text_steps(place, item["content"][0]) if is_text else _call_steps(place, item)
        steps.append(("response.output_item.done", {"output_index": index, "item": item}))
    last = "response.incomplete" if reply.is_cut else "response.completed"
    steps.append((last, {"response": written(request, reply)}))
    return [
        event(kind, {"sequence_number": number, **content}) for number, (kind, content) in enumerate(steps)
    ]


def _text_steps(place: dict[str, Any], part: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    place = {**place, "content_index": 0}
    return [
        ("response.content_part.added", {**place, "part": part | {"text": ""}}),
        *(
            ("response.output_text.delta", {**place, "delta": piece, "logprobs": []})
            for piece in pieces(part["text"])
        ),
        ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**place, "part": part}),
    ]


def _call_steps(place: dict[str, Any], item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("response.function_call_arguments.delta", {**place, "delta": item["arguments"]}),
        (
            "response.function_call_arguments.done",
            {**place, "name": item["name"], "arguments": item["arguments"]},
        ),
    ]
