"""The words by which statements are recognised (`statements.toml`), and the tokens of a sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path

from rlctl.lazy import lazy_pattern

LISTS = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))


def words_of(key: str, section: str | None = None) -> frozenset[str]:
    """The words of a key of `statements.toml`."""
    return frozenset((LISTS[section] if section else LISTS)[key].split())


def _inflected(verb: str) -> list[str]:
    stem = verb[:-1] if verb.endswith("e") else verb
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return [verb, f"{verb[:-1]}ies", f"{verb[:-1]}ied", f"{verb}ing"]
    third = f"{verb}es" if verb.endswith(("s", "x", "ch", "sh", "o")) else f"{verb}s"
    return [verb, third, f"{stem}ed", f"{stem}ing"]


COMMANDS = words_of("verbs")
VERBS = words_of("forms").union(*map(_inflected, COMMANDS))
BETWEEN, QUANTITIES, LEADS, UNSURE = map(words_of, ("between", "quantities", "leads", "unsure"))
AFTER, PREPOSITIONS, ARTICLES, NAMES = map(words_of, ("after", "prepositions", "articles", "names"))
UNITS, ARITHMETIC, COMPARES = map(words_of, ("units", "arithmetic", "compares"))
WHICH_NUMBER, PARTS, ORDINALS = map(words_of, ("which_number", "parts", "ordinals"))
CHANGES = words_of("changes", "following")
COPULAS = frozenset({"is", "are", "was", "were", "equals", "be", "been"})
#: Words of an amount that do not change the value before them.
FRACTIONS = frozenset({"half", "quarter", "late", "early", "odd", "over"})

_FORMATTING = lazy_pattern(
    r"\\tag\*?\s*\{[^{}]*\}|\^?\s*\{?\\circ(?![a-z])\}?"
    r"|\\(?:blacksquare|checkmark|square|qed|q?quad|hfill)(?![a-z])"
    r"|\\(?:text\w*|math\w+|boxed|left|right|[,;:! ()\[\]])(?![A-Za-z])"
    r"|(?<!\d)\*|\*(?!\s*\d)|[|$_`\"“”«»{}~\\]|</?\w+>"
)
_TOKEN = lazy_pattern(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|[$€£]?\d[\d.,/]*(?<=\d)|\S")
NUMBER = lazy_pattern(r"\d[\d.,]*(?<=\d)")
#: Letters that English words hardly have.
ACCENTED = lazy_pattern(r"(?![\u0370-\u03ff])[^\W\d_a-zA-ZéèñöüïçÉ]")
_ORDINALS = ("tieths", "eenths", "redths", "sandths", "llionths")


def without_formatting(text: str) -> str:
    """A text without LaTeX, Markdown and quotation marks."""
    return _FORMATTING.sub(" ", text)


def tokens_of(text: str) -> list[str]:
    """The words, numbers and signs of a text without formatting."""
    return _TOKEN.findall(text)


def is_word(token: str) -> bool:
    """Whether a token is a word."""
    return token[0].isalpha()


def is_unsure(word: str) -> bool:
    """Whether a word denies or doubts."""
    return word in UNSURE or word.endswith(("n't", "n’t"))


def changes(word: str, token: str = "") -> bool:
    """Whether a word makes another value of a number, or no statement of a sentence."""
    is_month = token == "May"
    return not is_month and (word in ARITHMETIC - FRACTIONS or word in CHANGES or is_unsure(word))


def is_plural(word: str) -> bool:
    """Whether a word may be a unit: a plural or a measure, not "hundredths"."""
    is_ending = word.endswith(("s", "children", "men")) and not word.endswith(("ss", "'s", "’s", *_ORDINALS))
    return word in UNITS or (len(word) > 2 and is_ending)
