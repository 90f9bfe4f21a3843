"""Arguments that the policy wrote for a tool, checked against the type hints of its function."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

#: Most arguments that a message names.
_MAX_NAMED = 3


def arguments_of(function: Callable[..., Any]) -> type[BaseModel] | None:
    """A model of the arguments, without `self`; None: Pydantic does not know one of the hints."""
    fields: dict[str, Any] = {}
    takes_more = False
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = True
        elif name != "self" and parameter.kind is not parameter.VAR_POSITIONAL:
            hint = hints.get(name, Any)
            has_default = parameter.default is not parameter.empty
            hint = hint | None if has_default and parameter.default is None else hint
            # an alias, because a field may not have the name of a method of the model
            default = parameter.default if has_default else ...
            fields[f"argument_{name}"] = (hint, Field(default, alias=name))
    config = ConfigDict(strict=True, extra="allow" if takes_more else "forbid")
    try:
        return create_model("Arguments", __config__=config, **fields)
    except (PydanticUserError, TypeError):
        return None


def problem_of(model: type[BaseModel] | None, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments, for the policy; empty: nothing.

    As JSON has types: 3.0 is an integer, and 3 a number; no text is a number.
    """
    if model is None:
        return ""
    try:
        model.model_validate_json(json.dumps({key: _whole(value) for key, value in arguments.items()}))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        parts = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in found[:_MAX_NAMED]]
        return "wrong arguments: " + "; ".join(parts)
    return ""


def _whole(value: Any) -> Any:
    """The value with integers in place of floating-point numbers that are whole."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
