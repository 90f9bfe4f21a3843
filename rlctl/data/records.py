"""Parts of one record, as pure functions from raw values to checked ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import orjson

from rlctl.data.schema import OTHER, Message

Values = Mapping[str, Any]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class RowError(ValueError):
    """What is wrong with one row, without saying which."""


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """The prompt and the answer of one record."""

    messages: tuple[Message, ...]  # the prompt, without what the recipe's options add
    ground_truth: str  # what the grader compares with
    answer: str = ""  # the original answer
    #: what is asked, where `messages` hold more than that (an instruction); "": all of them
    question: str = ""
    data_source: str = ""  # named by the record itself
    #: ability, style, extra: as in `Row`
    ability: str = ""
    style: str = "rule"
    extra: Values = field(default_factory=dict)
    index: int | None = None  # the record's own number; None: its place in the input


def parse_messages(value: Any) -> tuple[Message, ...]:
    """A prompt as text, or as a list of {role, content} or of ShareGPT's {from, value}.

    Raises:
        RowError: it is missing, empty, or neither.
    """
    if value is None:
        raise RowError("the prompt is null")
    if isinstance(value, str):
        return (_message("user", value),)
    if not isinstance(value, list):
        raise RowError(f"the prompt is {kind_of(value)}, not text or a list of messages")
    if not value:
        raise RowError("the prompt has no messages")
    messages = []
    for turn in value:
        if not isinstance(turn, Mapping):
            raise RowError(f"a message of the prompt is {kind_of(turn)}, not {{role, content}}")
        if "from" in turn and "role" not in turn:
            role = turn["from"]
            role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else None
            messages.append(_message(role, turn.get("value")))
        else:
            messages.append(_message(turn.get("role"), turn.get("content")))
    return tuple(messages)


def _message(role: Any, content: Any) -> Message:
    if not isinstance(role, str) or not role:
        raise RowError("a message of the prompt has no role")
    if not isinstance(content, str):
        raise RowError(f"a message's content is {kind_of(content)}, not text")
    if not content.strip():
        raise RowError(f"the {role} message of the prompt is empty")
    return Message(check_text(role), check_text(content))


def parse_answer(value: Any, name: str) -> str:
    """An answer given as text or as a number.

    Raises:
        RowError: it is missing, empty, or something else.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value) if math.isfinite(value) else None
    if value is None:
        raise RowError(f"{name} is null")
    if not isinstance(value, str):
        raise RowError(f"{name} is {kind_of(value)}, not text or a number")
    if not value.strip():
        raise RowError(f"{name} is empty")
    return check_text(value)


def check_text(text: str) -> str:
    """The text itself, if UTF-8 can hold it.

    Raises:
        RowError: it has bytes that were not UTF-8, or half a surrogate pair.
    """
    if text.isascii():  # Python knows this without a search
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"not valid UTF-8 text at character {error.start}") from None
    return text


def text_of(value: Any) -> str:
    """The value as text: "" for null, JSON for what is not text.

    Raises:
        RowError: it is not valid UTF-8.
    """
    if value is None:
        return ""
    return check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def kind_of(value: Any) -> str:
    """The value's type, as an error names it."""
    return "null" if value is None else f"of type {type(value).__name__}"


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether it is a whole number, truth values not counted."""
    return isinstance(value, int) and not isinstance(value, bool)


def lookup(values: Values, key: str) -> Any:
    """The value of a column: by its name, by a path with dots, or of the first alternative there is.

    Raises:
        RowError: there is none; says which there are.
    """
    if key in values:
        return values[key]
    for name in key.split("|"):
        found: Any = values
        for part in [name] if name in values else name.split("."):
            if not isinstance(found, Mapping) or part not in found:
                break
            found = found[part]
        else:
            return found
    raise RowError(f"no column {key!r} (it has {', '.join(map(str, values)) or 'none'})")


def source_named(values: Values, column: str) -> str:
    """The data source a column names.

    Raises:
        RowError: it names none.
    """
    source = lookup(values, column)
    if not isinstance(source, str) or not source.strip():
        raise RowError(f"{column} is {'empty' if isinstance(source, str) else kind_of(source)}, not a name")
    return check_text(source)


def extra_info(values: Values) -> dict[str, Any]:
    """The record's `extra_info`, JSON-able; an `index` that is no number is kept under another name.

    Raises:
        RowError: a text in it is not valid UTF-8.
    """
    given = values.get("extra_info")
    extra = extra_of(given) if isinstance(given, Mapping) else {}
    if extra.get("index") is not None and not is_integer(extra["index"]):
        extra["original_index"] = extra.pop("index")
    try:
        orjson.dumps(extra)
    except TypeError:  # it is strict about more than text: let the slower check decide
        check_text(json.dumps(extra, ensure_ascii=False))
    return extra


def columns_of(values: Values, *names: str) -> dict[str, Any]:
    """The columns of these names that there are, JSON-able."""
    return extra_info({"extra_info": {name: values[name] for name in names if values.get(name) is not None}})


def extra_of(values: Values) -> dict[str, Any]:
    """`extra_info` as read from Parquet: JSON-able, the fields kept as JSON text merged back."""
    extra = {str(name): json_able(value) for name, value in values.items()}
    text = extra.get(OTHER)
    if isinstance(text, str):
        try:
            other = json.loads(text) if text else {}
        except ValueError:  # a field of that name in a file of another program
            other = None
        if isinstance(other, dict):
            del extra[OTHER]
            return extra | other
    return extra


def json_able(value: Any) -> Any:
    """The value in JSON's types; what has none (dates, decimals, bytes) as text."""
    if isinstance(value, Mapping):
        return {str(name): json_able(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
