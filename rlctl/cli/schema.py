"""`rlctl schema`: every key, its type, range, default and meaning, as JSON Schema."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlctl.errors import UsageError


def schema(
    section: Annotated[
        str | None,
        typer.Option(
            "--section", metavar="NAME", help="One section only: actor, algorithm.rollout_correction …"
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a spec.

    Point your editor's YAML support at it for completion and checks while typing.

      rlctl schema > rlctl.schema.json

      rlctl schema --section actor
    """
    from rlctl.spec.keys import known_sections, section_class
    from rlctl.spec.presets import DESCRIPTION
    from rlctl.spec.run import RunSpec

    if section is None:
        content = RunSpec.model_json_schema()
        content["properties"][DESCRIPTION] = {"type": "string", "description": "For readers only."}
    else:
        found = section_class(section)
        if found is None:
            fix = f"one of {', '.join(sorted(known_sections()))}"
            raise UsageError(f"no such section: {section}", where="--section", fix=fix)
        content = found.model_json_schema()
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **content}
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
