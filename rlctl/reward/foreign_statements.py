"""Statements in other languages than English, by the words next to the value."""

from __future__ import annotations

import re

from rlctl.lazy import lazy_pattern
from rlctl.reward.languages import in_languages, language_of
from rlctl.reward.statement_words import LISTS, NUMBER, tokens_of, without_formatting, words_of


def is_statement_in_another_language(before: str, value: str, after: str) -> bool:
    """Whether a sentence in a known language other than English states its value."""
    name = language_of(f"{before}{value}{after}").name
    lists = LISTS["languages"].get(name)
    if name == "english" or lists is None:
        return False
    sentence = without_formatting(f"{before} ‹ {after}").casefold()
    before, _, after = sentence.partition("‹")
    clause = _FOREIGN_CLAUSE.split(_CURRENCY.sub("", before))[-1].strip()
    is_hedged = _names(lists["hedges"], sentence, name) or _names(
        lists.get("denies", ""), clause + after, name
    )
    is_followed = "?" in after or any(map(NUMBER.match, tokens_of(after)[:4]))
    if is_hedged or is_followed or (not before.strip() and after.isascii()):
        return False
    if not clause or clause.endswith((":", "=", "：", "≈")) or _ENDS_WITH_IS.search(clause):
        return True
    states = [state.replace("_", " ") for state in lists["states"].split()]
    if name in _WITHOUT_SPACES:
        return clause.endswith(tuple(states)) or (name == "korean" and _COUNTER.match(after) is not None)
    verb, article = ["", "", "", *clause.split()][-3:-1]
    is_object = article in _FOREIGN_ARTICLES and verb in states
    return is_object or any(f" {clause}".endswith(f" {state}") for state in states)


def _names(words: str, text: str, language: str) -> bool:
    """Whether a text has one of the words of a language."""
    phrases = [word.replace("_", " ") for word in words.split()]
    if language in _WITHOUT_SPACES:
        return any(phrase in text for phrase in phrases)
    return any(_has(phrase, text) for phrase in phrases)


_FOREIGN_ARTICLES = words_of("foreign_articles")
_COUNTER = lazy_pattern(r"\s*(?:개|명|원|권|마리|달러|대|살|시간|분|일|킬로|미터)")


def _has(phrase: str, sentence: str) -> bool:
    return phrase in sentence and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", sentence) is not None


_WITHOUT_SPACES = frozenset({"chinese", "japanese", "korean", "thai"})
_CURRENCY = lazy_pattern(r"(?:\b(?:r|us)\s*)?[\s(\[$€£]*\Z")
_FOREIGN_CLAUSE = lazy_pattern(r"[;,，、—–]|\b(?:sino|sondern|mas|но|а|ma)\b")
_ENDS_WITH_IS = lazy_pattern(rf"(?<![^\W\d_])(?:{in_languages('is')})\s*\Z", re.I)


def is_doubted(text: str) -> bool:
    """Whether a text in a language other than English has a word by which it states nothing."""
    name = language_of(text).name
    lists = LISTS["languages"].get(name, {})
    return _names(f"{lists.get('hedges', '')} {lists.get('denies', '')}", text.casefold(), name)
