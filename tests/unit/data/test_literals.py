"""Conversations and answers that tables store as text."""

import json
import re

import numpy as np
import pytest

from rlctl.data.literals import answer_in, conversation_in, listed
from rlctl.data.records import RowError, parse_answer, parse_messages

TURNS = [
    {"role": "system", "content": 'Say "yes", it\'s\nshort.'},
    {"role": "user", "content": "Is {x} = [1, 2]?"},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(TURNS),
        json.dumps(TURNS, indent=2),
        repr(TURNS),
        repr(tuple(TURNS)),
        str(np.array(TURNS, dtype=object)),  # pandas writes this to CSV: no commas
        repr(np.array(TURNS, dtype=object)),
        f"np.array({TURNS!r}, dtype=object)",
        f"  {TURNS!r}\n",
    ],
)
def test_a_conversation_as_text_is_one(text):
    assert conversation_in(text) == TURNS
    assert [message.content for message in parse_messages(text)] == [turn["content"] for turn in TURNS]


def test_one_message_as_text_and_sharegpt():
    assert parse_messages("{'role': 'user', 'content': 'Hi'}")[0].content == "Hi"
    assert parse_messages('[{"from": "human", "value": "Hi"}]')[0].role == "user"


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3] sorted?",
        "{x} is a set",
        '{"a": 1} is what?',
        '[{"a": 1}, {"b": 2}]: which key comes first?',
        "['role', 'play']",
        "[",
        "Use {'role': 'user'} here",
        "{'value': 3} minus 1?",
    ],
)
def test_other_texts_stay_questions(text):
    assert conversation_in(text) is None
    assert parse_messages(text)[0].content == text


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "cut off',
        "[{'role': 'user', 'content': 'Hi'}",
        "[{'role': 'user', 'content': nan}]",
        "[{'role': 'user', 'content': 'a'}, 'b']",
        "[{'role': 'user', 'content': 'a'}, {'text': 'b'}]",
    ],
)
def test_a_broken_conversation_is_an_error(text):
    with pytest.raises(RowError, match="the prompt is a"):
        parse_messages(text)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("['7']", "7"),
        ('["7"]', "7"),
        ("[7]", "7"),
        ("(7,)", "7"),
        ("('7',)", "7"),
        ("[7.0]", "7"),
        ("array(['7'], dtype=object)", "7"),
        ("array([7])", "7"),
        ("np.array(['a b'], dtype='<U3')", "a b"),
        ("['a', 'b']", '["a", "b"]'),
        ('["a", "b"]', '["a", "b"]'),
        ("('a', 'b')", '["a", "b"]'),
        ("array(['1', '2'], dtype=object)", '["1", "2"]'),
        ("array([1, 2])", '["1", "2"]'),
        ("[np.int64(7)]", "7"),  # as NumPy 2 prints lists of its numbers
        ("np.float64(7.5)", "7.5"),
        ("[np.str_('a'), np.str_('b')]", '["a", "b"]'),
        ("[]", ""),
        # mathematics and JSON that graders read stay as they are
        ("[1, 2]", "[1, 2]"),
        ("(1, 2)", "(1, 2)"),
        ("(7)", "(7)"),
        ("{1, 2}", "{1, 2}"),
        ("[0, \\infty)", "[0, \\infty)"),
        ("[[1, 2], [3, 4]]", "[[1, 2], [3, 4]]"),
        ('{"numbers": [1, 2], "target": 3}', '{"numbers": [1, 2], "target": 3}'),
        ('[["a"], ["b"]]', '[["a"], ["b"]]'),
        ("(x + 1)(x - 1)", "(x + 1)(x - 1)"),
        ("array of 7", "array of 7"),
        ("a", "a"),
        ("[asy] draw [/asy]", "[asy] draw [/asy]"),
    ],
)
def test_answers_as_text(text, truth):
    assert parse_answer(text, "answer") == truth
    assert parse_answer(truth, "answer") == truth, "what was written is read again"


@pytest.mark.parametrize(
    "text",
    [
        "['7' '8']",
        "['7'",
        "frozenset({'7'})",
        "tensor(7)",
        "Decimal('7')",
        "{'answer': 7}",
        "{'a', 'b'}",
        "[['a'], ['b']]",
        "['a', b]",
        "array([nan], dtype=object)",
        "array(['7']",
        "[{'a': 1}]",
    ],
)
def test_other_literals_are_errors(text):
    if text == "array(['7']":  # no list, and no closed call
        assert answer_in(text) == text
        return
    with pytest.raises(RowError, match="answer is a"):
        parse_answer(text, "answer")


@pytest.mark.parametrize("text", ["(" * 5000, "[" * 100_000, "['" + "a" * 100_000, "{'a':" * 3000])
def test_depth_and_length_end(text):
    assert conversation_in(text) is None
    assert re.match(r"\W", str(listed(text)))


def test_lists_of_a_table():
    assert listed("[44, 19]") == [44, 19]
    assert listed("['a', 'b']") == ["a", "b"]
    assert listed("['a' 'b']") == "['a' 'b']"
    assert listed("{'A': 'x', 'B': 'y'}") == {"A": "x", "B": "y"}
    assert listed("a [b]") == "a [b]"
