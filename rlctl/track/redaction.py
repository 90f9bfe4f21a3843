"""Keeps secrets out of recorded specs, command lines and messages: best effort.

A value is a secret because of its key, like everything below such a key, or because of its own form.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
_QUOTED = r"""(?P<quote>\\*["']).*?(?P=quote)"""
#: A value of JSON, YAML or Python, and what may follow a key in a sentence.
_VALUE = rf"""(?P<value>{_QUOTED}|\[[^\]]*\]|\{{[^}}]*\}}|[^\s"'\\,;&\]}}]+)"""
#: `"key": value` of JSON and Python, with escaped quotes too.
_IN_QUOTES = re.compile(
    rf"""(?P<before>(?P<around>\\*["'])(?P<key>[\w.-]+)(?P=around)[ \t]*[:=][ \t]*){_VALUE}"""
)
#: `key: value` of YAML, settings, headers and sentences; `key="value"` of shells.
_PLAIN = re.compile(
    r"""(?P<before>(?<![\w.-])(?P<key>[A-Za-z_][\w.-]*)(?:[ \t]*:[ \t]*|[ \t]+=[ \t]*|=(?=\\*["'])))"""
    + _VALUE
)
#: What comes before a secret, and the secret.
_PLACES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"""(authorization\\*["']?\s*[:=]\s*\\*["']?(?:[a-z][\w-]*[ ]+(?=\S))?)([^\s"'\\]+)""",
        r"""(cookie\s*:\s*)([^\r\n"']+)""",
        r"""(\bmachine\s+\S+\s+(?:(?:login|account)\s+\S+\s+)*password\s+)(\S+)""",  # .netrc
        r"""((?:^|\s)(?:-u|--user|--proxy-user)[ =]["']?[^\s:"']+:)([^\s"']+)""",  # curl
        r"""(\bsshpass\s+-p\s*)(\S+)""",
        r"""(\bpass[ ]phrase(?:[ ]is|\s*[:=])\s*)([^\s"']+|"[^"]*"|'[^']*')""",
    )
]
#: `--key value` within a text; `<key>value</key>`; a block of YAML; a pair of a list. Groups as above.
_PAIRS = [
    re.compile(pattern)
    for pattern in (
        r"""(?P<before>(?<!\S)--(?P<key>[A-Za-z][\w-]*)[ \t]+)"""
        r"""(?P<value>(?P<quote>["']).*?(?P=quote)|[^\s"'-]\S*)""",
        r"""(?P<before><(?:[\w-]+:)?(?P<key>[\w.-]+)(?:\s[^<>]*)?>)"""
        r"""(?P<value>[^<>]+)(?=</(?:[\w-]+:)?(?P=key)>)""",
        r"""(?m)(?P<before>^(?P<indent>[ \t]*)(?P<key>[\w.-]+):[ \t]*[|>][+-]?\d?[ \t]*\n(?P=indent)[ \t]+)"""
        r"""(?P<value>\S.*(?:\n(?:(?P=indent)[ \t]+\S.*|[ \t]*(?=\n(?P=indent)[ \t]+\S)))*)""",
        r"""(?P<before>[\[(]\s*(?P<mark>["'])(?P<key>[\w-]+)(?P=mark)\s*,\s*)"""
        r"""(?P<value>(?P<quote>["']).*?(?P=quote))(?=\s*[\])])""",
    )
]
#: Words of a sentence after the name of an option.
_CONNECTING = frozenset(
    {"and", "are", "as", "for", "from", "if", "in", "is", "needs", "of", "on", "or", "to", "with"}
)
_NO_VALUES = frozenset({"", "null", "none", "true", "false", "~", MASK, "|", ">", "|-", ">-", "|+", ">+"})
_QUERY = re.compile(r"((?:^|[?&;,\s#:])([\w.-]+)=)([^&;#\s\"']+)")
# W&B's classic keys have the format of a git commit, Azure's that of an MD5 sum; those are kept by their key.
_HEX = re.compile(r"(?<![0-9a-fA-F/@-])(?:[0-9a-f]{40}|[0-9a-fA-F]{32})(?![0-9a-fA-F-])")
_DIGEST_KEY = re.compile(r"(revision|commit|sha\d*|hash|md5|digest|checksum|etag|uuid|id)$", re.IGNORECASE)
#: Random bytes in Base64, as the secret keys of AWS and Azure; shorter ones are like ordinary names.
_BASE64 = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{40,}={0,2}(?![A-Za-z0-9+/=])")
#: From a kind of letter to the next: small to capital, and to and from digits.
_ODD_CHANGES = frozenset({"aA", "A0", "0A", "a0", "0a"})
#: Last words of keys that are no secrets after one of the plain words.
_WITH_PLAIN_MEANING = ("token", "key", "pass")
#: A metric, such as pass@8.
_RATE = re.compile(r"(.*_)?pass(es)?_?\d+")
_COUNTED = re.compile("keys|tokens", re.IGNORECASE)
_SMALL = re.compile(r"\d{1,3}")
_ASSIGNMENT = re.compile(r"(\s*-{0,2}\s*([\w.-]+)\s*[:=]\s*)(.*)", re.DOTALL)


