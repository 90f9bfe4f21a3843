"""Pages of one file that may show hostile text: escaped templates, data without markup, hashed scripts."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def render(template: Path, **values: object) -> str:
    """The template with these values. Text is escaped; `Markup` is not.

    Raises:
        jinja2.UndefinedError: the template asks for a value that is not given.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(values)


def json_block(value: object) -> Markup:
    """JSON that no HTML parser sees markup in: ASCII, and `<`, `>`, `&` by their numbers.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def csp_hash(text: str) -> str:
    """As a content security policy names an inline script or style (SHA-256, base64)."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
