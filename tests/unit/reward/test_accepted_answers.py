"""A list of accepted answers means alternatives, for every built-in grader of answers."""

import json

import pytest

from rlctl.data.records import RowError, parse_answer, parse_row
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample, accepted_answers
from rlctl.reward.trial import check_ground_truths, known_responses

ALTERNATIVES = {
    "exact": (["cat", "a cat"], ["cat", "a cat"], ["dog", '["cat", "a cat"]']),
    "multiple_choice": (["A", "C. red"], ["The answer is A.", "\\boxed{C}"], ["B", "A or C", '["A", "C"]']),
    "maths": (["1/2", "7"], ["\\boxed{0.5}", "The answer is 7."], ["\\boxed{\\frac12, 7}", "8"]),
    "countdown": (
        ['{"numbers": [1, 2], "target": 3}', '{"numbers": [2, 4], "target": 8}'],
        ["1+2", "2*4"],
        ["1*2", "3"],
    ),
}


@pytest.mark.parametrize("grader", ALTERNATIVES)
def test_each_of_a_list_is_right(grader):
    answers, right, wrong = ALTERNATIVES[grader]
    pool = GradingPool(grader, num_workers=1)
    try:
        grades = pool.grade([Sample(text, json.dumps(answers)) for text in [*right, *wrong]])
    finally:
        pool.close()
    assert grades == [1.0] * len(right) + [0.0] * len(wrong)


def test_what_is_a_list():
    assert accepted_answers('["7", "8"]') == ("7", "8")
    for text in ("[2, 5)", "[2, 5]", "[]", "7", '{"a": ["7"]}', '["7", 8]', "[" * 100_000):
        assert accepted_answers(text) == (text,)


def test_lists_in_rows_become_lists_of_texts():
    def truth(value):
        row = {
            "data_source": "maths",
            "prompt": "q",
            "reward_model": {"style": "rule", "ground_truth": value},
        }
        return parse_row(row).ground_truth

    assert truth(["1/2", 0.5, 7.0]) == '["1/2", "0.5", "7"]'
    assert truth([7]) == truth("7") == "7"
    assert truth(["7", None, ""]) == "7"
    assert truth([None, ""]) == ""
    assert truth({"numbers": [1, 2], "target": 3}) == '{"numbers": [1, 2], "target": 3}'
    assert parse_answer(["Paris", "paris"], "answer") == '["Paris", "paris"]'
    assert parse_answer(["a", True], "label") == '["a", "True"]'
    with pytest.raises(RowError, match="an element of label is of type list"):
        parse_answer(["a", ["b"]], "label")


def test_each_alternative_is_checked_by_itself():
    fine, unreadable, wrong = check_ground_truths(
        [
            ("gsm8k", '["7", "8"]'),
            ("gsm8k", '["7", "this is a long sentence that is no answer"]'),
            ("mmlu", '["A", "zebra"]'),
        ]
    )
    assert fine == ""
    assert "this is a long sentence" in unreadable
    assert "zebra" in wrong
    assert known_responses("maths", '["7", "9"]') == ("\\boxed{7}", "\\boxed{8}")


def test_a_response_that_reaches_a_limit_is_wrong_where_a_list_is_accepted(monkeypatch):
    pool = GradingPool("maths", num_workers=1)
    try:
        slow = Failure("too slow", "time-out")
        grade = pool._grade
        first = iter([[(slow, None)]])
        monkeypatch.setattr(pool, "_grade", lambda *args, **more: next(first, None) or grade(*args, **more))
        [(failure, _)] = pool.grade_and_read([Sample("x", '["7", "8"]')])
        assert failure.score == 0.0
    finally:
        pool.close()
