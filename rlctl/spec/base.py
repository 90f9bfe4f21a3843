"""Base class, types and validators that all sections of the spec share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base class of all sections: frozen; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def _null_word(value: Any) -> Any:
    """Converts the texts `null`, `none` and "", which shell scripts pass, to None."""
    return None if isinstance(value, str) and value.strip().lower() in {"null", "none", ""} else value


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _duration(value: Any) -> Any:
    """Normalises a duration to text with a unit; a plain number is in seconds.

    Raises:
        ValueError: not a positive number with an optional unit (s, min, h).
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a time such as 90s, 30min or 2h")
    text = f"{value:g}s" if isinstance(value, int | float) else value.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)?", text)
    if not found or not float(found[1]):
        raise ValueError("must be a time such as 90s, 30min or 2h")
    return found[1] + (found[2] or "s")


#: `90s`, `30min` or `2h`; a plain number is in seconds.
Duration = Annotated[str, BeforeValidator(_duration)]


def seconds(duration: str) -> float:
    """Converts a `Duration` to seconds."""
    number = duration.rstrip("sminh")
    return float(number) * _UNITS[duration.removeprefix(number)]


def one_or_many(value: Any) -> Any:
    """Wraps a single text in a list; other values stay unchanged."""
    return [value] if isinstance(value, str) else value


NullWord = BeforeValidator(_null_word)


def aliases(names: dict[str, str]) -> BeforeValidator:
    """Translates other names of a value, for example those of verl."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


def json_file(value: Any) -> Any:
    """Reads the JSON object from a file if `value` is a path; other values stay unchanged.

    Raises:
        ValueError: the file cannot be read, or does not contain a JSON object.
    """
    if not isinstance(value, str):
        return value
    path = Path(value).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"this JSON file cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"this file is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return content


#: A mapping with arbitrary keys: `key.NAME=VALUE` sets one of them.
OpenMapping = dict[str, Any]
StrList = Annotated[list[str], BeforeValidator(one_or_many, json_schema_input_type=list[str] | str)]
