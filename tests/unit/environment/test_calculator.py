"""The calculator of the examples, and the questions that show its calls."""

from __future__ import annotations

import json
import re

import pytest

from examples.calculator import Calculator
from examples.calculator_questions import SHOWN, rows
from rlctl.environment.user_class import tool_schemas


def test_it_computes_and_refuses_all_else() -> None:
    calculator = Calculator()
    for expression, value in SHOWN:
        assert calculator.calculate(expression) == str(value)
    assert calculator.calculate("2 + 3 * 4 - 1") == "13"
    for expression in ("2 ** 9", "__import__('os')", "1 / 2", "10 ** 10", "9999999999"):
        with pytest.raises(ValueError, match="only whole numbers"):
            calculator.calculate(expression)


def test_questions_show_calls_that_the_class_takes_and_none_occurs_twice() -> None:
    [tool] = tool_schemas(Calculator)
    found = rows()
    assert len({row.question for row in found}) == len(found)
    for row in found[:5]:
        roles = [message.role for message in row.prompt]
        assert roles == ["user", "assistant", "tool", "assistant"] * len(SHOWN) + ["user"]
        asked = [re.sub(r"What is (.*)\?", r"\1", message.content) for message in row.prompt[::4]]
        for question, call, output, answer in zip(
            asked, *(row.prompt[1 + i :: 4] for i in range(3)), strict=False
        ):
            written = json.loads(re.fullmatch("<tool_call>(.*)</tool_call>", call.content)[1])
            assert written["name"] == tool["function"]["name"]
            assert written["arguments"] == {"expression": question}
            assert Calculator().calculate(question) == output.content == answer.content
        assert Calculator().calculate(asked[-1]) == row.ground_truth
