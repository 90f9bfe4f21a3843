"""A data recipe in one file: a quiz whose questions have several choices and the number of the right one.

rlctl prepare-data parquet quiz.jsonl --recipe examples/custom_recipe.py:quiz --output data/quiz
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.parts import DATA_RECIPES, Layout, Message, Row, RowError


def read(values: Mapping[str, Any], prompt_key: str, answer_key: str) -> Row:
    """The row of one record; a RowError says why there is none."""
    choices = values["choices"]
    if values[answer_key] > len(choices):
        raise RowError(f"{answer_key} is {values[answer_key]}, of {len(choices)} choices")
    letters = "ABCDEFGHIJ"[: len(choices)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True)]
    question = Message("user", "\n".join([values[prompt_key], *lines]))
    truth = letters[values[answer_key] - 1]
    return Row("multiple_choice", (question,), truth, extra={"topic": values.get("topic", "")})


@DATA_RECIPES.register(label="Quiz")
def quiz() -> Layout:
    """Columns of the question and of the number of the right choice, and what follows every question."""
    instruction = 'End with "Answer: X", where X is the letter of the right choice.'
    return Layout(read, prompt_key="ask", answer_key="right", instruction=instruction)
