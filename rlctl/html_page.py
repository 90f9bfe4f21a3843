"""Self-contained HTML pages that may show untrusted text.

Text from logs, models and data sets is untrusted. Templates escape it, the JSON block contains no markup
characters, scripts insert it as text, and the content security policy allows only the page's own scripts and
no loading.
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
    folders: Sequence[Path] = (),
    connects: bool = False,
    **values: object,
) -> str:
    """Renders a template that extends `html_page.html.j2`. Text is escaped; `Markup` is not.

    Args:
        template: file of the template.
        title: of the page.
        style: CSS in addition to `html_page.css`, which all pages use.
        scripts: run in this order, after the page.
        data: content of the JSON element `data`, which scripts read; None: no such element.
        folders: further directories of templates that this one includes or extends.
        connects: whether scripts may read from the server of the page.
        **values: variables of the template.

    Raises:
        jinja2.UndefinedError: the template uses a variable that is not given.
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
    policy = f"default-src 'none'; script-src {run}; style-src 'sha256-{_hash(style)}'; img-src data: blob:; "
    policy += "connect-src 'self'; " if connects else ""
    values |= {
        "title": title,
        "style": Markup(style),
        "scripts": [Markup(script) for script in scripts],
        "data": None if data is None else json_block(data),
        "policy": Markup(policy + "base-uri 'none'; form-action 'none'"),
    }
    return environment.get_template(template.name).render(values)


def json_block(value: object) -> Markup:
    """ASCII JSON without HTML markup: `<`, `>` and `&` are written as Unicode escapes.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(text: str) -> str:
    """Hash of an inline script or style for a content security policy (SHA-256, base64)."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
