"""Tool calls in what a model wrote, in the formats of several model families. Standard library only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_GLM = re.compile(r"\s*([\w.-]+)\s*((?:<arg_key>.*)?)\Z", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<]+?)(?:<｜tool▁sep｜>|\n)"
    r"(?:```json\n)?(.*?)(?:\n```)?(?:<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
_MISTRAL = re.compile(r"\s*([^\s\[{]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(\{.*)\Z", re.DOTALL)


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[list[ToolCall], str]:
    """The tool calls that a reply contains, and what is wrong with one that cannot be read, for the policy.

    Formats: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), the same with
    `<function=…><parameter=…>` (Qwen3-Coder) or `<arg_key>…<arg_value>…` (GLM), `[TOOL_CALLS][{…}]` and
    `[TOOL_CALLS]name[ARGS]{…}` (Mistral), DeepSeek's marks, and a reply that is nothing but JSON objects with
    `name` and `parameters` or `arguments` (Llama 3).

    Args:
        tools: schemas; say which arguments are text in formats that do not.
    """
    calls: list[ToolCall] = []
    for block in _blocks(text):
        functions = _FUNCTION.findall(block)
        if functions:
            calls += [_typed(name, _PARAMETER.findall(body), tools) for name, body in functions]
        elif glm := _GLM.match(block):
            calls.append(_typed(glm[1], _GLM_ARGUMENT.findall(glm[2]), tools))
        else:
            values = _values(block) or [None]
            read = [_call(call) for call in (values[0] if isinstance(values[0], list) else values)]
            calls += [call for call in read if call]
            if None in read:
                return calls, 'a tool call must be JSON: {"name": "…", "arguments": {…}}'
    return calls, ""


def _blocks(text: str) -> list[str]:
    """The parts of a reply that are tool calls."""
    calls = _HERMES.findall(text)
    if calls:
        return list(calls)
    calls = _DEEPSEEK.findall(text)
    if calls:
        return [_named(name, arguments) for name, arguments in calls]
    if "[TOOL_CALLS]" in text:
        parts = text.split("[TOOL_CALLS]")[1:]
        return [_named(named[1], named[2]) if (named := _MISTRAL.match(block)) else block for block in parts]
    plain = text.replace("<|python_tag|>", "")
    values = _values(plain) if plain.lstrip().startswith("{") else None
    return [plain] if values and all(map(_call, values)) else []  # else an answer


def _named(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments.strip()}}}'


def _call(value: Any) -> ToolCall | None:
    """The tool call that a JSON value describes."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    is_empty = arguments is None or (isinstance(arguments, str) and arguments.strip() in {"", "null"})
    if is_empty and value.keys() & {"arguments", "parameters"}:  # of a tool without parameters
        arguments = {}
    elif isinstance(arguments, str):
        arguments = next(iter(_values(arguments) or [None]))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """The call of a format that writes values as plain text; others than text are JSON."""
    schemas = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    known = schemas[0].get("parameters", {}).get("properties", {}) if schemas else {}
    arguments = {}
    for key, value in pairs:
        read = None if known.get(key, {}).get("type") == "string" else _values(value)
        arguments[key.strip()] = read[0] if read and len(read) == 1 else value
    return ToolCall(name, arguments)


def _refused_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is too large")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key occurs twice")
    return unique


#: Decoder of JSON as the standard has it: without NaN and infinity (also 1e999), and no key twice.
JSON = json.JSONDecoder(
    parse_constant=_refused_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
)


def _values(text: str) -> list[Any] | None:
    """The JSON values in a text; None if it is something else."""
    values = []
    position = 0
    try:
        while position < len(text := text.rstrip("; \t\r\n")):
            position += len(text[position:]) - len(text[position:].lstrip("; \t\r\n"))
            value, position = JSON.raw_decode(text, position)
            values.append(encodable(value))
    except (ValueError, RecursionError):
        return None
    return values


def encodable(value: Any) -> Any:
    """A JSON value without lone surrogates, which no tokenizer takes; escapes in JSON may stand for some.

    What JSON does not have becomes text.
    """
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace"))
