"""Text of unknown origin made fit for a terminal: nothing in it can act, and nothing in it is hidden."""

from __future__ import annotations

import unicodedata


def visible(text: str, keep: str = "\n") -> str:
    """The text with control, format and private characters written out as `\\u202e` or as their picture.

    Args:
        text: anything.
        keep: characters to leave alone.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in keep or char.isprintable() else _shown(char) for char in text)


def _shown(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if unicodedata.category(char) == "Zs":  # a space of another width
        return " "
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
