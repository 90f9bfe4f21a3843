"""Graders of form: JSON by a schema, tool calls, and the instructions of IFEval."""

from __future__ import annotations

import json

import pytest

from rlctl.registry import GRADERS
from rlctl.reward.form import expected_calls, json_schema, tool_call
from rlctl.reward.ifeval import CHECKS, count_sentences, ifeval, instructions_of

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        (' \n{"name": "Ada", "age": 36.0}\n', 1),
        ('Here it is:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1),
        ('```\n{"name": "Ada", "age": 36}\n```', 1),
        ('```json\n{}\n```\nno:\n```json\n{"name": "Ada", "age": 36}\n```', 1),
        ('```json\n{"name": "Ada", "age": 36}\n```\nno:\n```json\n{}\n```', 0),
        ('The person is {"name": "Ada", "age": 36}.', 1),
        ('First {"name": 1}, then {"name": "Ada", "age": 36}', 1),
        ('{"name": "Ada", "age": 36} or {"name": "Ada"}', 0),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada", "age": true}', 0),
        ('{"name": "Ada", "age": "36"}', 0),
        ('{"name": "Ada"}', 0),
        ('{"name": "Ada", "age": 36, "more": 1}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ('{"name": "Ada", "name": "Eve", "age": 36}', 0),
        ("{'name': 'Ada', 'age': 36}", 0),
        ('{"name": "Ada", "age": 36', 0),
        ("null", 0),
        ("Ada is 36.", 0),
        ("", 0),
        ("[" * 100_000, 0),
        ("{" * 3_000 + '{"name": "Ada", "age": 36}', 0),
    ],
)
def test_json_by_a_schema(response: str, score: int) -> None:
    assert json_schema(response, PERSON) == score


def test_other_values_than_objects() -> None:
    assert json_schema("The list is [1, 2]", '{"type": "array", "items": {"type": "integer"}}') == 1.0
    assert json_schema("3", '{"enum": [3]}') == 1.0
    assert json_schema('"2024-13-01"', '{"type": "string", "format": "date"}') == 0.0
    local = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}
    assert json_schema("3", json.dumps(local)) == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        *("{", "[]", '"text"', '{"type": "no type"}', '{"type": "object", "properties": 3}'),
        '{"$ref": "http://127.0.0.1:9/schema.json"}',
    ],
)
def test_a_broken_schema_is_an_error_of_the_row(truth: str) -> None:
    """Nothing is fetched, whatever a schema refers to."""
    with pytest.raises(ValueError, match=r"(?i)schema"):
        json_schema("{}", truth)


ADD = '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'
TWO = '[{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'
BFCL = '[{"weather": {"city": ["Paris", "Paris, France"], "unit": ["C", ""]}}]'
AMBIGUOUS = '[{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]'


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', ADD, 1),
        ('I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 2.0, "a": 1}}\n</tool_call>', ADD, 1),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ADD, 1),
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', ADD, 1),
        ('```json\n[{"name": "add", "arguments": {"a": 1, "b": 2}}]\n```', ADD, 1),
        ('[{"function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}]', ADD, 1),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]', ADD, 1),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 3}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": true, "b": 2}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": "1", "b": 2}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "sub", "arguments": {"a": 1, "b": 2}}</tool_call>', ADD, 0),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}</tool_call>', ADD, 0),
        (2 * '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', ADD, 0),
        ("The sum is 3.", ADD, 0),
        ("The sum is 3.", "[]", 1),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "[]", 0),
        (
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            TWO,
            1,
        ),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>', BFCL, 1),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris", "unit": "C"}}</tool_call>', BFCL, 1),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris", "unit": "F"}}</tool_call>', BFCL, 0),
        ('<tool_call>{"name": "weather", "arguments": {"unit": "C"}}</tool_call>', BFCL, 0),
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
            '<tool_call>{"name": "f", "arguments": {"x": 2}}</tool_call>',
            AMBIGUOUS,
            1,
        ),
    ],
)
def test_tool_calls(response: str, truth: str, score: int) -> None:
    assert tool_call(response, truth) == score


