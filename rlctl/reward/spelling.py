"""The spelling of an answer without its formatting; equal spellings are equal answers of any kind."""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.answer import MATHS
from rlctl.reward.numbers import FOREIGN, legible, replaced, replacements

#: Text commands of LaTeX with their content.
WRAPPER = lazy_pattern(
    r"\\(?:text\w*|mbox|hbox|math(?:rm|bf|it)|boldsymbol|underline|operatorname)\s*\{([^{}]*)\}"
)
#: Commands of LaTeX; and words.
COMMAND = lazy_pattern(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
WORD = lazy_pattern(
    rf"(?<![^\W\d_])(?<!\\)[^\W\d_]{{3,}}|{FOREIGN}|(?<!\S)(?i:is|it|so|in|no|of|to|we|he|if|my|il|on|er|es|ha|tu|él|já)(?=[\s,]|$)"
    r"|\b(?i:it|that|there|i)['’][a-z]"
)
#: Signs of feet and inches, or minutes and seconds: 5’6”, 5'6\'\'.
_FEET, _INCHES = lazy_pattern(r"(?<=\d)[’′](?=\d|$)"), lazy_pattern(r"(?<=\d)(?:\'\'|’’|[”″])$")
TIME = lazy_pattern(r"\d:\d\d")
#: Words of three or more letters that are mathematical notation.
_NAMES = lazy_pattern(
    r"and|sqrt|a?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|lim|min|max|mod|gcd|lcm|det|inf(?:inity)?"
)
#: A row of a definition by cases: a comma, the sign of alignment, and the word before the condition.
_CASE = lazy_pattern(r"[,;.]?\s*&\s*(?:(?:if|for|when|where)\b)?\s*")
#: Texts and symbols of one meaning, with the symbol that stands for all.
_SYNONYMS = replacements("synonyms", re.IGNORECASE, r"^\s*(?:{})\s*$")


def is_words(text: str) -> bool:
    r"""Whether a text is or contains words: "no solution", `\text{(A)}`, "5 and a half"."""
    bare = WRAPPER.sub("", text)
    words = WORD.findall(COMMAND.sub(" ", bare))
    return not re.search(r"[\w\\]", bare) or any(not _NAMES.fullmatch(word) for word in words)


def unwrapped(text: str) -> str:
    """A formula without `$`, brackets or backticks around it; any other text unchanged."""
    formula = MATHS.fullmatch(text.strip().strip("`").rstrip("."))
    return next(filter(None, formula.groups())) if formula else text.strip("`")


def spelling(text: str) -> str:
    """Normalises a text's formatting; equal spellings are equal answers of any kind."""
    text = re.sub(r"(?<=,)\s*(?:\.\.\.|…)\s*$", r"\\dots ", unwrapped(legible(text)))
    text = _INCHES.sub('"', _FEET.sub("'", text.rstrip("$. \n").lstrip("$ \n")))
    while (shown := WRAPPER.sub(r" \1 ", text)) != text:
        text = shown
    if "{cases}" in text:
        text = re.sub(r"\\([gl])eq(?![a-z])", r"\\\1e", _CASE.sub("&", text))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ]|~|(?<!\w)\*\*|\*\*(?!\w)", " ", text)
    text = re.sub(r"(?<=\d)\{:\}(?=\d)", ":", text)
    text = re.sub(r"(?<=\\)[dtc](?=frac|binom)", "", text).replace("**", "^")
    text = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text)
    text = re.sub(r"\\[lcd]?dots|\.\.\.(?=[,+])", r"\\dots", text)
    text = re.sub(r"(\\[a-z]+)\s*\{(\w)\}", r"\1 \2", text)
    text = replaced(text, _SYNONYMS)
    if is_words(text) or TIME.search(text):
        text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|(?<=[a-z]{3})s\b|[\"()]", "", text.casefold())
        text = re.sub(r",?\s+and\s+", ", ", text)
    text = re.sub(r"(?<=[A-Za-z])\.|(?<=\d)\s+(?=[A-Za-z])", "", text)
    text = re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", re.sub(r"\s+", " ", text))
    return re.sub(r"^\(([A-Za-z])\)$|\{(\w)\}", r"\1\2", text)
