"""Conversations and answers that tables store as text: JSON, Python literals, arrays as NumPy prints them."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from typing import Any

#: Longer texts are not parsed: they are tests of programs, not answers.
MAX_CHARS = 20_000
_ARRAY = re.compile(r"\s*(?:np\.|numpy\.)?array\(\s*(.*?)\s*(?:,\s*dtype=[^()\[\]]+)?\s*\)\s*", re.DOTALL)
#: A number or text as NumPy 2 prints it within a list: `np.int64(7)`, `np.str_('7')`.
_NUMPY_SCALAR = re.compile(r"\b(?:np|numpy)\.(?:u?int|float|str|bytes)\d*_?\(([^()]*)\)")
#: An object as Python prints it: `frozenset({'7'})`, `tensor(7)`, `Decimal('7')`.
_OBJECT = re.compile(
    r"(?:(?:np|numpy|pd|torch|collections|decimal|fractions)\.\w+|frozenset|set|tuple|list|dict|OrderedDict|deque"
    r"|Counter|defaultdict|Series|tensor|Decimal|Fraction)\(.*\)",
    re.DOTALL,
)
#: A list of mappings; a mapping with a role.
_MAPPINGS = re.compile(r"\s*(?:(?:np\.|numpy\.)?array\(\s*)?[\[(]\s*\{\s*['\"]")
_ONE_MESSAGE = re.compile(r"\s*\{\s*['\"](?:role|from|content|value)['\"]\s*:")
_ROLE = re.compile(r"['\"](?:role|from)['\"]\s*:")
#: Rows of an array of mappings, which NumPy prints without commas; inside texts a line break is `\n`.
_BETWEEN = re.compile(r"\}[ \t]*\r?\n\s*\{")
#: A list, tuple, set or mapping, perhaps of others, whose first element is a text.
_QUOTED = re.compile(r"(?:[\[({]\s*)+[rbu]?['\"]", re.IGNORECASE)


def _value(text: str) -> Any:
    """The value of a JSON text or Python literal.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("neither JSON nor a Python literal") from error


def conversation_in(text: str) -> list[Any] | None:
    """The messages of a conversation that is stored as text; None: it is a text like any other.

    Raises:
        ValueError: it begins like a conversation, and cannot be parsed or has another form.
    """
    is_list = _MAPPINGS.match(text)
    is_message = _ONE_MESSAGE.match(text)
    if not (is_list or is_message) or not _ROLE.search(text):
        return None
    array = _ARRAY.fullmatch(text)
    inner = array[1] if array else text
    try:
        value = _value(inner)
    except ValueError:
        try:
            value = _value(_BETWEEN.sub("}, {", inner))
        except ValueError:
            if not is_list:
                return None
            raise ValueError("a conversation as text that is neither JSON nor a Python literal") from None
    messages = [value] if isinstance(value, dict) else value
    is_conversation = isinstance(messages, list | tuple) and all(
        isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages
    )
    if is_conversation:
        return list(messages)
    if is_list:
        raise ValueError("a list of mappings as text, of which some have no role")
    return None


def listed(value: Any) -> Any:
    """A list or mapping that a table stores as text; any other value stays as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in {"[", "{", "("} or len(value) > MAX_CHARS:
        return value
    try:
        literal = _value(value)
    except ValueError:
        return value
    is_joined = isinstance(literal, list) and _QUOTED.match(value.strip()) and _has_adjacent_texts(value)
    return literal if isinstance(literal, list | dict) and not is_joined else value


def answer_in(text: str) -> Any:
    """The value of an answer that is stored as text: the text itself, one element, or a list of alternatives.

    A list of texts or numbers with one element is that element. A list of several is one of alternatives if
    its elements are texts; `[1, 2]` and `(1, 2)` are mathematics, and stay as they are. So do JSON objects
    and nested JSON lists, which some graders read.

    Raises:
        ValueError: it is a Python literal of another form, or begins like a list of texts and is none.
    """
    stripped = text.strip()
    if len(text) > MAX_CHARS or not stripped:
        return text
    if "np." in text or "numpy." in text:
        stripped = _NUMPY_SCALAR.sub(r"\1", stripped)
    array = _ARRAY.fullmatch(stripped)
    if not array and _OBJECT.fullmatch(stripped):
        raise ValueError(f"a Python object as text, {stripped.partition('(')[0]}(…)")
    is_scalar = stripped != text.strip() and stripped[0] not in "[({"
    if not array and not is_scalar and stripped[0] not in "[({":
        return text
    if stripped[0] == "[" and "]" not in stripped and _QUOTED.match(stripped):
        raise ValueError("a list as text without its end")
    inner = array[1] if array else stripped
    is_quoted = _QUOTED.match(inner) and inner[-1] in "])}"
    try:
        value = _value(inner)
    except ValueError:
        if is_quoted or array:
            raise ValueError("a list as text that is neither JSON nor a Python literal") from None
        return text
    if is_scalar and _is_scalar(value):
        return value
    if isinstance(value, list | tuple) and all(_is_scalar(item) for item in value):
        return _element_or_list(text, inner, list(value), is_array=bool(array), is_quoted=bool(is_quoted))
    if (not is_quoted and not array) or _is_json(inner):
        return text
    kind = "mapping" if isinstance(value, dict) else type(value).__name__
    raise ValueError(f"a Python {kind} as text")


def _element_or_list(text: str, inner: str, items: list[Any], *, is_array: bool, is_quoted: bool) -> Any:
    if not items:
        return None
    if is_quoted and _has_adjacent_texts(inner):
        raise ValueError("a list as text without commas, as NumPy prints arrays")
    if len(items) == 1:
        return items[0]
    return items if is_array or any(isinstance(item, str) for item in items) else text


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_adjacent_texts(text: str) -> bool:
    """Whether two quoted texts follow each other, which Python joins: `['7' '8']` is `['78']`."""
    before = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING == before:
                return True
            if token.type not in (tokenize.NL, tokenize.NEWLINE):
                before = token.type
    except (tokenize.TokenError, SyntaxError):  # JSON that Python does not read has no adjacent texts
        return False
    return False
