"""Groups in LaTeX text."""

from __future__ import annotations

import re

#: Braces, and escaped characters, which delimit nothing: `\{` opens no group.
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def group_end(text: str, start: int, limit: int | None = None) -> int | None:
    """Index of the brace that closes a group with its content at `start`; None: none before `limit`."""
    depth = 1
    for brace in _BRACES.finditer(text, start, len(text) if limit is None else limit):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None
