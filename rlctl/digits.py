"""Whole numbers in texts that someone else has written."""

from __future__ import annotations

_LARGEST = 2**63 - 1


def whole_number(text: str) -> int | None:
    """The number that decimal digits stand for, also after a minus sign; None: there is none, or it is large.

    Large is what a column of 64-bit integers cannot hold. Python itself raises an error for 4,300 digits.
    """
    digits = text.removeprefix("-")
    significant = digits.lstrip("0")
    if not digits.isdecimal() or len(significant) > len(str(_LARGEST)):
        return None
    value = int(significant or "0")
    if value > _LARGEST:
        return None
    return -value if text.startswith("-") else value
