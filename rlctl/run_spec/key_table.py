"""Every key of the spec, as rows of a table and as JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rlctl.errors import UsageError
from rlctl.run_spec.keys import known_sections
from rlctl.run_spec.resolve import criteria_names
from rlctl.run_spec.run_spec import RunSpec
from rlctl.run_spec.sources import DESCRIPTION

_RANGES = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema_document(section: str | None = None) -> dict[str, Any]:
    """The JSON Schema of a spec, or of one section, for the YAML support of editors.

    Raises:
        UsageError: there is no such section.
    """
    content = _json_schema(section)
    if section is None:
        content["properties"][DESCRIPTION] = {"type": "string", "description": "For readers only."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **content}


def key_table(section: str | None = None) -> str:
    """Markdown table of all keys, or of those of one section.

    Raises:
        UsageError: there is no such section.
    """
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for row in key_rows(section):
        meaning = row.meaning.replace("|", "\\|")
        lines.append(f"| `{row.key}` | {row.type} | `{row.default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def _json_schema(name: str | None) -> dict[str, Any]:
    """The JSON Schema of a section, with the names of the rejection criteria, which a comma separates."""
    section: type[BaseModel] | None = known_sections().get(name) if name else RunSpec
    if section is None:
        raise UsageError(f"no such section: {name}", fix=f"one of {', '.join(sorted(known_sections()))}")
    content = section.model_json_schema()
    for part in (content, *content.get("$defs", {}).values()):
        criteria = part["properties"].get("rollout_rs")
        if criteria:
            criteria["examples"] = criteria_names()
    return content


@dataclass(frozen=True, slots=True)
class KeyRow:
    """Description of one key of the spec; `default` is JSON."""

    key: str
    type: str
    default: str
    meaning: str


def key_rows(section: str | None = None) -> Iterator[KeyRow]:
    """Every key of the spec, or of a section, in the order of the sections.

    Raises:
        UsageError: there is no such section.
    """
    content = _json_schema(section)
    yield from _rows(content, content.get("$defs", {}), f"{section}." if section else "")


def _rows(content: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[KeyRow]:
    """Yields one row per leaf; keys of nested sections follow in place."""
    for name, field in content["properties"].items():
        if "$ref" in field:
            yield from _rows(definitions[field["$ref"].rsplit("/", 1)[-1]], definitions, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get("default"), ensure_ascii=False)
        meaning = " ".join(field.get("description", "").split())
        kind = _type(field, definitions)
        names = ", ".join(f"`{example}`" for example in field.get("examples", []))
        if names:
            kind += f", such as {names}"
        yield KeyRow(f"{prefix}{name}", kind, default, meaning)


def _type(field: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A field's type and range in a few words."""
    if "anyOf" in field:
        return " or ".join(_type(option, definitions) for option in field["anyOf"])
    if "$ref" in field:  # an item of a list
        fields = definitions[field["$ref"].rsplit("/", 1)[-1]]["properties"]
        return f"{{{', '.join(fields)}}}"
    for key in ("enum", "const"):
        if key in field:
            values = field[key] if key == "enum" else [field[key]]
            return ", ".join(f"`{value}`" for value in values)
    is_path = ".py:" in field.get("pattern", "")
    words = "`path/to/file.py:function`" if is_path else str(field.get("type", "any"))
    if words == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        return f"list of {_type(items, definitions)}"
    ranges = [f"{sign} {field[key]}" for key, sign in _RANGES.items() if key in field]
    return " ".join([words, ", ".join(ranges)]).strip()
