"""JSON is read as by the module json, but a key that occurs twice, and nesting without an end, are errors."""

from __future__ import annotations

import json

import pytest

from rlctl.prepare.text_files import parse_json

SAME = [
    '{"a": 1, "b": [1, 2.5, null, true], "c": {"d": "e"}}',
    '{"a": "says \\": twice", "b": 1}',
    '{"a": 123456789012345678901234, "b": -9223372036854775809}',
    '{"a": 1e400, "b": 0.1, "c": 1e22}',
    '{"a" : 1, "b"\t:\t2}',
    '{"text": "\\ud800"}',
    '\ufeff{"a": "ü"}',
    '[{"a": 1}, {"a": 2}]',
    "3",
    '"a"',
]


@pytest.mark.parametrize("text", SAME)
def test_the_value_is_that_of_json(text: str) -> None:
    value = parse_json(text.encode())
    assert value == json.loads(text.removeprefix("\ufeff"))
    assert repr(value) == repr(json.loads(text.removeprefix("\ufeff")))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a" : 1, "a": 2}',
        '{"a"\n: 1, "a": 2}',
        '{"b": {"a": 1, "a": 2}}',
        '{"b": [{"a": 1, "a": 2}]}',
        '{"a": 1, "a"  :2, "c": "\\":"}',
        '{"a": 1, "\\u0061": 2}',
    ],
)
def test_a_key_that_occurs_twice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the key 'a' occurs twice"):
        parse_json(text.encode())


def test_no_number_is_read_as_json_reads_it() -> None:
    assert repr(parse_json(b'{"a": NaN, "b": -Infinity}')) == "{'a': nan, 'b': -inf}"


@pytest.mark.parametrize("text", [b'{"a": 1', b"{'a': 1}", b'{"a": "\xff"}', b"[" * 100_000])
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        parse_json(text)