@pytest.mark.parametrize(
    "truth", ["{", "3", '["add"]', '[{"add": {"a": 1}}]', '{"name": "f", "arguments": "{"}']
)
def test_a_ground_truth_without_calls_is_an_error_of_the_row(truth: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        expected_calls(truth)


@pytest.mark.parametrize("truth", [ADD, TWO, BFCL, AMBIGUOUS, "[]"])
def test_known_responses_score_1_and_0(truth: str) -> None:
    right, wrong = GRADERS.part("tool_call").known_responses(truth)  # type: ignore[misc]
    assert (tool_call(right, truth), tool_call(wrong, truth)) == (1.0, 0.0)


#: Instruction, its arguments, a response that follows it, and one that does not.
CASES: list[tuple[str, dict[str, object], str, str]] = [
    ("keywords:existence", {"keywords": ["a+b", "Sun"]}, "the sun is A+B", "the sun is aab"),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, "Sun, sun", "sun"),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "less than"}, "sun", "sun sun"),
    ("keywords:forbidden_words", {"forbidden_words": ["art", "c++"]}, "artist of c", "the Art"),
    ("keywords:forbidden_words", {"forbidden_words": ["c++"]}, "c+", "I like C++!"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"},
     "Eel", "e"),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"},
     "A. B!", "A a. B b? C c."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"},
     "one two, three", "one two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***one***two***", "one *** *** two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weeks"},
        'one\n\n"Weeks, later',
        "weeks\n\nlater",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [address]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. more", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", "Bye. P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "* a\n**bold**", "**bold**"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     "*a* and **b**", "*a* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     "SECTION 1\nx\nSECTION 2\ny", "SECTION 1 x"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:json_format", {}, "[1]", 'Here: {"a": 1}'),
    ("detectable_format:title", {}, "<<The sun>>\nIt shines.", "<<>> It shines."),
    ("combination:two_responses", {}, "one******two", "one******one"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one******two******three"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes.", "Yes. Say it."),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, 'So. any questions?"', "Any questions? No."),
    ("startend:quotation", {}, ' "quoted" ', '"quoted'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "NASA's no, BUT I do", "NASA is"),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
]  # fmt: skip


def truth_of(*instructions: tuple[str, dict[str, object]]) -> str:
    names, arguments = zip(*instructions, strict=True)
    return json.dumps({"instruction_id_list": names, "kwargs": arguments})


@pytest.mark.parametrize(("name", "arguments", "follows", "does_not"), CASES)
def test_an_instruction_is_followed_or_not(
    name: str, arguments: dict[str, object], follows: str, does_not: str
) -> None:
    padded = arguments | {"unused": None}  # as the public rows have them
    assert ifeval(follows, truth_of((name, padded))) == 1.0
    assert ifeval(does_not, truth_of((name, padded))) == 0.0


LANGUAGES = [
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein schöner Tag im Garten.",
        "It is a nice day.",
    ),
    (
        "change_case:english_capital",
        {},
        "THIS IS A NICE DAY IN THE GARDEN",
        "This is a nice day in the garden",
    ),
    ("change_case:english_lowercase", {}, "this is a nice day in the garden", "This is a nice day"),
]


@pytest.mark.parametrize(("name", "arguments", "follows", "does_not"), LANGUAGES)
def test_languages(name: str, arguments: dict[str, object], follows: str, does_not: str) -> None:
    pytest.importorskip("langdetect")
    assert ifeval(follows, truth_of((name, arguments))) == 1.0
    assert ifeval(does_not, truth_of((name, arguments))) == 0.0


def test_all_25_instructions_of_the_public_set_have_cases() -> None:
    assert len(CHECKS) == 25
    assert {name for name, *_ in (*CASES, *LANGUAGES)} == CHECKS.keys()


def test_all_instructions_must_be_followed() -> None:
    both = truth_of(("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["sun"]}))
    assert [ifeval(text, both) for text in ("the sun", "the sun, moon", "the moon", "  ")] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "truth",
    [
        *("{", "[]", "{}", '{"instruction_id_list": []}'),
        truth_of(("no:such", {})),
        truth_of(("keywords:existence", {})),
        truth_of(("punctuation:no_comma", {"more": 1})),
        truth_of(("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "exactly"})),
        '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}',
        '{"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}]}',
    ],
)
def test_an_unreadable_instruction_is_an_error_of_the_row(truth: str) -> None:
    if truth == '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}':
        assert instructions_of(truth) == [("punctuation:no_comma", {})], "none has arguments"
        return
    with pytest.raises(ValueError, match=r".+"):
        ifeval("text", truth)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One. Two! Three? Four", 4),
        ("Dr. Smith paid 3.50 dollars, e.g. for tea. He left.", 2),
        ("J. S. Bach wrote it... I think.", 2),
        ('He said "No." Then he left.', 2),
        ("I said no. Then I left.", 2),
        ("At 5 p.m. we left. At 6 p.m. We slept.", 3),
        ("これは文です。次の文です。", 2),
        ("- a\n- b", 1),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert count_sentences(text) == count
