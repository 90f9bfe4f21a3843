"""One record as its column layout reads it, and the readers that all layouts share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlctl.data.checks import RowError, check_text, kind_of
from rlctl.data.read import extra_of
from rlctl.data.schema import Message

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedRecord:
    """The prompt and the answer of one record.

    Attributes:
        messages: the prompt, without what the recipe's options add.
        ground_truth: what the grader compares with.
        answer: the original answer.
        question: what is asked, where `messages` hold more than that (an instruction); "": all of them.
        data_source: named by the record itself.
        ability, style, extra: as in `Row`.
        index: the record's own number; None: its place in the input.
    """

    messages: tuple[Message, ...]
    ground_truth: str
    answer: str = ""
    question: str = ""
    data_source: str = ""
    ability: str = ""
    style: str = "rule"
    extra: Values = field(default_factory=dict)
    index: int | None = None


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


def text_of(value: Any) -> str:
    """The value as text: "" for null, JSON for what is not text.

    Raises:
        RowError: it is not valid UTF-8.
    """
    if value is None:
        return ""
    return check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def is_integer(value: Any) -> bool:
    """Whether it is a whole number, truth values not counted."""
    return isinstance(value, int) and not isinstance(value, bool)
