"""Common parts of all sections of the spec."""

from __future__ import annotations

import json
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
