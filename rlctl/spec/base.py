"""Common parts of all sections of the spec."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def _null_word(value: Any) -> Any:
    """`rollout_is="null"`, as shell scripts write it, means null."""
    return None if isinstance(value, str) and value.strip().lower() in {"null", "none", ""} else value


_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def _duration(value: Any) -> Any:
    """A number means seconds.

    Raises:
        ValueError: neither a positive number nor one with a unit.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a time such as 90s, 30min or 2h")
    text = f"{value:g}s" if isinstance(value, int | float) else value.strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)?", text)
    if not found or not float(found[1]):
        raise ValueError("must be a time such as 90s, 30min or 2h")
    return found[1] + (found[2] or "s")


#: `90s`, `30min`, `2h`; a plain number is seconds.
Duration = Annotated[str, BeforeValidator(_duration)]


def seconds(duration: str) -> float:
    """The seconds of a `Duration`."""
    number = duration.rstrip("sminh")
    return float(number) * _UNITS[duration.removeprefix(number)]


def one_or_many(value: Any) -> Any:
    """A single name stands for a list of one."""
    return [value] if isinstance(value, str) else value


NullWord = BeforeValidator(_null_word)


def json_file(value: Any) -> Any:
    """The mapping in a JSON file, where a path is given for a mapping.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    if not isinstance(value, str):
        return value
    path = Path(value).expanduser()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return content


#: A mapping with any keys: `key.anything=value` sets one of them.
OpenMapping = dict[str, Any]
StrList = Annotated[list[str], BeforeValidator(one_or_many, json_schema_input_type=list[str] | str)]
