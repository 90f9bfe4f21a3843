"""Base class, types and validators that all sections of the spec share.

Also the validation of values that name registered parts, and of the parameters of these parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rlctl.errors import Problem, UsageError, in_words
from rlctl.files import read_text
from rlctl.registry import Part, Registry
from rlctl.user_code import is_file_function


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
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)?", text)
    if not match or not float(match[1]):
        raise ValueError("must be a time such as 90s, 30min or 2h")
    return match[1] + (match[2] or "s")


#: `90s`, `30min` or `2h`; a plain number is in seconds.
Duration = Annotated[str, BeforeValidator(_duration, json_schema_input_type=str | float)]


def seconds(duration: str) -> float:
    """Converts a `Duration` to seconds."""
    number = duration.rstrip("sminh")
    return float(number) * _UNITS[duration.removeprefix(number)]


def one_or_many(value: Any) -> Any:
    """Wraps a single text in a list; other values stay unchanged."""
    return [value] if isinstance(value, str) else value


NullWord = BeforeValidator(_null_word)


@dataclass(frozen=True, slots=True, eq=False)  # a dict is not hashable
class Aliases:
    """Annotation of a text field: other names of its values, for example those of verl."""

    names: dict[str, str]  # other name → value

    def translate(self, value: Any) -> Any:
        """The value that an alias stands for; other values stay unchanged."""
        return self.names.get(value, value) if isinstance(value, str) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.translate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        described = handler(schema)
        return {"anyOf": [*described.get("anyOf", [described]), {"type": "string", "enum": list(self.names)}]}


#: verl's names of the KL estimators.
KLNames = Aliases({"kl": "k1", "mse": "k2", "low_var_kl": "k3"})


def json_file(value: Any) -> Any:
    """Reads the JSON object from a file if `value` is a path; other values stay unchanged.

    Raises:
        ValueError: the file cannot be read, or does not contain a JSON object.
    """
    if not isinstance(value, str):
        return value
    try:
        content = json.loads(read_text(Path(value).expanduser()))
    except OSError as error:
        raise ValueError(f"must be a mapping, or a JSON file: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"this file is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError("this file must hold a JSON object")
    return content


#: A mapping with arbitrary keys: `key.NAME=VALUE` sets one of them.
OpenMapping = dict[str, Any]
#: The same, or the path of a JSON file that contains it.
JsonMapping = Annotated[OpenMapping, BeforeValidator(json_file, json_schema_input_type=OpenMapping | str)]
StrList = Annotated[list[str], BeforeValidator(one_or_many, json_schema_input_type=list[str] | str)]


#: Context of a validation in which a spec may name parts that do not exist here.
PARTS_UNCHECKED = {"parts": "unchecked"}


@dataclass(frozen=True, slots=True, eq=False)  # a registry is a mapping: not hashable
class Registered:
    """Annotation of a text field: the name of a part, or `path/to/file.py:function`."""

    registry: Registry  # the registry of such parts
    #: whether checking the spec imports a user's file; else only the process that runs it
    imports_files: bool = True
    without: str = ""  # an input that the part must not need; the JSON Schema offers no such part

    def check(self, name: str, info: ValidationInfo) -> str:
        """Returns the name if such a part exists.

        Raises:
            PydanticCustomError: there is no such part, or the user's file cannot be imported.
        """
        if (is_file_function(name) and not self.imports_files) or info.context == PARTS_UNCHECKED:
            return name
        if not is_file_function(name) and not self.registry.knows(name):
            names = [f"'{known}'" for known in self.registry]
            expected = f"{', '.join(names)} or path/to/file.py:function"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        try:
            self.registry.part(name)
        except UsageError as error:
            shown = error.where and error.where != self.registry.key
            message = f"{error.where}: {error.what}" if shown else error.what
            raise PydanticCustomError(
                "part_error", "{what}", {"what": message, "fix": error.fix or ""}
            ) from None
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        names = [part.name for part in self.registry.parts() if self.without not in part.needs]
        with_argument = [name for name in names if name.endswith(":")]
        return {
            "anyOf": [
                {"type": "string", "enum": [name for name in names if name not in with_argument]},
                {"type": "string", "pattern": r"^.+\.py:[A-Za-z_]\w*$"},
                *({"type": "string", "pattern": f"^{name}.+$"} for name in with_argument),
            ]
        }


def params_of(part: Part, values: Mapping[str, Any]) -> BaseModel | None:
    """Validated parameters of the part, with defaults for those not given; None: the part has no parameters.

    Raises:
        ValidationError: a value is wrong; `param_problems` describes it.
    """
    return None if part.params is None else part.params.model_validate(dict(values))


def unread_params(key: str, names: Iterable[str], message: str) -> list[Problem]:
    """Problems of parameters at `key` that nothing reads."""
    fix = f"leave it out, or set {key} to {{}}"
    return [Problem("error", f"{key}.{name}", message, fix) for name in names]


def param_problems(registry: Registry, name: str, key: str, values: Mapping[str, Any]) -> list[Problem]:
    """Problems of the parameters at `key` for the part `name`; empty if they are valid."""
    registered = registry.part(name)
    if registered.params is None:
        return unread_params(key, values, f"{name} takes no parameters")
    known = f"the parameters of {name} are {', '.join(registered.params.model_fields)}"
    problems: list[tuple[str, str]] = []
    if registered.params.model_config.get("extra", "ignore") == "ignore":
        unknown = values.keys() - registered.params.model_fields.keys()
        problems += [(param, "unknown parameter") for param in sorted(unknown)]
    try:
        params_of(registered, values)
    except ValidationError as error:
        problems += [(".".join(map(str, details["loc"])), in_words(details)) for details in error.errors()]
    return [Problem("error", f"{key}.{param}", message, known) for param, message in problems]
