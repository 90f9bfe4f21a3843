"""Thoughts are not graded, whether the response or the prompt opens them."""

import re

import pytest

import rlctl
from rlctl.reward.build import LocalScorer
from rlctl.reward.code import program_of
from rlctl.reward.graders import countdown
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Sample
from rlctl.reward.thoughts import FORMATS, without_thoughts

TASK = '{"numbers": [25, 3, 4], "target": 88}'
#: The marks as text: `<\|end\|>` is `<|end|>`.
MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|channel|>commentary to=f <|constrain|>json<|message|>", "<|channel|>final<|message|>"),
]
#: Ends of prompts before the opening mark.
TURNS = [
    "",
    "<|im_start|>assistant\n",
    "<|start|>assistant",
    "<｜Assistant｜>",
    "[INST] 3*4? [/INST]",
    "Assistant: ",
]


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_what_follows_the_last_thoughts_is_read(opening, closing):
    thoughts = f"{opening}\nis it 12?\n"
    assert without_thoughts(f"{thoughts}{closing}13") == "13"
    assert without_thoughts(f"{thoughts}{closing}13 {thoughts}{closing}14") == "14"
    assert without_thoughts(f"is it 12?{closing}13") == "13"
    assert without_thoughts(thoughts) == ""
    assert without_thoughts(f"{thoughts}{closing}13 {thoughts}") == ""
    assert without_thoughts(f"Well. {thoughts}") == ""
    for turn in TURNS:
        prompt = f"{turn}{opening}\n"
        assert without_thoughts("is it 12?", prompt) == "", prompt
        assert without_thoughts("is it 12?", f"{prompt}Okay, so") == "", prompt
        assert without_thoughts(f"is it 12?{closing}13", prompt) == "13", prompt
        assert without_thoughts("13", f"{prompt}\n{closing}\n\n") == "13", prompt


@pytest.mark.parametrize(("opening", "closing"), MARKS)
def test_an_instruction_opens_no_thoughts(opening, closing):
    for said in (f"Reason in {opening} and {closing} tags.", f"Start with\n{opening} please.", "3*4?"):
        assert without_thoughts("13", f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n") == "13"


def test_a_mark_after_a_colon_ends_the_prompt():
    assert without_thoughts("13", "Question: 3*4?\nAnswer: <think>\n") == ""
    assert without_thoughts("13", "Reason in this format: <think> thoughts\nQuestion: 3*4?\nAnswer: ") == "13"


def test_every_format_is_tested():
    text = "".join(a + b for a, b in MARKS)
    assert all(re.search(mark, text, re.IGNORECASE) for pair in FORMATS[:-1] for mark in pair)


def test_marks_of_another_format_inside_thoughts_are_a_part_of_them():
    assert without_thoughts("<think>a <reasoning>b</reasoning> 12") == ""
    assert without_thoughts("<reasoning>a <think>b</think> 12") == ""
    assert without_thoughts("<think>a <reasoning> b</think>13") == "13"


def test_harmony_without_special_tokens():
    assert without_thoughts("analysisWe need 3*4.assistantfinalThe answer is 12.") == "The answer is 12."
    assert without_thoughts("analysisWe need 3*4. The answer is 12.") == ""
    assert without_thoughts("analysis of the sum: 12") == "analysis of the sum: 12"


@pytest.mark.parametrize(
    ("grader", "answer", "truth"),
    [("exact", "12", "12"), ("multiple_choice", "The answer is B.", "B"), ("countdown", "(25-3)*4", TASK)],
)
def test_graders_of_this_process(grader, answer, truth):
    asked = [
        Sample(answer, truth),
        Sample(answer, truth, "<|assistant|>\n<think>\n"),
        Sample(f"hm</think>{answer}", truth, "<|assistant|>\n<think>\n"),
        Sample(f"<reasoning>{answer}", truth),
    ]
    graded = LocalScorer(grader).grade_and_read(asked)
    assert [grade for grade, _ in graded] == [1.0, 0.0, 1.0, 0.0]
    assert [bool(read) for _, read in graded] == [True, False, True, False]


def test_graders_of_child_processes_and_their_answers():
    opened = "<|im_start|>assistant\n<think>\n"
    pool = GradingPool("maths", num_workers=1)
    try:
        asked = [
            Sample("So \\boxed{12}, let me check", "12", opened),
            Sample("So 13?</think>\\boxed{12}", "12", opened),
        ]
        assert pool.grade_and_read(asked) == [(0.0, None), (1.0, "12")]
    finally:
        pool.close()
    assert rlctl.grade(
        "maths", ["\\boxed{12}", "\\boxed{12}"], ["12", "12"], rows=[{"prompt": opened}, {}]
    ) == [0.0, 1.0]


def test_programs():
    block = "```python\nprint(1)\n```"
    assert program_of(f"<thinking>{block}</thinking>```python\nprint(2)\n```") == "print(2)\n"
    assert program_of(f"<seed:think>{block}") == ""
    assert program_of(Sample(block, "", "<|assistant|>\n<think>\n").without_thoughts().response) == ""


def test_direct_calls():
    assert countdown("[THINK](25-3)*4", TASK) == 0.0
