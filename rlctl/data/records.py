"""Pure functions that check and convert the values of one record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeGuard

import orjson

from rlctl.data.literals import answer_in, conversation_in
from rlctl.data.schema import OTHER, PLACE, Message, Row
from rlctl.errors import UsageError

Values = Mapping[str, Any]
#: Columns of the row schema, which do not become fields of `extra_info`.
ROW_COLUMNS = frozenset(
    {"data_source", "prompt", "ability", "reward_model", "extra_info", "environment", "tools", PLACE}
)
_MEDIA = re.compile(
    r"(?:\w+_)?(?:image|img|picture|photo|video|audio)s?(?:_?\d{1,2})?"
    r"(?:_(?:url|path|file|file_?name|byte|data|base64|b64)s?)?|pixel_values",
    re.IGNORECASE,
)
#: How files of pictures, sound and videos begin, as bytes and as text.
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"ID3", b"OggS", b"fLaC")
_DATA_URLS = ("data:image/", "data:video/", "data:audio/")

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

    Content is text, or a list of parts of text (joined by line breaks). A conversation may be stored as text,
    JSON or Python. Tool calls of a reply are kept for the chat template.

    Raises:
        RowError: the prompt is missing, empty, or of another form.
    """
    if value is None:
        raise RowError("the prompt is null")
    if isinstance(value, str):
        try:
            conversation = conversation_in(value)
        except ValueError as error:
            raise RowError(f"the prompt is {error}") from None
        if conversation is None:
            return (_message("user", {"content": value}),)
        value = conversation
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
            messages.append(_message(role, {"content": turn.get("value")}))
        else:
            messages.append(_message(turn.get("role"), turn))
    return tuple(messages)


def _message(role: Any, turn: Mapping[str, Any]) -> Message:
    content = turn.get("content")
    if not isinstance(role, str) or not role:
        raise RowError("a message of the prompt has no role")
    if len(turn) > len(("role", "content")) and (name := _media_field(turn)) is not None:
        raise RowError(f"the field {name!r} of a message has pictures, videos or sound: only text is read")
    if isinstance(content, list):
        content = "\n".join(map(_part, content))
    fields = _fields_of(role, turn)
    if content is None and fields.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise RowError(f"a message's content is {kind_of(content)}, not text")
    if not content.strip() and not fields.get("tool_calls"):
        raise RowError(f"the {role} message of the prompt is empty")
    other = json.dumps(fields, ensure_ascii=False) if fields else ""
    return Message(check_text(role), check_text(content), check_text(other))


def _fields_of(role: str, turn: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a message besides its content: tool calls, and what a tool's output answers."""
    stored = turn.get(OTHER)
    if isinstance(stored, str) and stored:
        try:
            turn = {**turn, **json.loads(stored)}
        except (ValueError, TypeError):
            raise RowError(f"the field {OTHER!r} of a message is not JSON") from None
    calls = turn.get("tool_calls")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls) if calls else None
        except ValueError:
            raise RowError("tool_calls of a message is not JSON") from None
    fields: dict[str, Any] = {}
    if isinstance(calls, list) and calls:
        fields["tool_calls"] = list(map(_call, calls))
    elif calls:
        raise RowError(f"tool_calls of a message is {kind_of(calls)}, not a list")
    if role == "tool":
        fields |= {name: turn[name] for name in ("name", "tool_call_id") if isinstance(turn.get(name), str)}
    return fields


def _call(call: Any) -> dict[str, Any]:
    """A tool call in the form of chat completions, with its arguments as a mapping."""
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
    called = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**called, "type": "function", "function": written}


