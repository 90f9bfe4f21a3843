r"""The content of the last `\boxed{}` of a worked solution."""

from __future__ import annotations

import re

from rlctl.data.checks import RowError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^a-zA-Z\s])|\\(?:boxed|fbox)\s+")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def last_boxed(solution: str) -> str:
    r"""What stands in the last `\boxed{…}` or `\fbox{…}`, braces balanced; `\boxed 2` has none.

    Raises:
        RowError: there is no box, it never ends, or it is empty.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        raise RowError(r"the solution has no \boxed{}")
    start = boxes[-1].end()
    if solution[start : start + 1] == "{":
        content = solution[start + 1 : _closing(solution, start)]
    else:
        content = re.split(r"[\s$]", solution[start:], maxsplit=1)[0]
    if not content.strip():
        raise RowError(r"the last \boxed{} of the solution is empty")
    return content.strip()


def _closing(text: str, start: int) -> int:
    """Place of the brace that closes the one at `start`."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise RowError(r"the last \boxed{ of the solution is never closed")
