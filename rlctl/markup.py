"""Markdown output with untrusted text, which never becomes markup; groups in LaTeX text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlctl.errors import visible

#: Characters that can begin markup, including HTML.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#+!|~&$@])")
#: Braces, and escaped characters, which delimit nothing: `\{` opens no group.
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def plain(text: str) -> str:
    """Escapes untrusted text, so that Markdown shows it literally on one line."""
    return _MARKUP.sub(r"\\\1", " ".join(visible(text).split()))


def code(text: str) -> str:
    """Inline code on one line, which the text cannot terminate."""
    text = " ".join(visible(text).split())
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """The lines of a table of Markdown cells; `right` lists the headings of right-aligned columns."""
    rules = ["---:" if heading in right else "---" for heading in headings]
    cells = ([re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in rows)
    return [f"| {' | '.join(line)} |" for line in (headings, rules, *cells)]


def group_end(text: str, start: int, limit: int | None = None) -> int | None:
    """Index of the brace that closes a group with its content at `start`; None: none before `limit`."""
    depth = 1
    for brace in _BRACES.finditer(text, start, len(text) if limit is None else limit):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