def episode_columns(values: Values) -> dict[str, Any]:
    """The columns `environment` (a name) and `tools` (schemas, or their JSON text) that are not null.

    Raises:
        RowError: they have another form.
    """
    columns: dict[str, Any] = {}
    name = values.get("environment")
    if name is not None and name != "":
        if not isinstance(name, str):
            raise RowError(f"environment is {kind_of(name)}, not a name")
        columns["environment"] = check_text(name)
    tools = values.get("tools")
    if tools is not None and tools != "":
        try:
            tools = json.loads(tools) if isinstance(tools, str) else _without_nulls(json_able(tools))
        except ValueError:
            raise RowError("tools is not JSON") from None
        if not isinstance(tools, list) or not all(map(_is_schema, tools)):
            raise RowError("tools is not a list of {type: function, function: {name, …}}")
        columns |= {"tools": tools} if tools else {}
    return columns


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _without_nulls(value: Any) -> Any:
    """The value without fields that are null, which Parquet adds where records have different fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _part(content: Any) -> str:
    """The text of one part of a message's content."""
    text = content.get("text") if isinstance(content, Mapping) else content
    kind = content.get("type") if isinstance(content, Mapping) else kind_of(content)
    if isinstance(text, str) and (not isinstance(content, Mapping) or kind is None or "text" in str(kind)):
        return text
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


def parse_answer(value: Any, name: str, *, reads_literals: bool = True) -> str:
    """Parses an answer: text, a number, a bool, or a list of them; a missing answer is "".

    7.0 becomes 7, because integers with nulls are often stored so. A list of one answer is that answer; one
    of several means alternatives, and becomes the JSON text of a list of texts. With `reads_literals` lists
    may be stored as text, see `literals.answer_in`.

    Raises:
        RowError: the answer is of another type, or NaN or infinite.
    """
    if isinstance(value, str) and reads_literals:
        try:
            value = answer_in(value)
        except ValueError as error:
            fix = "write JSON, or name the column of the answer itself"
            raise RowError(f"{name} is {error}: {fix}") from None
    if isinstance(value, list | tuple):
        texts = [_scalar_text(item, f"an element of {name}") for item in value]
        texts = [text for text in texts if text.strip()]
        value = json.dumps(texts, ensure_ascii=False) if len(texts) > 1 else "".join(texts)
    text = _scalar_text(value, name)
    return check_text(text) if text.strip() else ""


