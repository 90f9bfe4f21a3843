"""Keeps secrets out of recorded specs, command lines and messages: best effort.

A value is a secret because of its key, like everything below such a key, or because of its own form.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MASK = "***"

#: Patterns of keys and values; see the file.
_PATTERNS = {
    name: re.compile("|".join(patterns), re.IGNORECASE | re.DOTALL)
    for name, patterns in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
_QUERY = re.compile(r"([?&;]([\w.-]+)=)([^&;#\s\"']+)")
# W&B's classic keys have the format of a git commit: 40 hexadecimal digits. Values of commit keys are kept.
_HEX40 = re.compile(r"(?<![0-9a-fA-F/@])[0-9a-f]{40}(?![0-9a-fA-F])")
_COMMIT_KEY = re.compile(r"(revision|commit|sha|hash)$", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"(\s*-{0,2}\s*([\w.-]+)\s*[:=]\s*)(.*)", re.DOTALL)


def redact(text: str, key: str = "") -> str:
    """Returns `text` without secrets; `key` is the key whose value `text` is, if any."""
    if _is_secret(key):
        return MASK if text.strip() not in {"", "null", "None"} else text
    text = _QUERY.sub(lambda found: found[1] + (MASK if _is_secret(found[2], "key|sig") else found[3]), text)
    text = _PATTERNS["secret_values"].sub(MASK, text)
    return text if _COMMIT_KEY.search(key) else _HEX40.sub(MASK, text)


def redact_command(argv: Sequence[str]) -> list[str]:
    """Redacts a command line: `--token x`, `--token=x`, `a.api_key=x`, and values that look like secrets."""
    redacted: list[str] = []
    option = ""
    for argument in argv:
        redacted.append(redact(argument, option) if option else _redact_assignment(argument))
        is_option = argument.startswith("--") and "=" not in argument
        option = argument.lstrip("-") if is_option else ""
    return redacted


def redact_tree(value: Any, key: str = "", *, is_secret: bool = False) -> Any:
    """Redacts nested dicts and lists; below a secret key every text and number."""
    is_secret = is_secret or _is_secret(key)
    if isinstance(value, Mapping):
        return {k: redact_tree(v, str(k), is_secret=is_secret) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item, key, is_secret=is_secret) for item in value]
    if is_secret:
        return value if value is None or value == "" or isinstance(value, bool) else MASK
    return redact(value, key) if isinstance(value, str) else value


def is_masked(value: Any) -> bool:
    """Whether a value read from a recorded spec is masked, or a list or section that contains one."""
    return repr(MASK) in repr(value)


def _is_secret(key: str, also: str = r"\0") -> bool:
    """Whether values of a key are secrets; `also` matches further secret names."""
    own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rpartition(".")[2]).lower()
    *before, last = re.split(r"[_-]+", own)
    is_plain = bool(before) and _PATTERNS["plain_words"].fullmatch(before[-1]) is not None
    if last in {"key", "keys"} and before:
        return not is_plain
    found = _PATTERNS["secret_words"].fullmatch(last) or re.match(also, last)
    return found is not None and not (last.startswith("token") and is_plain)


def _redact_assignment(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text)
    return match[1] + redact(match[3], match[2]) if match else redact(text)
