"""No response makes a built-in grader reach its time limit: repeated pieces of one to three words."""

import json
import random

import pytest

from rlctl.registry import GRADERS
from rlctl.reward.build import SourceScorer
from rlctl.reward.code import program_of
from rlctl.reward.pool import GradingPool, is_scorer
from rlctl.reward.protocol import Sample
from rlctl.reward.thoughts import without_thoughts

WORDS = [
    "wait",
    "no",
    "answer",
    "the answer is",
    "A",
    "B",
    "I",
    "or",
    "and",
    "is",
    "not",
    "(A)",
    "A)",
    "A.",
    ",",
    ".",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "*",
    "_",
    "$",
    "\\(",
    "\\boxed{",
    "\\boxed{A}",
    "}",
    "{",
    "####",
    "#### A",
    "<answer>",
    "</answer>",
    "```",
    "```python",
    "~~~",
    "[BEGIN]",
    "[PYTHON]",
    "<think>",
    "</think>",
    "1",
    "12",
    "1+2",
    "1.5",
    "=",
    "-",
    "\\text{",
    "\\frac{1}{2}",
    "\\pi",
    "答案是",
    "é",
    "'",
    '"',
    "because",
    "choose",
    "option",
    "Question:",
    "x",
    "(",
    ")",
    "1,",
    "+",
    "!",
    "?",
    ":",
    "that is wrong",
    "\\begin{aligned}",
    "~~",
    "Yes",
    "12,5",
    "otherwise",
    "could also be",
    "twelve",
    "не",
    "km",
    "½",
    "def f():",
    "<tool_call>",
    '{"name": "add", "arguments": {',
    "<<",
    "*a*",
    "[",
    "{",
]
LENGTH = 200_000
#: Grader → ground truths of the kinds that it reads in different ways.
TRUTHS = {
    "multiple_choice": ["A"],
    "countdown": ['{"numbers": [1, 2], "target": 3}'],
    "exact": ["A"],
    "json_schema": ['{"type": "object", "required": ["a"]}'],
    "tool_call": ['[{"name": "add", "arguments": {"a": 1}}]'],
    "ifeval": [
        json.dumps({"instruction_id_list": [name], "kwargs": [arguments]})
        for name, arguments in (
            ("length_constraints:number_words", {"relation": "at least", "num_words": 9}),
            ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 9}),
            ("detectable_format:title", {}),
            ("detectable_format:json_format", {}),
            ("detectable_format:number_highlighted_sections", {"num_highlights": 3}),
            ("keywords:existence", {"keywords": ["one", "two"]}),
        )
    ],
    "maths": ["12", "Yes", "A", r"\text{Monday}", "(1, 2)"],
}


def responses(number: int, length: int = LENGTH) -> list[str]:
    """Every single word, and `number` chains of two or three, repeated up to a length."""
    draw = random.Random(1)
    pieces = [*WORDS, *("".join(draw.choices(WORDS, k=draw.choice((2, 3)))) for _ in range(number))]
    repeated = [((piece + draw.choice(("", " "))) * length)[:length] for piece in pieces]
    return [text + draw.choice(("", "z")) for text in repeated]


def test_every_grader_is_swept() -> None:
    of_answers = {name for name in GRADERS if not is_scorer(name)}
    assert of_answers == set(TRUTHS), "add a ground truth for a new grader"
    assert not issubclass(SourceScorer, GradingPool)  # `auto` uses the others


@pytest.mark.parametrize("grader", TRUTHS)
def test_no_response_takes_a_grader_to_its_limit(grader: str) -> None:
    pool = GradingPool(grader, num_workers=1)
    try:
        draw = random.Random(2)
        texts = draw.sample(responses(20), 12)
        asked = [Sample(text, truth) for text in texts for truth in TRUTHS[grader]]
        grades = [grade for grade, _ in pool.grade_and_read(asked)]
        assert all(isinstance(grade, float) for grade in grades), grades
    finally:
        pool.close()


def test_what_the_trainer_reads_itself() -> None:
    """The text of a program and of thoughts is found in the trainer's process."""
    for text in random.Random(3).sample(responses(30), 6):
        assert len(program_of(text)) <= len(text)
        assert len(without_thoughts(text)) <= len(text)
