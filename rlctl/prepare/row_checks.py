"""Checks of single rows: stray characters, no answer format in the prompt, a contradicted ground truth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import lru_cache

from rlctl.data.schema import Row
from rlctl.reward.build import grader_for, knows_source

#: Kind of a finding about rows, and a detail about this row.
Doubt = tuple[str, str]

STYLES = {"rule", "model", "code"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Matches instructions that specify the place or the format of the answer.
_FORM = re.compile(
    r"\\(?:boxed|fbox)|\bboxed\b|####|</?answer>|\banswer\b[\"'*]*\s*(?::|is\b)"
    r"|\bfinal (?:answer|result|number)\b"
    r"|\banswer (?:in|inside|within|after|as|should|must|on)\b"
    r"|\b(?:put|write|state|report|return|output|end|finish)\b[^.?!\n]{0,60}\banswer\b",
    re.IGNORECASE,
)
#: GSM8K's annotation of a calculation: <<3+4=7>>.
_CALCULATION = re.compile(r"<<[^<>\n]*=\s*([^<>=\n]+?)\s*>>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)


def text_doubts(row: Row) -> Iterator[Doubt]:
    """Yields doubts about control characters and U+FFFD replacement characters."""
    texts = [row.ground_truth, *(message.content for message in row.prompt)]
    if found := next(filter(None, map(_CONTROL.search, texts)), None):
        yield "control-characters", f"U+{ord(found[0]):04X}"
    if any("\ufffd" in text for text in texts):
        yield "lost-characters", ""


def answer_doubts(row: Row) -> list[Doubt]:
    """Doubts about a prompt without an answer format and a ground truth that contradicts its solution."""
    doubts: list[Doubt] = []
    if row.style == "rule" and grader_for(row.data_source) == "maths" and not specifies_answer_form(row):
        known = knows_source(row.data_source)
        doubts.append(("no-answer-form" if known else "no-answer-form-unknown", ""))
    if detail := contradiction(row):
        doubts.append(("contradicted-answer", detail))
    return doubts


def specifies_answer_form(row: Row) -> bool:
    """Whether the prompt specifies the place or format of the answer, such as a box."""
    for message in reversed(row.prompt):
        before, question, after = message.content.partition(row.question)
        if _names_form(after) or _names_form(before) or (question and _FORM.search(question)):
            return True
    return False


@lru_cache(maxsize=1024)  # most rows have the same instruction
def _names_form(instruction: str) -> bool:
    return _FORM.search(instruction) is not None


def contradiction(row: Row) -> str:
    """Describes how the ground truth contradicts the last annotated calculation; "" if it does not.

    A ground truth also agrees if it is the calculated number rounded to fewer decimals, or if it occurs in
    the text after the calculation.
    """
    place = row.answer.rfind("<<")
    found = _CALCULATION.match(row.answer, place) if place >= 0 else None
    if found is None:
        return ""
    try:
        calculated, truth = (
            Decimal(text.replace(",", "").strip(" $%")) for text in (found[1], row.ground_truth)
        )
        if not (calculated.is_finite() and truth.is_finite()):
            return ""
        exponent = truth.as_tuple().exponent
    except InvalidOperation:  # one of them is not a number
        return ""
    unit = Decimal(1).scaleb(min(0, int(exponent)))
    if calculated == truth or (calculated % unit and abs(calculated - truth) < unit):
        return ""
    rest = row.answer[found.end() :].partition("####")[0].replace(",", "")
    if any(Decimal(number) == abs(truth) for number in _NUMBER.findall(rest)):
        return ""
    return f"{found[0]} and {row.ground_truth}"
