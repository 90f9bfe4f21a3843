"""Messages, as Anthropic's API has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlctl.environment.formats.protocol import (
    ChatReply,
    ChatRequest,
    Fields,
    Refused,
    assistant_message,
    event,
    joined_messages,
    names,
    pieces,
    positive,
    refuse_fields,
    stop_texts,
    text_in,
    tool_schema,
    tools_in,
    unsupported,
    wrong,
)
from rlctl.environment.renderer import Message

PATH = "/v1/messages"
FIELDS = Fields(
    used=names("messages model system tools max_tokens stream stop_sequences"),
    without_effect=names(
        "cache_control diagnostics inference_geo metadata service_tier speed user_profile_id "
        "workspace_id context_management"
    ),
    refused={"container": [], "mcp_servers": [[]], "output_format": [], "prefill": [], "fallbacks": [[]]},
    sampling=names("temperature top_p top_k thinking output_config tool_choice"),
)
#: Status → type of the error.
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


def read(body: Any, conversation: Callable[[str], list[Message] | None]) -> ChatRequest:
    """See `WireFormat.read`."""
    del conversation
    ignored = FIELDS.check(body)
    if not isinstance(body.get("messages"), list):
        raise wrong("messages", "give a list")
    if (ignored.get("output_config") or {}).get("format"):
        raise unsupported("output_config.format", "leave it out")
    system = text_in(body.get("system"), ("text",), "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body["messages"]):
        _append(messages, message, f"messages.{place}")
    max_tokens = positive(body, "max_tokens")
    if max_tokens is None:
        raise wrong("max_tokens", "this field is required")
    choice = ignored.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice is not None and kind not in ("auto", "any", "tool", "none"):
        raise wrong("tool_choice", "give an object with type auto, any, tool or none")
    if kind == "none" or choice == {"type": "auto"}:
        del ignored["tool_choice"]
    return ChatRequest(
        messages=joined_messages(messages, has_instructions=bool(system)),
        tools=[] if kind == "none" else tools_in(body, _tool, "tools.{}"),
        max_tokens=max_tokens,
        stop=stop_texts(body, "stop_sequences"),
        streams=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
        has_instructions=bool(system),
        body=body,
    )


def _append(messages: list[Message], message: Any, where: str) -> None:
    """Appends a message; its results of tools are messages of their own, before its text."""
    if not isinstance(message, dict):
        raise wrong(where, "a message is an object with role and content")
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", f"{role!r} is neither user nor assistant")
    refuse_fields(message, ("tool_calls", "function_call"), where, "calls are blocks tool_use of the content")
    where = f"{where}.content"
    blocks = content if isinstance(content, list) else [{"type": "text", "text": text_in(content, (), where)}]
    texts = list[str]()
    calls = list[tuple[str, str, Any]]()
    results = list[Message]()
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, f"{where}.{place}"))
        elif kind == "tool_result" and role == "user":
            if texts:
                raise wrong(f"{where}.{place}", "results of tools come before text")
            results.append(_result(block, f"{where}.{place}"))
        elif kind not in ("thinking", "redacted_thinking") or role != "assistant":
            texts.append(text_in([block], ("text",), where))
    messages += results
    if role == "assistant":
        messages.append(assistant_message("".join(texts), calls))
    elif texts or not results:
        _say(messages, role, "\n\n".join(texts) if role == "user" else "".join(texts))


def _say(messages: list[Message], role: str, text: str) -> None:
    """Two messages of the user are one turn."""
    if role == "user" and messages and messages[-1]["role"] == "user":
        text = f"{messages.pop()['content']}\n\n{text}"
    messages.append({"role": role, "content": text})


def _call(block: Mapping[str, Any], where: str) -> tuple[str, str, dict[str, Any]]:
    number = block.get("id")
    name = block.get("name")
    given = block.get("input")
    if not isinstance(number, str) or not isinstance(name, str) or not isinstance(given, dict):
        raise wrong(where, "a tool_use has id, name and input, an object")
    return number, name, given


def _result(block: Mapping[str, Any], where: str) -> Message:
    if not isinstance(block.get("tool_use_id"), str):
        raise wrong(f"{where}.tool_use_id", "give the id of a tool_use")
    text = text_in(block.get("content"), ("text",), f"{where}.content")
    return {"role": "tool", "content": text, "tool_call_id": block["tool_use_id"]}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, "a tool is an object with a name")
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", f"{tool['type']!r}: only tools with an input_schema are supported")
    return tool_schema(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def written(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    """See `WireFormat.written`; ignored fields of the request are added with the values in use."""
    content: list[dict[str, Any]] = (
        [{"type": "text", "text": reply.text, "citations": None}] if reply.text else []
    )
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in reply.calls
    ]
    return {
        **_head(request, reply),
        "content": content,
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop or None,
        "usage": {"input_tokens": reply.num_read, "output_tokens": reply.num_sampled},
    }


def _head(request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": request.model}
    return {**reply.in_use, **head}


def _stop_reason(reply: ChatReply) -> str:
    if reply.is_cut:
        return "max_tokens"
    if reply.calls:
        return "tool_use"
    return "stop_sequence" if reply.stop else "end_turn"


def events(request: ChatRequest, reply: ChatReply) -> list[str]:
    """See `WireFormat.events`."""
    start = {
        **_head(request, reply),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.num_read, "output_tokens": 0},
    }
    parts = [event("message_start", {"message": start})]
    index = 0
    if reply.text:
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces(reply.text)]
        parts += _block(0, {"type": "text", "text": ""}, deltas)
        index = 1
    for call in reply.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        parts += _block(index, block, [{"type": "input_json_delta", "partial_json": call.json}])
        index += 1
    ended = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop or None}
    usage = {"input_tokens": reply.num_read, "output_tokens": reply.num_sampled}
    return [*parts, event("message_delta", {"delta": ended, "usage": usage}), event("message_stop", {})]


def _block(index: int, block: Mapping[str, Any], deltas: list[dict[str, Any]]) -> list[str]:
    return [
        event("content_block_start", {"index": index, "content_block": block}),
        *(event("content_block_delta", {"index": index, "delta": delta}) for delta in deltas),
        event("content_block_stop", {"index": index}),
    ]


def error(refused: Refused) -> dict[str, Any]:
    """See `WireFormat.error`; the code is an addition."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused), "code": refused.code}}
