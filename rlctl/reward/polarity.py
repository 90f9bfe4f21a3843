"""The yes or no that a response states, perhaps with a reason: "No, because 4 divides it."."""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.answer import MAX_CHARS, own_part, places, sentence_around
from rlctl.reward.assertion import is_asserted

#: Ground truths that this module grades.
POLAR = {"yes", "no", "true", "false"}
_POLAR_WORD = lazy_pattern(r"\b(?:yes|no|true|false)\b", re.IGNORECASE)
#: Such a word that is an answer: not "no integer", "yes or no".
_POLAR_ANSWER = (
    r"[\s*_\"'`({\[$]*(?:\\(?:text\w*|math\w+)\s*\{\s*)?(?P<word>yes|no|true|false)\b"
    r"(?!\s*(?:or|and|/)\s*(?:yes|no|true|false)\b)"
    r"(?=[\s*_\"'`)}\]$]*(?:[.,;:!—–(-]|\n|$"
    r"|\b(?:indeed|of course|because|since|as|it|they|there|this|that|he|she|for|so|we|when|if)\b))"
)
_POLAR_START = lazy_pattern(_POLAR_ANSWER, re.IGNORECASE)
_POLAR_ANNOUNCED = lazy_pattern(
    rf"\b(?:answer|statement|claim|conclusion)\b(?:\s+to\b[^.\n]{{0,80}}?)?[\s*_]*(?:\bis\b|:"
    rf"|=)[\s*_]*:?{_POLAR_ANSWER}",
    re.IGNORECASE,
)
_POLAR_SENTENCE = lazy_pattern(
    rf"(?:^|(?<=[.!?:]\s)|(?<=\n))[\s#>*_-]*(?:(?:so|thus|therefore|hence|then|in (?:short|conclusion)|it is"
    rf"|wait|actually|sorry|hmm|no wait|no doubt|correction|absolutely|certainly|definitely"
    rf"|clearly|of course)\b[,:.]?\s*)*{_POLAR_ANSWER}",
    re.IGNORECASE,
)
#: A condition after such a word, by which it is no answer: "True, but only if x > 0; otherwise false."
_CONDITIONAL = lazy_pattern(
    r"[^.!?\n]{0,200}?(?:\bbut only\b|\bunless\b|\bdepend(?:s|ing) on\b"
    r"|\b(?:otherwise|else),?\s+(?:(?:it|that)(?:\s+is|['’]s)\s+)?(?:yes|no|true|false)\b(?!\s+\w)"
    r"|\b(?:yes|no|true|false)\s+(?:otherwise|in (?:others?|the other)|else)\b)",
    re.IGNORECASE,
)
_QUESTION_MARKED = lazy_pattern(r"(?<![^.!?\n])[^.!?\n]{0,500}\?")


def polarity(response: str) -> str | None:
    """The yes, no, true or false that a response states, perhaps with a reason; None: none, or two.

    A box, tag or announcement decides, else the sentences that begin with one of these words.
    """
    said = next(places(response), None)
    if said and said.is_marked:
        words = {word.casefold() for word in _POLAR_WORD.findall(said.text)}
        return words.pop() if len(words) == 1 and _POLAR_START.match(said.text) else None
    text = _QUESTION_MARKED.sub("", _ends(own_part(response, evidence=_POLAR_WORD)))
    stated = list(_POLAR_ANNOUNCED.finditer(text))[-1:] or list(_POLAR_SENTENCE.finditer(text))
    for found in stated:
        before, after = sentence_around(text, found.start("word"), found.end("word"))
        if not is_asserted(before, "") or _CONDITIONAL.match(after):
            return None
    words = {found["word"].casefold() for found in stated}
    return words.pop() if len(words) == 1 else None


def _ends(text: str) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= 2 * MAX_CHARS else f"{text[:MAX_CHARS]}\n{text[-MAX_CHARS:]}"
