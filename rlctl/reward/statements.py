"""Whether a sentence in prose states the value in it as an answer: a closed list of forms.

Denials and hedges have no end, so prose counts only if everything around its value is recognised: before
it a verb of `statements.toml`, an equals sign or a label, with a subject that doubts nothing; after it
what `rlctl.reward.continuations` knows. Other languages are read by the words next to the value.

`rlctl.reward.assertion` removes what is denied, so that an earlier or later answer can be read;
nothing here finds answers, it only refuses them.
"""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.continuations import CROSSES, FOR_WHICH, closes, unit_end
from rlctl.reward.foreign_statements import is_doubted, is_statement_in_another_language
from rlctl.reward.statement_words import (
    ACCENTED,
    ARTICLES,
    BETWEEN,
    COMMANDS,
    COMPARES,
    COPULAS,
    LEADS,
    NAMES,
    NUMBER,
    QUANTITIES,
    UNITS,
    VERBS,
    WHICH_NUMBER,
    changes,
    is_unsure,
    is_word,
    tokens_of,
    without_formatting,
    words_of,
)

#: A new clause, which states its own value.
_CLAUSE = lazy_pattern(
    r"[;—–]|:(?=.*\w)|\b(?:but|so|thus|therefore|hence|then|rather|instead|meaning|giving)\b[,:]?", re.I
)
#: A condition without numbers: "If we ignore the tax, it is 27", "Were there no tax, it would be 27".
_CONDITION = lazy_pattern(
    r"\A\W*(?:(?:so|but|and|then)\W+)*(?:if|were|had|should|whether|unless|without|ignoring"
    r"|neglecting|assuming|suppos\w+|excluding"
    r"|except|provided)\b[^\d]*\Z",
    re.I,
)
#: A multiple or part of something, whose value a sentence says: "Half of the answer is 27".
_MULTIPLE = lazy_pattern(
    r"\b(?:half|twice|double|triple|thrice|quarter|third)\b[^\d]*\b(?:is|are|was|were|equals)\W*\Z"
    r"|\b(?:half|twice|double|triple)\W*\Z",
    re.I,
)
#: A sentence about part of the answer: "The first root is 27", "So far we have 27".
_PART = lazy_pattern(
    r"\bso far\b|\b(?:one|first|second|third|another|other|some|an?)\b(?: of (?:the|its|our))?(?: \w+)?"
    r" (?:roots?|solutions?|zeros?|candidates?|answers?|options?|values?|possibilit(?:y|ies)|choices?)\b"
    r"|\b(?:it|answer|number|result|value) contains\b"
    r"|\b(?:every\w*|all|any\w*|none) but\b",
    re.I,
)
#: A question without its mark, what is only possible or past: "Is it 27", "it could be 27".
_INVERTED = lazy_pattern(
    r"\A\W*(?:is|are|was|were|does|do|did|can|could|should|would|will)\b"
    r"|\b(?:could|might|may)(?: \w+)? be\W*\Z|\bused to be\b|\bcould \w+ly\b",
    re.I,
)
#: A negation that only describes the subject: "the number that are not eaten".
_DESCRIBES = lazy_pattern(
    r"\b(?:that|who|which)(?: \w+)? (?:not|never|cannot|\w+n['’]t)\b|\A\W*(?:no|yes)[,:]", re.I
)
#: A number that only names something: "The bus number is 63", "Room number 63".
_WHICH = "|".join(sorted(WHICH_NUMBER | ARTICLES))
_NAME = lazy_pattern(rf"\b(?!(?:{_WHICH})\b)[a-z]+['’]?s? number\W*(?:(?:is|was|are)\W*)?\Z", re.I)
_COMMA = lazy_pattern(r",\s+(?=[^\W\d])")
#: Before a value that begins a clause.
_THERE = lazy_pattern(r"\b(?:there (?:is|are|was|were|will be)|means|that)\W*\Z", re.I)
_IN_ENGLISH = lazy_pattern(r"\banswers?\b", re.I)
_ANSWER_TO = lazy_pattern(r"\banswers?\s+(?:to|for|of)\b.*(?=\b(?:is|was|be|equals)\b|[=:])", re.I | re.S)
_IS_ANSWER = lazy_pattern(r"\banswer(?: is|:)\s*\Z", re.I)
#: An equation whose result follows: "20 + 6 =".
_EQUATION = lazy_pattern(r"\d[)%\s]*[-–−+*/×÷·xX(][-–−+*/×÷·xX().,%$€£\d\s]*=\s*[$€£]?\s*\Z")
#: "It is none other than 27."
_OTHER_THAN = lazy_pattern(
    r"\b(?:(?:I have|there is) no|without(?: an?y?)?) doubt\b(?: that)?"
    r"|\b(?:none|nothing|(?:\w+n['’]t|\w+not) be anything) other than\b"
)
#: "It takes at least 27 days": a bound that the problem asks for.
_BOUND_OF_NEED = lazy_pattern(r"([a-z]+)\s+(?:at least|up to|no (?:more|less|fewer) than)\s*\Z", re.I)

_SUPPOSES = words_of("supposes")
_PRONOUNS = lazy_pattern(r"(?:it|that|this|he|she|there|here|which|answer|total|what)['’]s\Z")
_TO = words_of("to")
_CHANGED_BY = lazy_pattern(
    r"\b(?:increas|decreas|ris|rose|grow|grew|drop|fall|fell|reduc|rais|up|chang)\w*\b"
)
_PROPOSES, _ANNOUNCING = map(words_of, ("proposes", "announcing"))


