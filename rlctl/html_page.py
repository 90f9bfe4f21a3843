"""Pages of one file that may show hostile text: escaped templates, data without markup, hashed scripts.

Logs, models and data sets may hold anything. Templates escape it, no character in the JSON block can end the
block, scripts insert it as text, and the page's policy runs its own scripts only and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE = Path(__file__).parent


def render(
    template: Path,
    *,
    title: str,
    style: str = "",
    scripts: Sequence[str] = (),
    data: object = None,
    free_styles: bool = False,
    folders: Sequence[Path] = (),
    **values: object,
) -> str:
    """A page: a template that extends `html_page.html.j2`. Text is escaped; `Markup` is not.

    Args:
        template: the file.
        title: of the page.
        style: beside that of all pages, `html_page.css`.
        scripts: run in this order, after the page.
        data: what the scripts find as JSON in the element `data`; None: there is none.
        free_styles: let scripts make styles of their own, as a plotting library does.
        folders: where templates that this one includes or extends lie.
        **values: of the template.

    Raises:
        jinja2.UndefinedError: the template asks for a value that is not given.
        ValueError: a number in `data` is not finite.
    """
    places = [template.parent, *folders, _HERE]
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(place) for place in places]),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    style = (_HERE / "html_page.css").read_text(encoding="utf-8") + style
    run = " ".join(f"'sha256-{_hash(script)}'" for script in scripts) or "'none'"
    styled = "'unsafe-inline'" if free_styles else f"'sha256-{_hash(style)}'"
    policy = f"default-src 'none'; script-src {run}; style-src {styled}; img-src data: blob:; "
    values |= {
        "title": title,
        "style": Markup(style),
        "scripts": [Markup(script) for script in scripts],
        "data": None if data is None else json_block(data),
        "policy": Markup(policy + "base-uri 'none'; form-action 'none'"),
    }
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


def _hash(text: str) -> str:
    """As a content security policy names an inline script or style (SHA-256, base64)."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
