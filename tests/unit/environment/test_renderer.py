"""Tool calls in the formats of model families, roles, tools and special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError
from rlctl.tool_calls import ToolCall, parse_calls
from tests.unit.environment.templates import FAMILIES, byte_tokenizer, tokenizer_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
A, B = ToolCall("f", {"n": 1}), ToolCall("g", {"s": "x"})
_A, _B = '{"name": "f", "arguments": {"n": 1}}', '{"name": "g", "arguments": {"s": "x"}}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>{_A}</tool_call>", [A]),
        (f"so: <tool_call>\n{_A}\n</tool_call>\n<tool_call>{_B}</tool_call>", [A, B]),
        (f"<tool_call>{_A}", [A]),  # the end of the turn was sampled instead of the closing mark
        ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', [A]),
        ("<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", [A]),
        (
            "<tool_call><function=f><parameter=s>007</parameter></function></tool_call>",
            [ToolCall("f", {"s": "007"})],
        ),
        ("<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [A]),
        ("<tool_call>f</tool_call>", [ToolCall("f", {})]),
        (f"[TOOL_CALLS][{_A}, {_B}]", [A, B]),
        (f"[TOOL_CALLS] [{_A}]\n", [A]),
        ('[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{"s": "x"}', [A, B]),
        ('{"name": "f", "parameters": {"n": 1}}', [A]),
        (
            '<|python_tag|>{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {"s": "x"}}',
            [A, B],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"
            '```json\n{"n": 1}\n```<｜tool▁call▁end｜>',
            [A],
        ),
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>', [A]),
        ("42", []),
        ('{"answer": 42}', []),
        ('{"name": "Ada", "age": 36}', []),
        ("{not JSON", []),
        ("[1, 2]", []),
        ("", []),
    ],
)
def test_calls_are_read(text: str, calls: list[ToolCall]) -> None:
    assert parse_calls(text, TOOLS) == (calls, "")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{bad}</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 50_000 + "</tool_call>",
        "[TOOL_CALLS]no thing",
        '<tool_call>{"name": "f", "arguments": {"n": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n": -Infinity}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n": 1, "n": 2}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1, \\"n\\": 2}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 0}</tool_call>',
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
    ],
)
def test_a_call_that_cannot_be_read_is_named_to_the_policy(text: str) -> None:
    calls, problem = parse_calls(text, TOOLS)
    assert calls == []
    assert problem.startswith("a tool call must be JSON")


@pytest.mark.parametrize("empty", ['""', '"  "', "null", "{}", '"{}"', '"null"'])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_no_arguments_may_be_written_in_several_ways(empty: str, key: str) -> None:
    text = f'{{"name": "f", "{key}": {empty}}}'
    for written in (f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS][{text}]", text):
        assert parse_calls(written, TOOLS) == ([ToolCall("f", {})], "")


def test_the_calls_before_a_broken_one_are_kept() -> None:
    calls, problem = parse_calls(f"<tool_call>{_A}</tool_call><tool_call>{{</tool_call>")
    assert calls == [A]
    assert problem


@pytest.mark.parametrize(
    ("family", "role"),
    [
        ("chatml", "tool"),
        ("qwen3", "tool"),
        ("llama3", "tool"),
        ("mistral", "user"),
        ("gemma", "user"),
        ("glm", "tool"),
    ],
)
def test_the_role_of_tools(family: str, role: str) -> None:
    assert ChatRenderer(tokenizer_of(family)).tool_role == role


@pytest.mark.parametrize("family", [*FAMILIES, "none"])
def test_the_policy_reads_the_schemas_whatever_the_template_takes(family: str) -> None:
    renderer = ChatRenderer(tokenizer_of(family) if family != "none" else byte_tokenizer(None))
    text = renderer.text([{"role": "user", "content": "hi"}], TOOLS)
    assert '"name": "f"' in text
    assert "hi" in text


def test_arguments_of_the_template_that_are_null_are_left_out() -> None:
    template = "{% if x is defined %}{{ x }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}]
    assert ChatRenderer(byte_tokenizer(template), {"x": None}).text(messages) == "hi"
    assert ChatRenderer(byte_tokenizer(template), {"x": 3}).text(messages) == "3hi"


def test_a_refusal_is_named() -> None:
    with pytest.raises(UsageError, match="chat template refuses this conversation: role not supported"):
        ChatRenderer(tokenizer_of("gemma")).text([{"role": "tool", "content": "1"}])


def test_a_start_token_begins_a_conversation_once() -> None:
    for family in FAMILIES:
        renderer = ChatRenderer(tokenizer_of(family))
        start = renderer.tokenizer.bos_token_id
        ids = renderer.encode(renderer.text([{"role": "user", "content": "hi"}]))
        assert start is None or (ids[0] == start and ids[1] != start)
