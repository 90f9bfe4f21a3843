"""The column layouts data sets come in, and how each is recognised by one record.

All of them name the columns they read, so that `--prompt-key` and `--answer-key` work with each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlctl.data import frameworks, tasks
from rlctl.data.parsed_record import ParsedRecord, Values
from rlctl.data.schema import GSM8K_SOURCE

RecipeName = Literal[
    "gsm8k",
    "math",
    "aime",
    "dapo-math",
    "countdown",
    "multiple-choice",
    "verl",
    "trl",
    "openrlhf",
    "generic",
]

BOX_INSTRUCTION = r"Think step by step, and put the final answer in \boxed{}."


@dataclass(frozen=True, slots=True)
class Layout:
    """One column layout.

    Attributes:
        about: what it is, in one line.
        prompt_key, answer_key: columns read; a dot reaches inside, `|` separates alternatives.
        recognises: whether a record looks like it.
        read: (record, prompt_key, answer_key) → what it asks; raises RowError.
        data_source: of its rows where the record names none; "": the file's name.
        instruction: put after the question unless the user says otherwise.
    """

    about: str
    prompt_key: str
    answer_key: str
    recognises: Callable[[Values], bool]
    read: Callable[[Values, str, str], ParsedRecord]
    data_source: str = ""
    instruction: str = ""


def _has(values: Values, *names: str) -> bool:
    return all(name in values for name in names)


def _is_verl(values: Values) -> bool:
    return _has(values, "prompt", "data_source") and isinstance(values.get("reward_model"), Mapping)


def _is_dapo_math(values: Values) -> bool:
    return _is_verl(values) and str(values["data_source"]).startswith("math_dapo")


def _is_multiple_choice(values: Values) -> bool:
    choices = values.get("choices") or values.get("options")
    answered = any(name in values for name in ("answer", "answerKey", "answer_idx"))
    return "question" in values and isinstance(choices, list | Mapping) and answered


def _is_aime(values: Values) -> bool:
    return "problem" in values and isinstance(values.get("answer"), str | int | float)


def _is_trl(values: Values) -> bool:
    return "prompt" in values and any(name in values for name in ("ground_truth", "solution", "label"))


#: By name, the more particular first: `auto` takes the first that recognises the record.
LAYOUTS: dict[RecipeName, Layout] = {
    "gsm8k": Layout(
        "worked solutions ending in '#### 72'",
        "question",
        "answer",
        lambda values: "question" in values and tasks.ANSWER_MARK in str(values.get("answer")),
        tasks.gsm8k,
        GSM8K_SOURCE,
        'Think step by step, and put the final number on a last line after "####".',
    ),
    "dapo-math": Layout(
        "DAPO-Math-17k: verl's columns, the instruction already in the prompt",
        "prompt",
        "reward_model.ground_truth",
        _is_dapo_math,
        frameworks.dapo_math,
        "math_dapo",
    ),
    "verl": Layout("verl's columns", "prompt", "reward_model.ground_truth", _is_verl, frameworks.verl),
    "countdown": Layout(
        "numbers that must give a target",
        "nums|numbers",
        "target",
        lambda values: _has(values, "target") and isinstance(values.get("nums", values.get("numbers")), list),
        tasks.countdown,
        "countdown",
        "Use only +, -, * and /, and each number exactly once. Think step by step, and put the equation in "
        "<answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>.",
    ),
    "multiple-choice": Layout(
        "a question with choices; the answer is a letter",
        "question",
        "answer|answerKey|answer_idx",
        _is_multiple_choice,
        tasks.multiple_choice,
        "multiple_choice",
        'Think step by step, and end with "Answer: X", where X is the letter of the right choice.',
    ),
    "math": Layout(
        r"solutions with a \boxed{} answer, as in MATH",
        "problem",
        "solution",
        lambda values: "problem" in values and r"\boxed" in str(values.get("solution")),
        tasks.math,
        "DigitalLearningGmbH/MATH-lighteval",
        BOX_INSTRUCTION,
    ),
    "aime": Layout(
        "a problem and its final answer, as in AIME and AMC",
        "problem",
        "answer",
        _is_aime,
        tasks.problem_and_answer,
        instruction=BOX_INSTRUCTION,
    ),
    "openrlhf": Layout(
        "OpenRLHF's input and label",
        "input|context_messages|prompt",
        "label|answer",
        lambda values: "label" in values and ("input" in values or "context_messages" in values),
        frameworks.openrlhf,
    ),
    "trl": Layout(
        "TRL's prompt-only rows with an answer column",
        "prompt",
        "ground_truth|solution|answer|label",
        _is_trl,
        frameworks.trl,
    ),
    "generic": Layout(
        "any prompt and answer column",
        "prompt|question|problem",
        "answer",
        lambda _: True,
        frameworks.generic,
    ),
}
