"""Removes secrets from everything that a run writes, by the name of the key and the format of the value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MASK = "***"

_SECRET_KEY = re.compile(
    r"(^|[._-])(token|secret|password|passwd|pwd|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|auth)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf|ghp|gho|ghs|glpat|xox[abp])[_-][A-Za-z0-9_-]{16,}"
    r"|\bgithub_pat_\w{20,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bwandb_v\d+_[A-Za-z0-9_]{16,}"
    r"|\blocal-[0-9a-f]{40}\b"
    r"|\bAKIA[A-Z0-9]{16}\b"
    r"|(?<=//)[^/\s:@]+:[^/\s@]+(?=@)"
    r"|(?<=bearer )[A-Za-z0-9._~+/-]{16,}",
    re.IGNORECASE,
)
# W&B's classic keys have the format of a git commit: 40 hexadecimal digits. Values of commit keys are kept.
_HEX40 = re.compile(r"(?<![0-9a-fA-F/@])[0-9a-f]{40}(?![0-9a-fA-F])")
_COMMIT_KEY = re.compile(r"(revision|commit|sha|hash)$", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"^(\s*-{0,2}\s*[\w.-]+\s*[:=]\s*)(.*)$")


def redact(text: str, key: str = "") -> str:
    """Returns `text` without secrets; `key` is the key whose value `text` is, if any."""
    if _SECRET_KEY.search(key):
        return MASK if text.strip() not in {"", "null", "None"} else text
    text = _SECRET_VALUE.sub(MASK, text)
    return text if _COMMIT_KEY.search(key) else _HEX40.sub(MASK, text)


def redact_lines(text: str) -> str:
    """Redacts YAML or similar text line by line, each line with its key."""
    return "".join(_redact_assignment(line) for line in text.splitlines(keepends=True))


def redact_command(argv: Sequence[str]) -> list[str]:
    """Redacts a command line: `--token x`, `--token=x`, `a.api_key=x`, and values that look like secrets."""
    redacted: list[str] = []
    option = ""
    for argument in argv:
        redacted.append(redact(argument, option) if option else _redact_assignment(argument))
        is_option = argument.startswith("--") and "=" not in argument
        option = argument.lstrip("-") if is_option else ""
    return redacted


def redact_tree(value: Any, key: str = "") -> Any:
    """Redacts all strings in nested dicts and lists."""
    if isinstance(value, dict):
        return {k: redact_tree(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item, key) for item in value]
    return redact(value, key) if isinstance(value, str) else value


def _redact_assignment(text: str) -> str:
    line = text.rstrip("\r\n")
    ending = text[len(line) :]
    if match := _ASSIGNMENT.match(line):
        key = match[1].strip().rstrip(":=").strip().lstrip("-").strip()
        return match[1] + redact(match[2], key) + ending
    return redact(line) + ending
