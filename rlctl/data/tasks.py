"""Records of well-known kinds of data set: worked solutions, numbers and a target, choices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rlctl.data.checks import RowError, kind_of, parse_answer, parse_messages
from rlctl.data.parsed_record import ParsedRecord, Values, columns_of, is_integer, lookup
from rlctl.data.schema import Message

ANSWER_MARK = "####"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^a-zA-Z\s])|\\(?:boxed|fbox)\s+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def gsm8k(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """A worked solution that ends in `#### number`."""
    answer = parse_answer(lookup(values, answer_key), f"column {answer_key!r}")
    return ParsedRecord(
        parse_messages(lookup(values, prompt_key)), _marked_number(answer), answer=answer, ability="math"
    )


def _marked_number(answer: str) -> str:
    """The number after the last `####`, without its thousands separators."""
    _, mark, tail = answer.rpartition(ANSWER_MARK)
    number = tail.strip().replace(",", "")
    if not mark:
        raise RowError(f"the answer has no {ANSWER_MARK!r}")
    try:
        finite = Decimal(number).is_finite()
    except InvalidOperation:
        finite = False
    if not finite:
        raise RowError(f"what follows {ANSWER_MARK!r} is not a number: {tail.strip()[:50]!r}")
    return number


def math(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    r"""A worked solution with its answer in `\boxed{}`."""
    solution = parse_answer(lookup(values, answer_key), f"column {answer_key!r}")
    return ParsedRecord(
        parse_messages(lookup(values, prompt_key)),
        last_boxed(solution),
        answer=solution,
        ability="math",
        extra=columns_of(values, "level", "type", "subject"),
    )


def problem_and_answer(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """A mathematical problem and its final answer, without the way there."""
    answer = parse_answer(lookup(values, answer_key), f"column {answer_key!r}")
    prompt = parse_messages(lookup(values, prompt_key))
    extra = columns_of(values, "level", "type", "subject", "year")
    return ParsedRecord(prompt, answer.strip(), answer=answer, ability="math", extra=extra)


def countdown(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """Numbers, and a target to reach with them; the ground truth is both, as JSON."""
    numbers, target = lookup(values, prompt_key), lookup(values, answer_key)
    if not isinstance(numbers, list) or not numbers or not all(map(is_integer, numbers)):
        raise RowError(f"column {prompt_key!r} is not a list of whole numbers")
    if not is_integer(target):
        raise RowError(f"column {answer_key!r} is {kind_of(target)}, not a whole number")
    question = f"Using the numbers {numbers}, create an equation that equals {target}."
    truth = json.dumps({"numbers": numbers, "target": target})
    return ParsedRecord((Message("user", question),), truth, answer=str(target), ability="math")


def multiple_choice(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """A question with choices, which get letters; the ground truth is the right one's."""
    labels, texts = _choices(lookup(values, "choices|options"))
    question = parse_messages(lookup(values, prompt_key))
    place = _chosen(lookup(values, answer_key), labels, texts)
    lettered = "\n".join(f"{LETTERS[i]}. {text}" for i, text in enumerate(texts))
    last = question[-1]
    return ParsedRecord(
        (*question[:-1], Message(last.role, f"{last.content}\n\n{lettered}")),
        LETTERS[place],
        answer=texts[place],
        extra=columns_of(values, "subject", "category"),
    )


def _choices(value: Any) -> tuple[list[str], list[str]]:
    """Labels and texts, given as a list of texts, as {text, label} lists or as {label: text}."""
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), list):
            texts, labels = value["text"], value.get("label")
        else:
            labels = [label for label, text in value.items() if text is not None]  # a struct has nulls
            texts = [value[label] for label in labels]
    else:
        texts, labels = value, None
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS):
        raise RowError(f"the choices are not a list of 2 to {len(LETTERS)} texts")
    if labels is None:
        labels = list(LETTERS[: len(texts)])
    if not isinstance(labels, list) or len(labels) != len(texts):
        raise RowError("the choices have not one label each")
    return [str(label) for label in labels], [parse_answer(text, "a choice") for text in texts]


def _chosen(answer: Any, labels: Sequence[str], texts: Sequence[str]) -> int:
    """Place of the right choice, named by its label, its number from 0, or its whole text."""
    if is_integer(answer):
        if 0 <= answer < len(texts):
            return int(answer)
        raise RowError(f"the answer is choice {answer}, counted from 0, of {len(texts)}")
    text = parse_answer(answer, "the answer").strip()
    for names in (labels, texts):
        if list(names).count(text) == 1:
            return list(names).index(text)
    if text.isdecimal() and int(text) < len(texts):
        return int(text)
    raise RowError(f"the answer {text[:50]!r} is none of the choices {', '.join(labels)}")


def last_boxed(solution: str) -> str:
    r"""What stands in the last `\boxed{…}` or `\fbox{…}`, braces balanced; `\boxed 2` has none.

    Raises:
        RowError: there is no box, it never ends, or it is empty.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise RowError(r"the solution has no \boxed{}")
    start = boxes[-1].end()
    if solution[start : start + 1] == "{":
        content = solution[start + 1 : _closing(solution, start)]
    else:
        content = re.split(r"[\s$]", solution[start:], maxsplit=1)[0]
    if not content.strip():
        raise RowError(r"the last \boxed{} of the solution is empty")
    return content.strip()


def _closing(text: str, start: int) -> int:
    """Place of the brace that closes the one at `start`."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise RowError(r"the last \boxed{ of the solution is never closed")
