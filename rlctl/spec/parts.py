"""Validation of spec values that name registered parts, and of the parameters of these parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rlctl.errors import Problem, UsageError, in_words
from rlctl.registry import Part, Registry
from rlctl.user_code import is_file_function

#: Context of a validation in which a spec may name parts that do not exist here.
PARTS_UNCHECKED = {"parts": "unchecked"}


@dataclass(frozen=True, slots=True, eq=False)  # a registry is a mapping: not hashable
class Registered:
    """Annotation of a text field: the name of a part, or `path/to/file.py:function`.

    Attributes:
        registry: the registry of such parts.
        imports_files: whether checking the spec imports a user's file; else only the process that runs it.
        without: an input that the part must not need; the JSON Schema offers no such part.
    """

    registry: Registry
    imports_files: bool = True
    without: str = ""

    def check(self, name: str, info: ValidationInfo) -> str:
        """Returns the name if such a part exists.

        Raises:
            PydanticCustomError: there is no such part, or the user's file cannot be imported.
        """
        if (is_file_function(name) and not self.imports_files) or info.context == PARTS_UNCHECKED:
            return name
        if not is_file_function(name) and name not in set(self.registry):
            names = [f"'{known}'" for known in self.registry]
            expected = f"{', '.join(names)} or path/to/file.py:function"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        try:
            self.registry.part(name)
        except UsageError as error:
            shown = error.where and error.where != self.registry.key
            what = f"{error.where}: {error.what}" if shown else error.what
            raise PydanticCustomError(
                "part_error", "{what}", {"what": what, "fix": error.fix or ""}
            ) from None
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        names = [part.name for part in self.registry.parts() if self.without not in part.needs]
        return {
            "anyOf": [
                {"type": "string", "enum": names},
                {"type": "string", "pattern": r"^.+\.py:[A-Za-z_]\w*$"},
            ]
        }


def params_of(part: Part, given: Mapping[str, Any]) -> BaseModel | None:
    """Validated parameters of the part, with defaults for those not given; None: the part has no parameters.

    Raises:
        ValidationError: a value is wrong; `param_problems` describes it.
    """
    return None if part.params is None else part.params.model_validate(dict(given))


def param_problems(registry: Registry, name: str, key: str, given: Mapping[str, Any]) -> list[Problem]:
    """Problems of the parameters at `key` for the part `name`; empty if they are valid."""
    part = registry.part(name)
    if part.params is None:
        what, fix = f"{name} takes no parameters", "leave it out"
        return [Problem("error", f"{key}.{param}", what, fix) for param in given]
    known = f"the parameters of {name} are {', '.join(part.params.model_fields)}"
    found: list[tuple[str, str]] = []
    if part.params.model_config.get("extra", "ignore") == "ignore":
        unknown = given.keys() - part.params.model_fields.keys()
        found += [(param, "unknown parameter") for param in sorted(unknown)]
    try:
        params_of(part, given)
    except ValidationError as error:
        found += [(".".join(map(str, details["loc"])), in_words(details)) for details in error.errors()]
    return [Problem("error", f"{key}.{param}", what, known) for param, what in found]
