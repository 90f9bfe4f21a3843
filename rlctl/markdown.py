"""Markdown that may show hostile text: nothing in a text of others becomes markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rlctl.user_code import visible

#: Everything that could begin markup, HTML included.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#+!|~&$@])")


def plain(text: str) -> str:
    """One line that shows the text as it is."""
    return _MARKUP.sub(r"\\\1", " ".join(visible(text).split()))


def prose(text: str) -> str:
    """The same of a text of ours, in which `code` stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(visible(text).split()))
    return "".join(part if place % 2 else _MARKUP.sub(r"\\\1", part) for place, part in enumerate(parts))


def code(text: str) -> str:
    """One line of code, which the text cannot end."""
    text = " ".join(visible(text).split())
    fence = "`" * (_longest_fence(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """A block of code, which the text cannot end."""
    fence = "`" * max(3, _longest_fence(text) + 1)
    return f"{fence}{language}\n{visible(text).rstrip()}\n{fence}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> list[str]:
    """The lines of a table.

    Args:
        headings: of the columns.
        rows: cells, which are Markdown.
        right: the headings of columns that are aligned right.
    """
    rules = ["---:" if heading in right else "---" for heading in headings]
    cells = ([re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row] for row in rows)
    return [f"| {' | '.join(line)} |" for line in (headings, rules, *cells)]


def _longest_fence(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
