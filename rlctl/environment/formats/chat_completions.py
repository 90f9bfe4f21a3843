"""Chat completions, as OpenAI's API has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rlctl.environment.formats.protocol import (
    ChatReply,
    ChatRequest,
    Fields,
    Refused,
    arguments_in,
    assistant_message,
    joined_messages,
    names,
    pieces,
    positive,
    refuse_fields,
    stop_texts,
    takes_tools,
    text_in,
    tool_schema,
    tools_in,
    unsupported,
    wrong,
)
from rlctl.environment.renderer import Message

PATH = "/v1/chat/completions"
FIELDS = Fields(
    used=names("messages model tools max_tokens max_completion_tokens stream stream_options stop"),
    without_effect=names(
        "metadata moderation prediction prompt_cache_key prompt_cache_options "
        "prompt_cache_retention safety_identifier service_tier store user"
    ),
    refused={
        "n": [1],
        "logprobs": [False],
        "top_logprobs": [0],
        "modalities": [["text"]],
        "response_format": [{"type": "text"}],
        "audio": [],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "web_search_options": [],
    },
    sampling=names(
        "temperature top_p top_k min_p seed frequency_penalty presence_penalty logit_bias "
        "repetition_penalty reasoning_effort verbosity tool_choice parallel_tool_calls"
    ),
)


def read(body: Any, conversation: Callable[[str], list[Message] | None]) -> ChatRequest:
    """See `WireFormat.read`."""
    del conversation
    ignored = FIELDS.check(body)
    if not isinstance(body.get("messages"), list):
        raise wrong("messages", "give a list")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise wrong("stream_options", "give an object")
    messages = [_message(message, f"messages[{place}]") for place, message in enumerate(body["messages"])]
    return ChatRequest(
        messages=joined_messages(messages, has_instructions=False),
        tools=tools_in(body, _tool) if takes_tools(ignored) else [],
        max_tokens=positive(body, "max_completion_tokens", "max_tokens"),
        stop=stop_texts(body, "stop"),
        streams=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
        body=body,
    )


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise wrong(where, "a message is an object with role and content")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise wrong(f"{where}.role", f"{role!r} is not one of system, developer, user, assistant and tool")
    text = text_in(message.get("content"), ("text",), f"{where}.content")
    if role == "assistant":
        return _reply(message, text, where)
    read_message: Message = {"role": "system" if role == "developer" else role, "content": text}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            read_message[key] = str(message[key])
    return read_message


def _reply(message: Mapping[str, Any], text: str, where: str) -> Message:
    refuse_fields(message, ("function_call",), where, "calls stand in tool_calls")
    calls = []
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise wrong(f"{where}.tool_calls", "give a list")
    for place, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(
                f"{where}.tool_calls[{place}]", "a call has an id, and a function with name and arguments"
            )
        arguments = arguments_in(function.get("arguments"), f"{where}.tool_calls[{place}].function.arguments")
        calls.append((str(call.get("id") or ""), function["name"], arguments))
    return assistant_message(text, calls)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type", "function") != "function":
        raise unsupported(f"{where}.type", f"{tool['type']!r}: only functions are supported")
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise wrong(where, "a tool has a function with a name")
    return tool_schema(function.get("name"), function.get("description"), function.get("parameters"), where)


def written(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """See `WireFormat.written`; ignored fields of the request are added with the values in use."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}
            for call in reply.calls
        ]
    return {
        **reply.in_use,
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion",
        "created": reply.created,
        "model": request.model,
        "choices": [
            {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
        ],
        "usage": _usage(reply),
    }


def _finish_reason(reply: ChatReply) -> str:
    if reply.is_cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_read,
        "completion_tokens": reply.num_sampled,
        "total_tokens": reply.num_read + reply.num_sampled,
    }


def events(request: ChatRequest, reply: ChatReply) -> list[str]:
    """See `WireFormat.events`."""
    head = {
        **reply.in_use,
        "id": f"chatcmpl-{reply.id}",
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": request.model,
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": "" if reply.text else None}]
    deltas += [{"content": piece} for piece in pieces(reply.text)]
    for index, call in enumerate(reply.calls):
        function = {"name": call.name, "arguments": call.json}
        deltas.append(
            {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
        )
    parts: list[dict[str, Any]] = [_chunk(head, delta, None) for delta in deltas]
    parts.append(_chunk(head, {}, _finish_reason(reply)))
    if (request.body.get("stream_options") or {}).get("include_usage"):
        parts.append({**head, "choices": [], "usage": _usage(reply)})
    return [*(f"data: {json.dumps(part)}\n\n" for part in parts), "data: [DONE]\n\n"]


def _chunk(head: Mapping[str, Any], delta: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}


def error(refused: Refused) -> dict[str, Any]:
    """See `WireFormat.error`."""
    return {
        "error": {
            "message": str(refused),
            "type": "invalid_request_error",
            "param": refused.param or None,
            "code": refused.code,
        }
    }