def _scalar_text(value: Any, name: str) -> str:
    """The text of one answer."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{name} is {value}, not a number")
        value = int(value) if value.is_integer() else value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if value is None:
        return ""
    if isinstance(value, Mapping) and value:
        fields = ", ".join(list(map(str, value))[:5])
        raise RowError(f"{name} has the fields {fields}: name one of them, as in --answer-key COLUMN.FIELD")
    if not isinstance(value, str):
        raise RowError(f"{name} is {kind_of(value)}, not text, a number or a list of them")
    return value


def given_answer(value: Any, name: str) -> str:
    """As `parse_answer`, but raises a RowError for a missing answer; a text stays as it is."""
    answer = parse_answer(value, name, reads_literals=False)
    if answer:
        return answer
    raise RowError(f"{name} is {'null' if value is None else 'empty'}")


def parse_row(
    values: Values,
    prompt_key: str = "prompt",
    answer_key: str = "reward_model.ground_truth",
    *,
    number: int = 0,
    where: str = "",
) -> Row:
    """Parses a record with verl's columns; its ground truth is "" if it is missing.

    A structured ground truth (verl's Countdown files) becomes JSON text; a list of answers is as in
    `parse_answer`. All fields of `extra_info` are kept, and other columns join them. `number`: index of a row
    that has none of its own; `where`: its origin.

    Raises:
        RowError: a column is missing or has an invalid value.
    """
    check_media(values)
    truth = lookup(values, answer_key)
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if truth and (isinstance(truth, Mapping) or _is_nested(truth)):
        truth = json.dumps(json_able(truth), ensure_ascii=False, sort_keys=True)
    reward_model = values.get("reward_model")
    extra = values.get("extra_info")
    style = reward_model.get("style") if isinstance(reward_model, Mapping) else None
    extra = extra_of(extra) if isinstance(extra, Mapping) else {}
    names = (name for name in values if name not in ROW_COLUMNS)
    extra = with_columns(extra, values, names) | episode_columns(values)
    index = extra.get("index")
    return Row(
        data_source=source_named(values, "data_source"),
        prompt=parse_messages(lookup(values, prompt_key)),
        ground_truth=parse_answer(truth, answer_key),
        ability=text_of(values.get("ability")),
        style=text_of(style) or "rule",
        split=text_of(extra.get("split")),
        question=text_of(extra.get("question")),
        answer=text_of(extra.get("answer")),
        index=index if is_integer(index) else number,
        extra=extra,
        where=where,
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, list | Mapping) for item in value)


def check_media(values: Values) -> None:
    """Refuses a record with pictures, videos or sound, of which training would read nothing.

    Raises:
        RowError: it has such a column: by its name, in the form that `datasets` stores files in, as bytes or
            as `data:` URLs.
    """
    name = _media_field(values)
    extra = values.get("extra_info")
    if name is None and isinstance(extra, Mapping) and (own := _media_field(extra)) is not None:
        name = f"extra_info.{own}"
    if name is not None:
        fix = "remove these rows, or the column if the questions can do without"
        raise RowError(f"column {name!r} has pictures, videos or sound, and only text is read: {fix}")


def _media_field(values: Values) -> str | None:
    """The first field with pictures, videos or sound, see `check_media`."""
    named = _media_names(tuple(values))
    for name, value in values.items():
        first = value[0] if isinstance(value, list) and value else value
        is_file = (
            (isinstance(first, dict) and first.keys() == {"bytes", "path"})
            or (isinstance(first, bytes) and first.startswith(_MAGIC))
            or (isinstance(first, str) and first.startswith(_DATA_URLS))
        )
        if is_file or (name in named and bool(value) and not isinstance(value, bool | int | float)):
            return name
    return None


@lru_cache(maxsize=4096)
def _media_names(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(filter(_MEDIA.fullmatch, names))


def with_columns(extra: dict[str, Any], values: Values, names: Iterable[str]) -> dict[str, Any]:
    """Returns fields of `extra_info` together with the columns of these names, as JSON types.

    A column `split` becomes `original_split`, because the prepared files have one of their own.

    Raises:
        RowError: a column and a field of `extra_info` have one name and different values.
    """
    merged = dict(extra)
    for name in names:
        target = "original_split" if name == "split" else name
        value = json_able(values[name])
        if value is None and target in extra:
            continue
        if extra.get(target, value) not in (value, None):
            fix = "rename one of them"
            raise RowError(f"column {name!r} and extra_info.{target} have different values: {fix}")
        merged[target] = value
    return merged


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


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages, perhaps stored as text."""
    if isinstance(value, str):
        try:
            return conversation_in(value) is not None
        except ValueError:
            return False
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


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
        value: Any = values
        for segment in [name] if name in values else name.split("."):
            if not isinstance(value, Mapping) or segment not in value:
                break
            value = value[segment]
        else:
            return value
    in_lower = {str(name).strip().lower(): name for name in values}
    same = next(filter(None, (in_lower.get(name.lower()) for name in key.split("|"))), None)
    if same:
        return values[same]
    wanted = " or ".join(map(repr, key.split("|")))
    raise RowError(f"no column {wanted} (it has {', '.join(map(str, values)) or 'none'})")


def check_columns(names: Sequence[str], where: str) -> None:
    """Refuses two columns of one name; several without a name are allowed.

    Raises:
        UsageError: a name occurs twice.
    """
    repeated = next((name for name in names if name and names.count(name) > 1), None)
    if repeated:
        message = f"the header names the column {repeated!r} twice"
        raise UsageError(message, where=where, fix="rename one of them")


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
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        return {str(name): json_able(item) for name, item in value.items()}
    return [json_able(item) for item in value] if isinstance(value, list | tuple) else str(value)
