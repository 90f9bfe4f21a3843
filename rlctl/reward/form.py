"""Graders of form: JSON that a schema allows, and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlctl.lazy import lazy_pattern
from rlctl.registry import GRADERS
from rlctl.reward.protocol import KnownResponses
from rlctl.tool_calls import JSON, ToolCall, parse_calls

_FENCE = lazy_pattern(r"```(?:json|JSON)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL)
#: Places at which a JSON value in prose is tried.
_MOST_TRIED = 200


def _no_known(ground_truth: str) -> KnownResponses:
    """No response is known; raises `ValueError` if the schema cannot be read."""
    _validator(ground_truth)
    return None, None


@GRADERS.register(
    label="JSON that a schema allows",
    formula="1 if the JSON value in the response is valid under the JSON Schema of the ground truth, else 0",
    needs={"a JSON Schema as ground truth", "the package jsonschema"},
    known_responses=_no_known,
    score_range=(0.0, 1.0),
    data_sources=r"json_?schema\w*|json_mode\w*",
)
def json_schema(response: str, ground_truth: str) -> float:
    """1.0 if the response's JSON is valid under the schema, else 0.0.

    It is the whole response, or the last fenced block, or the last object or list in the text.

    Raises:
        ValueError: the ground truth is no JSON Schema, or refers to one of another address.
    """
    from referencing.exceptions import Unresolvable

    validator = _validator(ground_truth)
    value = json_in(response)
    if value is _NONE:
        return 0.0
    try:
        return float(validator.is_valid(value))
    except Unresolvable as error:
        raise ValueError(f"the schema refers to what it does not contain: {error}") from error


@lru_cache(maxsize=1024)
def _validator(ground_truth: str) -> Any:
    """What checks values by a schema; it fetches nothing."""
    import jsonschema
    from jsonschema_specifications import REGISTRY

    try:
        schema = json.loads(ground_truth)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, TypeError, AttributeError, jsonschema.SchemaError) as error:
        raise ValueError(f"the ground truth is no JSON Schema: {str(error)[:200]}") from None
    return kind(schema, registry=REGISTRY, format_checker=kind.FORMAT_CHECKER)


_NONE = object()


def json_in(response: str) -> Any:
    """The JSON value that a response gives; `_NONE` if there is none."""
    blocks = _FENCE.findall(response)
    for text in (response, *blocks[-1:]):
        try:
            return JSON.decode(text.strip())
        except (ValueError, RecursionError):
            continue
    if blocks:
        return _NONE
    found = _NONE
    end = 0
    tried = 0
    for start in (place.start() for place in re.finditer(r"[{\[]", response)):
        if start < end:  # within a value
            continue
        tried += 1
        if tried > _MOST_TRIED:
            break
        try:
            found, end = JSON.raw_decode(response, start)
        except (ValueError, RecursionError):
            continue
    return found


def _expected_call(ground_truth: str) -> KnownResponses:
    """The first accepted calls as a response, and no call."""
    calls = expected_calls(ground_truth)
    texts = []
    for name, accepted in calls:
        arguments = {key: values[0] for key, values in accepted.items() if not _is_optional(values)}
        body = json.dumps({"name": name, "arguments": arguments})
        texts.append(f"<tool_call>{body}</tool_call>")
    return "\n".join(texts) or "no call is needed", '<tool_call>{"name": "_", "arguments": {}}</tool_call>'


@GRADERS.register(
    label="the right tool calls",
    formula="1 if the response's tool calls are those of the ground truth, in any order, else 0",
    needs={'calls as ground truth: `[{"name": "add", "arguments": {"a": 1}}]`, or as BFCL lists them'},
    known_responses=_expected_call,
    score_range=(0.0, 1.0),
    data_sources=r"tool_?calls?|function_?call\w*|bfcl\w*|toolace|xlam\w*",
)
def tool_call(response: str, ground_truth: str) -> float:
    """1.0 if the response makes the calls of the ground truth and no other ones, else 0.0.

    Calls are read in the formats of `rlctl.tool_calls`, or as JSON. 2 and 2.0 are the same argument.

    Raises:
        ValueError: the ground truth has no such form.
    """
    expected = expected_calls(ground_truth)
    calls, problem = parse_calls(response)
    if not calls and not problem and (value := json_in(response)) is not _NONE:
        calls, problem = parse_calls("".join(_as_calls(value)))
    if problem or len(calls) != len(expected):
        return 0.0
    return float(_are_matched(calls, expected))


def _are_matched(calls: Sequence[ToolCall], expected: Sequence[tuple[str, Mapping[str, list[Any]]]]) -> bool:
    """Whether each call can be one of the expected ones, all different."""
    if not calls:
        return not expected
    return any(
        _is_call(calls[0], *one) and _are_matched(calls[1:], [*expected[:place], *expected[place + 1 :]])
        for place, one in enumerate(expected)
    )


#: Among the values of an argument in BFCL's ground truths: it may be left out.
_LEFT_OUT = ""


@lru_cache(maxsize=1024)
def expected_calls(ground_truth: str) -> list[tuple[str, dict[str, list[Any]]]]:
    """Name, and argument → accepted values, of each call of a ground truth.

    Either calls with `name` and `arguments`, also within `function`; or, as in the Berkeley Function-Calling
    Leaderboard, `{"name": {"argument": [accepted values]}}`, where `""` says that it may be left out.

    Raises:
        ValueError: it has neither form.
    """
    value = json.loads(ground_truth)
    found = []
    for outer in value if isinstance(value, list) else [value]:
        call = outer.get("function", outer) if isinstance(outer, Mapping) else outer
        if not isinstance(call, Mapping):
            raise ValueError(f"the ground truth has no tool call, but {str(call)[:100]}")
        if isinstance(call.get("name"), str):
            arguments = call.get("arguments", call.get("parameters")) or {}
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            accepted = {key: [one] for key, one in arguments.items()}
            found.append((str(call["name"]), accepted))
            continue
        for name, arguments in call.items():
            if not isinstance(arguments, Mapping) or not all(isinstance(x, list) for x in arguments.values()):
                raise ValueError(f"the arguments of {name} are no lists of accepted values")
            found.append((name, {key: list(values) for key, values in arguments.items()}))
    return found


def _is_call(call: ToolCall, name: str, accepted: Mapping[str, list[Any]]) -> bool:
    """Whether a call has this name, and for each argument an accepted value, and no further argument."""
    if call.name != name or call.arguments.keys() - accepted.keys():
        return False
    for key, values in accepted.items():
        if key in call.arguments:
            if not any(_equal(call.arguments[key], value) for value in values):
                return False
        elif not _is_optional(values):
            return False
    return True


def _is_optional(values: list[Any]) -> bool:
    return len(values) > 1 and _LEFT_OUT in values


def _equal(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _as_calls(value: Any) -> Iterator[str]:
    """Calls in JSON as a response would write them."""
    for call in value if isinstance(value, list) else [value]:
        if isinstance(call, dict):
            inner = call.get("function") if isinstance(call.get("function"), dict) else call
            yield f"<tool_call>{json.dumps(inner)}</tool_call>"
