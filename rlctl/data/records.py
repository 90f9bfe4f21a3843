"""Pure functions that check and convert the values of one record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

import orjson

from rlctl.data.schema import OTHER, Message, Row
from rlctl.errors import UsageError

Values = Mapping[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "function_call": "assistant",
    "observation": "tool",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "bard", "bing", "model"), "assistant"),
}


class RowError(ValueError):
    """An error in a row; the message does not name the row."""


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Parses a prompt: text, or a list of {role, content} or of ShareGPT's {from, value}, or one of them.

    Content is text, or a list of parts of text (joined by line breaks). Tool calls of a reply become text of
    it, `<tool_call>{"name": …, "arguments": …}</tool_call>`.

    Raises:
        RowError: the prompt is missing, empty, or of another form.
    """
    if value is None:
        raise RowError("the prompt is null")
    if isinstance(value, str):
        return (_message("user", value),)
    if isinstance(value, Mapping) and {"role", "from"} & value.keys():
        value = [value]
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
            messages.append(_message(turn.get("role"), turn.get("content"), turn.get("tool_calls")))
    return tuple(messages)


def _message(role: Any, content: Any, calls: Any = None) -> Message:
    if not isinstance(role, str) or not role:
        raise RowError("a message of the prompt has no role")
    if isinstance(content, list):
        content = "\n".join(map(_part, content))
    if calls is not None and len(calls):
        content = "\n".join(filter(None, [content, *map(_call_text, calls)]))
    if not isinstance(content, str):
        raise RowError(f"a message's content is {kind_of(content)}, not text")
    if not content.strip():
        raise RowError(f"the {role} message of the prompt is empty")
    return Message(check_text(role), check_text(content))


def _call_text(call: Any) -> str:
    """A tool call in the form of chat completions, as text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise RowError("a tool call of the prompt is not {function: {name, arguments}}")
    written = {"name": name, "arguments": _without_nulls(json_able(arguments))}
    return f"<tool_call>{json.dumps(written, ensure_ascii=False)}</tool_call>"


def episode_columns(values: Values) -> dict[str, Any]:
    """The columns `environment` (a name) and `tools` (schemas, or their JSON text) that are not null.

    Raises:
        RowError: they have another form.
    """
    found: dict[str, Any] = {}
    if (name := values.get("environment")) is not None and name != "":
        if not isinstance(name, str):
            raise RowError(f"environment is {kind_of(name)}, not a name")
        found["environment"] = check_text(name)
    if (tools := values.get("tools")) is not None and tools != "":
        try:
            tools = json.loads(tools) if isinstance(tools, str) else _without_nulls(json_able(tools))
        except ValueError:
            raise RowError("tools is not JSON") from None
        if not isinstance(tools, list) or not all(map(_is_schema, tools)):
            raise RowError("tools is not a list of {type: function, function: {name, …}}")
        found |= {"tools": tools} if tools else {}
    return found


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _without_nulls(value: Any) -> Any:
    """The value without fields that are null, which Parquet adds where records have different fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _part(part: Any) -> str:
    """The text of one part of a message's content."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
    raise RowError(f"a part of a message's content is {kind}, not text")


def check_last_turn(prompt: Sequence[Message], *, continue_final_message: bool = False) -> None:
    """Refuses a prompt that ends with a reply, unless the response is to continue it after another message.

    Raises:
        RowError: the prompt is refused.
    """
    if prompt[-1].role != "assistant" or (continue_final_message and len(prompt) > 1):
        return
    raise RowError(
        "the prompt ends with a reply of the assistant, which would show the model an answer; "
        "only with continue_final_message does the response continue it"
    )


def parse_answer(value: Any, name: str) -> str:
    """Parses an answer: text or a number; 7.0 becomes 7, because integers with nulls are often stored so.

    A list of one answer is that answer. A missing answer is "".

    Raises:
        RowError: the answer is of another type.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float):
        value = None if not math.isfinite(value) else int(value) if value.is_integer() else value
    if is_integer(value) or isinstance(value, float):
        value = str(value)
    elif isinstance(value, Decimal):
        value = f"{value:f}"
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError(f"{name} is {kind_of(value)}, not text or a number")
    return check_text(value) if value.strip() else ""


def given_answer(value: Any, name: str) -> str:
    """As `parse_answer`, but raises a RowError for a missing answer."""
    if answer := parse_answer(value, name):
        return answer
    raise RowError(f"{name} is {'null' if value is None else 'empty'}")


