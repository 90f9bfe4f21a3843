"""What one row must satisfy, as pure functions from raw values to typed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlctl.data.schema import Message

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class RowError(ValueError):
    """What is wrong with one row, without saying which."""


def parse_messages(value: Any) -> tuple[Message, ...]:
    """A prompt as text, or as a list of {role, content}.

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
    return tuple(_parse_message(message) for message in value)


def _parse_message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(f"a message of the prompt is {kind_of(value)}, not {{role, content}}")
    if "from" in value and "role" not in value:  # ShareGPT's names
        said = value["from"]
        return _message(
            _SHAREGPT_ROLES.get(said, said) if isinstance(said, str) else None, value.get("value")
        )
    return _message(value.get("role"), value.get("content"))


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
    if text.isascii():  # known without looking, unlike the rest
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"not valid UTF-8 text at character {error.start}") from None
    return text


def kind_of(value: Any) -> str:
    """The value's type, as an error names it."""
    return "null" if value is None else f"of type {type(value).__name__}"
