"""`rlctl schema`: describes every key of the spec."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.command import echo
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

_RANGES = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def schema(
    section: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One section only: actor, algorithm.rollout_correction …"),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A table for reading instead of JSON Schema.")
    ] = False,
) -> None:
    """Print every key of a spec, as JSON Schema.

    Use it in your editor's YAML support for completion and checks while typing.

      rlctl schema > rlctl.schema.json

      rlctl schema --section actor --markdown
    """
    from rlctl.spec.keys import known_sections
    from rlctl.spec.run_spec import RunSpec
    from rlctl.spec.sources import DESCRIPTION

    model = known_sections().get(section) if section else RunSpec
    if model is None:
        fix = f"one of {', '.join(sorted(known_sections()))}"
        raise UsageError(f"no such section: {section}", where="--section", fix=fix)
    content = _json_schema(model)
    if markdown:
        echo("| key | type | default | meaning |\n|---|---|---|---|")
        for row in _rows(content, content.get("$defs", {}), f"{section}." if section else ""):
            meaning = row.meaning.replace("|", "\\|")
            echo(f"| `{row.key}` | {row.type} | `{row.default}` | {meaning} |")
        return
    if section is None:
        content["properties"][DESCRIPTION] = {"type": "string", "description": "For readers only."}
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **content}
    echo(json.dumps(document, indent=2, ensure_ascii=False))


def _json_schema(section: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a section, with the names of the rejection criteria, which a comma separates."""
    from rlctl.spec.resolve import criteria_names

    content = section.model_json_schema()
    for part in (content, *content.get("$defs", {}).values()):
        if criteria := part["properties"].get("rollout_rs"):
            criteria["examples"] = criteria_names()
    return content


@dataclass(frozen=True, slots=True)
class KeyRow:
    """Description of one key of the spec; `default` is JSON."""

    key: str
    type: str
    default: str
    meaning: str


def key_rows() -> Iterator[KeyRow]:
    """Every key of the spec, in the order of its sections."""
    from rlctl.spec.run_spec import RunSpec

    content = _json_schema(RunSpec)
    yield from _rows(content, content.get("$defs", {}), "")


def _rows(content: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[KeyRow]:
    """Yields one row per leaf; keys of nested sections follow in place."""
    for name, field in content["properties"].items():
        if "$ref" in field:
            yield from _rows(definitions[field["$ref"].rsplit("/", 1)[-1]], definitions, f"{prefix}{name}.")
            continue
        default = json.dumps(field.get("default"), ensure_ascii=False)
        meaning = " ".join(field.get("description", "").split())
        kind = _type(field, definitions)
        if names := ", ".join(f"`{example}`" for example in field.get("examples", [])):
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
