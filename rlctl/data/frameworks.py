"""Records as training frameworks keep them: verl's rows, TRL's, OpenRLHF's, and any prompt and answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlctl.data.checks import parse_answer, parse_messages
from rlctl.data.parsed_record import (
    ParsedRecord,
    Values,
    extra_info,
    is_integer,
    lookup,
    source_named,
    text_of,
)

#: The problem inside the instructions that DAPO-Math-17k puts around each.
_DAPO_PROBLEM = re.compile(r"\ASolve the following[^\n]*\n\n(.+?)\n\nRemember to put [^\n]*\Z", re.DOTALL)


def verl(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """verl's five columns; all of `extra_info` is kept."""
    reward_model = values.get("reward_model")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    extra = extra_info(values)
    return ParsedRecord(
        parse_messages(lookup(values, prompt_key)),
        _any_truth(lookup(values, answer_key), answer_key),
        answer=text_of(extra.get("answer")),
        question=text_of(extra.get("question")),
        data_source=source_named(values, "data_source"),
        ability=text_of(values.get("ability")),
        style=text_of(style) or "rule",
        extra=extra,
        index=_place(extra.get("index")),
    )


def dapo_math(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """verl's columns with the same instructions around every problem, which are not part of the question."""
    parsed = verl(values, prompt_key, answer_key)
    problem = _DAPO_PROBLEM.match(parsed.messages[-1].content)
    return replace(parsed, ability="math", question=problem[1] if problem else parsed.question)


def trl(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """A prompt and an answer column, and what other columns of ours there are."""
    parsed, extra = generic(values, prompt_key, answer_key), extra_info(values)
    return replace(
        parsed,
        answer=text_of(extra.get("answer")) or parsed.answer,
        question=text_of(extra.get("question")),
        data_source=source_named(values, "data_source") if "data_source" in values else "",
        ability=text_of(values.get("ability")),
        style=text_of(values.get("style")) or "rule",
        extra=extra,
        index=_place(extra.get("index")),
    )


def openrlhf(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """A prompt and a label, perhaps a `datasource`."""
    parsed = generic(values, prompt_key, answer_key)
    return replace(parsed, data_source=source_named(values, "datasource") if "datasource" in values else "")


def generic(values: Values, prompt_key: str, answer_key: str) -> ParsedRecord:
    """Any prompt and any answer."""
    prompt = parse_messages(lookup(values, prompt_key))
    answer = parse_answer(lookup(values, answer_key), f"column {answer_key!r}")
    return ParsedRecord(prompt, answer.strip(), answer=answer)


def _place(index: Any) -> int | None:
    return index if is_integer(index) and int(index) >= 0 else None


def _any_truth(value: Any, name: str) -> str:
    """A ground truth, which may be a list of one text, or structured: then as JSON text."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping | list) and value:
        value = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return parse_answer(value, name)