def parse_row(
    values: Values, prompt_key: str = "prompt", answer_key: str = "reward_model.ground_truth"
) -> Row:
    """Parses a record with verl's columns; its ground truth is "" if it is missing.

    A structured ground truth (verl's Countdown files) becomes JSON text.

    Raises:
        RowError: a column is missing or has an invalid value.
    """
    truth = lookup(values, answer_key)
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if isinstance(truth, Mapping | list) and truth:
        truth = json.dumps(json_able(truth), ensure_ascii=False, sort_keys=True)
    reward_model, extra = values.get("reward_model"), values.get("extra_info")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    extra = (extra_of(extra) if isinstance(extra, Mapping) else {}) | episode_columns(values)
    return Row(
        data_source=source_named(values, "data_source"),
        prompt=parse_messages(lookup(values, prompt_key)),
        ground_truth=parse_answer(truth, answer_key),
        ability=text_of(values.get("ability")),
        style=text_of(style) or "rule",
        split=text_of(extra.get("split")),
        question=text_of(extra.get("question")),
        answer=text_of(extra.get("answer")),
        extra=extra,
    )


def check_text(text: str) -> str:
    """Returns the text unchanged if it can be encoded as UTF-8.

    Raises:
        RowError: it contains a lone surrogate, for example from bytes that were not UTF-8.
    """
    if text.isascii():  # takes constant time
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"not valid UTF-8 text at character {error.start}") from None
    return text


def text_of(value: Any) -> str:
    """Converts a value to text: "" for null, JSON for values that are not text.

    Raises:
        RowError: it is not valid UTF-8.
    """
    if value is None:
        return ""
    return check_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def kind_of(value: Any) -> str:
    """The value's type, for error messages."""
    return "null" if value is None else f"of type {type(value).__name__}"


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def lookup(values: Values, key: str) -> Any:
    """Returns the value of a column, given by name, dotted path, or alternatives (the first that exists).

    Raises:
        RowError: there is no such column; lists the existing ones.
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
    wanted = " or ".join(map(repr, key.split("|")))
    raise RowError(f"no column {wanted} (it has {', '.join(map(str, values)) or 'none'})")


def check_columns(names: Sequence[str], where: str) -> None:
    """Refuses two columns of one name; several without a name are allowed.

    Raises:
        UsageError: a name occurs twice.
    """
    if repeated := next((name for name in names if name and names.count(name) > 1), None):
        what = f"the header names the column {repeated!r} twice"
        raise UsageError(what, where=where, fix="rename one of them")


def source_named(values: Values, column: str) -> str:
    """Returns the data source in a column.

    Raises:
        RowError: the column is missing, empty or not text.
    """
    source = lookup(values, column)
    if not isinstance(source, str) or not source.strip():
        raise RowError(f"{column} is {'empty' if isinstance(source, str) else kind_of(source)}, not a name")
    return check_text(source)


def checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns fields for `extra_info` that can be written.

    An `index` that is not an integer from 0 to 2⁶³ − 1 is renamed to `original_index`.

    Raises:
        RowError: a text in it is not valid UTF-8.
    """
    index = extra.get("index")
    if index is not None and not (is_integer(index) and 0 <= index < 1 << 63):
        extra["original_index"] = extra.pop("index")
    try:
        orjson.dumps(extra)
    except TypeError:  # orjson refuses more than invalid text: the slower check decides
        check_text(json.dumps(extra, ensure_ascii=False))
    return extra


def columns_of(values: Values, *names: str) -> dict[str, Any]:
    """Returns the columns of these names that are not null, as JSON types."""
    return checked_extra(extra_of({name: values[name] for name in names if values.get(name) is not None}))


def extra_of(values: Values) -> dict[str, Any]:
    """Converts `extra_info` from Parquet to JSON types; merges the fields that are stored as JSON text."""
    extra = {str(name): json_able(value) for name, value in values.items()}
    text = extra.get(OTHER)
    if isinstance(text, str):
        try:
            other = json.loads(text) if text else {}
        except ValueError:  # a file of another program with a field of this name
            other = None
        if isinstance(other, dict):
            del extra[OTHER]
            return extra | other
    return extra


def json_able(value: Any) -> Any:
    """Converts a value to JSON types; values without one (dates, decimals, bytes) become text."""
    if isinstance(value, Mapping):
        return {str(name): json_able(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)