def redact(text: str, key: str = "") -> str:
    """Returns `text` without secrets; `key` is the key whose value `text` is, if any."""
    if _is_secret(key) and not _is_count(key, text):
        return MASK if text.strip() not in {"", "null", "None"} else text
    for pattern in _PLACES:
        text = pattern.sub(rf"\g<1>{MASK}", text)
    text = _with_masked_pairs(text)
    for pattern in _PAIRS:
        text = pattern.sub(lambda match: _masked(match, _is_secret_in_pair(match)), text)
    text = _PLAIN.sub(
        lambda match: _masked(match, _is_secret_in_text(*match.group("key", "before", "value"))), text
    )
    text = _QUERY.sub(lambda match: match[1] + (MASK if _is_secret(match[2], "key|sig") else match[3]), text)
    text = _PATTERNS["secret_values"].sub(MASK, text)
    if _DIGEST_KEY.search(key):
        return text
    text = _BASE64.sub(lambda match: MASK if _is_random(match[0]) else match[0], text)
    return _HEX.sub(MASK, text)


def _with_masked_pairs(text: str) -> str:
    """The text with masks for values of secret keys in quotes, also within the value of another key."""
    done: list[str] = []
    place = 0
    while match := _IN_QUOTES.search(text, place):
        is_secret = _is_secret(match["key"])
        done += [text[place : match.start()], _masked(match, True) if is_secret else match["before"]]
        place = match.end() if is_secret else match.end("before")
    return "".join([*done, text[place:]])


def _is_secret_in_pair(match: re.Match[str]) -> bool:
    """Whether the value of a match of `_PAIRS` is a secret."""
    key = match["key"]
    value = match["value"].strip("\"'")
    if not _is_secret(key) or value in _CONNECTING or _is_count(key, value):
        return False
    may_be_a_word = match["before"].startswith(
        ("--", "[", "(")
    )  # an option in a sentence, or a list of names
    is_word = may_be_a_word and _PATTERNS["ordinary_words"].fullmatch(key)
    return not is_word or _has_form_of_secret(value)


def _masked(match: re.Match[str], is_secret: bool) -> str:
    """The text of a match, with the mask for its value if that is a secret."""
    value = match["value"]
    quote = match.groupdict().get("quote") or ""
    if not is_secret or value.strip("\\\"'").lower() in _NO_VALUES:
        return match[0]
    return f"{match['before']}{quote}{MASK}{quote}"


def _is_secret_in_text(key: str, before: str, value: str) -> bool:
    """Whether the value of a key in a text, which may be a sentence, is a secret."""
    if not _is_secret(key) or key.lower().endswith("authorization"):  # its scheme is none
        return False
    if not _PATTERNS["ordinary_words"].fullmatch(key) or before == f"{key}=":
        return True
    return _has_form_of_secret(value)


def _has_form_of_secret(value: str) -> bool:
    return bool(re.fullmatch(r"(?=.*\d)(?=.*[A-Za-z])[\w+=-]{8,}", value))


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
        named = value.get("name")  # a pair, as Kubernetes writes variables of the environment
        secret_keys = {"value"} if isinstance(named, str) and _is_secret(named) else set()
        return {k: redact_tree(v, str(k), is_secret=is_secret or k in secret_keys) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item, key, is_secret=is_secret) for item in value]
    if is_secret and not _is_count(key, value):
        return value if value is None or value == "" or isinstance(value, bool) else MASK
    return redact(value, key) if isinstance(value, str) else value


def is_masked(value: Any) -> bool:
    """Whether a value read from a recorded spec is masked, or a list or section that contains one."""
    return repr(MASK) in repr(value)


def _is_secret(key: str, also: str = r"\0") -> bool:
    """Whether values of a key are secrets; `also` matches further secret names."""
    *above, own = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().split(".")
    if above and _PATTERNS["form_words"].fullmatch(own):
        own = above[-1]
    words = re.split(r"[_-]+", own)
    while len(words) > 1 and _PATTERNS["form_words"].fullmatch(words[-1]) and not _RATE.fullmatch(own):
        words.pop()
    *before, last = words
    if not _RATE.fullmatch(own):
        last = last.rstrip("0123456789")
    if before and _PATTERNS["plain_words"].fullmatch(before[-1]) and last.startswith(_WITH_PLAIN_MEANING):
        return False
    secret = _PATTERNS["secret_words"]
    return bool(secret.fullmatch(last) or secret.fullmatch("".join(words[-2:])) or re.match(also, last))


def _is_count(key: str, value: Any) -> bool:
    """Whether it is a small number of keys or tokens, no secret."""
    return bool(_COUNTED.fullmatch(key.rpartition(".")[2]) and _SMALL.fullmatch(str(value)))


def _is_random(text: str) -> bool:
    """Whether capitals, small letters and digits alternate as in random text.

    The start of a word, a capital before a small letter, and the parts of a path do not count.
    """
    kinds = re.sub("[0-9]", "0", re.sub("[A-Z]", "A", re.sub("[a-z]", "a", text)))
    changes = sum(first + then in _ODD_CHANGES for first, then in pairwise(kinds))
    return {"A", "a", "0"} <= set(kinds) and changes >= len(text) / 5


def _redact_assignment(text: str) -> str:
    match = _ASSIGNMENT.fullmatch(text)
    return match[1] + redact(match[3], match[2]) if match else redact(text)