def is_statement(before: str, value: str, after: str) -> bool:
    """Whether the sentence `before + value + after` states its value as an answer."""
    return _is_in_english(before, value, after) or is_statement_in_another_language(before, value, after)


def _is_in_english(before: str, value: str, after: str) -> bool:
    before = _OTHER_THAN.sub("is", without_formatting(before))
    if ACCENTED.search(before) or ACCENTED.search(after):
        return False
    rest = tokens_of(without_formatting(FOR_WHICH.sub(" ", after)))
    if _EQUATION.search(before):
        changed = any(changes(token.casefold(), token) or token in CROSSES for token in rest)
        is_comparison = len(rest) > 2 or COMPARES.isdisjoint(rest)
        return not changed or (is_comparison and closes(rest, value, is_subject=True))
    if any(pattern.search(before) for pattern in (_CONDITION, _MULTIPLE, _PART, _INVERTED, _NAME)):
        return False
    clause = _COMMA.split(_CLAUSE.split(before)[-1])[-1]
    if NUMBER.search(before) and clause.rstrip().endswith(","):
        clause = ","  # "18 is wrong, 19 is right"
    bound = _BOUND_OF_NEED.search(clause)
    if bound and bound[1].casefold() in VERBS - COPULAS:
        clause = clause[: bound.end(1)]
    subject = tokens_of(_DESCRIBES.sub("", clause))
    if rest[:1] and rest[0] in COMPARES and _IS_ANSWER.search(clause):
        return False  # "The answer is 27 more"
    if rest[:1] == ["times"] and not VERBS.isdisjoint(token.casefold() for token in subject[-4:]):
        subject = []  # "caught the ball 27 times"
    has_unit = unit_end(rest, value) > 0
    is_subject = (
        subject[-1:] in ([","], ["and"], ["="])
        or LEADS.issuperset(token.casefold() for token in subject)
        or _THERE.search(clause)
    )
    words = _without_object(subject)
    is_command = len(words) == 1 and words[0] in COMMANDS and not before.replace(clause, "").strip()
    if is_command or (words[-1:] == ["and"] and value not in words):
        return False
    introduced = _introduces(words, value.strip(), [token.casefold() for token in rest], has_unit=has_unit)
    return introduced and closes(rest, value, is_subject=bool(is_subject))


def is_announcement(text: str) -> bool:
    """Whether a text such as "So the final answer to this is" announces an answer of its own."""
    text = _OTHER_THAN.sub("", _ANSWER_TO.sub("answer", _DESCRIBES.sub("", without_formatting(text))))
    clause = _COMMA.split(_CLAUSE.split(text)[-1])[-1]
    if _IN_ENGLISH.search(clause) is None:
        return not is_doubted(clause)
    return all(token in _ANNOUNCING or not is_word(token) for token in tokens_of(clause.casefold()))


def _without_object(tokens: list[str]) -> list[str]:
    """The words before a value, without the person between verb and value: "it took Leo 45 minutes"."""
    end = len(tokens)
    while end > 1 and tokens[end - 1][0].isupper() and tokens[end - 2].casefold() not in LEADS | {",", "."}:
        end -= 1
    is_object = end > 0 and tokens[end - 1].casefold() in VERBS
    return [token.casefold() for token in (tokens[:end] if is_object else tokens)]


def _introduces(  # noqa: PLR0911, PLR0912
    tokens: list[str], value: str, after: list[str], *, has_unit: bool
) -> bool:
    """Whether the words before a value end in a form that states it."""
    if any(map(is_unsure, tokens)) or not _PROPOSES.isdisjoint(tokens):
        return False
    while tokens and (tokens[-1] in BETWEEN or tokens[-1] in "([‘'#"):
        tokens = tokens[:-2] if tokens[-2:] in (["of", "them"], ["of", "us"]) else tokens[:-1]
    if all(token in LEADS or token == "," for token in tokens):
        return True
    last = tokens[-1]
    earlier = tokens[:-1]
    match last:
        case "=" | "≈":
            return not earlier or earlier[0] not in _SUPPOSES
        case "and":
            return True
        case "⇒" | "→" | "∴":
            return True
        case ":":
            return not (QUANTITIES | NAMES).isdisjoint(earlier) or (len(earlier) > 1 and earlier[-1] in VERBS)
        case ",":
            return not VERBS.isdisjoint(after)
        case ">":
            return earlier[-1:] in (["="], ["-"])
        case "of":
            return earlier[-1:] != [] and earlier[-1] in QUANTITIES
        case "to" if earlier[-1:] == ["up"]:
            return earlier[-2:-1] != [] and earlier[-2] in {"adds", "add", "added", "comes", "sums", "adding"}
        case "to":
            return earlier[-1:] != [] and (
                earlier[-1] in _TO or _CHANGED_BY.search(" ".join(earlier)) is not None
            )
        case "in":
            return value[:1] in set("[(") or (
                after[:1] != [] and after[0] in UNITS | {f"{unit}s" for unit in UNITS}
            )
        case "by":
            return _CHANGED_BY.search(" ".join(earlier)) is not None
        case "with":
            return len(earlier) > 1 and not VERBS.isdisjoint(earlier[-3:])
        case "for" | "at" | "after":
            return bool(earlier)
    is_past = has_unit and len(last) > 4 and last.endswith("ed")
    return last in VERBS or is_past or _PRONOUNS.match(last) is not None
