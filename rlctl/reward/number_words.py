"""Numbers in words, in the languages of `number_words.toml`, as figures."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlctl.lazy import lazy_pattern

_ENTRIES = tomllib.loads(Path(__file__).with_name("number_words.toml").read_text(encoding="utf-8"))
_LETTER = r"[^\W\d_]"
#: Text after a number that continues as a decimal fraction: "twelve point five".
_POINT = lazy_pattern(
    r"\s?(?:point|coma|komma|virgule|virgola|vírgula|запятая|целых|点|點)\s*[^\W\d_]+", re.IGNORECASE
)
_END = lazy_pattern(r"\W*$")


@dataclass(frozen=True, slots=True)
class _Words:
    """The number words of a language."""

    values: dict[str, int]
    conjunctions: frozenset[str]
    alone: frozenset[
        str
    ]  # numbers only at the end of a sentence, unless another number word precedes or follows
    is_reversed: bool  # a unit may precede its tens
    is_and_after_hundreds: bool
    words: re.Pattern[str]  # one number word or conjunction
    number: re.Pattern[str]  # number words in a row

    @classmethod
    def of(cls, language: str) -> _Words:
        entry = _ENTRIES[language]
        pairs = (pair.split("=") for pair in entry["words"].split())
        values = {word.replace("_", " "): int(value) for word, value in pairs}
        conjunctions = entry.get("and", "").split()
        alternatives = sorted(values, key=len, reverse=True)
        word = "|".join(map(re.escape, alternatives))
        both = "|".join(map(re.escape, sorted([*alternatives, *conjunctions], key=len, reverse=True)))
        between = rf"(?:[\s-]|\b(?:{'|'.join(map(re.escape, conjunctions)) or '-'})\b)*"
        boundary = rf"(?!{_LETTER})" if language != "chinese" else ""
        if entry.get("is_compound"):
            glue = r"[\s-]*" if entry.get("has_spaces") else "-?"
            number = rf"(?:{word})(?:{glue}(?:{both}))*"
        else:
            number = rf"(?:{word}){boundary}(?:{between}(?:{word}){boundary})*"
        start = rf"(?<!{_LETTER})" if language != "chinese" else ""
        return cls(
            values,
            frozenset(conjunctions),
            frozenset(entry.get("alone", "").split()),
            entry.get("is_reversed", False),
            entry.get("is_and_after_hundreds", False),
            lazy_pattern(both, re.IGNORECASE),
            lazy_pattern(f"{start}{number}{boundary}", re.IGNORECASE),
        )

    def value(self, text: str) -> tuple[int, int, int]:
        """The longest number at the start of a match of `number`: its value, number of words, and end."""
        total = num_words = end = 0
        is_after_and = False
        for word in self.words.finditer(text):
            name = word[0].casefold()
            if name in self.conjunctions and name not in self.values:
                if self.is_and_after_hundreds and total % 100:
                    break
                is_after_and = True
                continue
            added = self._added(total, self.values[name], is_after_and) if num_words else self.values[name]
            if added is None:
                break
            total += added
            num_words += 1
            end = word.end()
            is_after_and = False
        return total, num_words, end

    def _added(self, total: int, value: int, is_after_and: bool) -> int | None:
        """What a word adds to the number before it; None: it begins another number."""
        power = 10 ** (len(str(value)) - 1)
        if value == power and value >= 10 and (below := total % value):
            return below * value - below
        tens = total % 100
        if value < 10:
            is_free = total % 10 == 0
        elif value < 100:
            is_free = (
                tens == 0
                or (value < 20 and tens in {60, 80})
                or (self.is_reversed and is_after_and and tens < 10)
            )
        else:
            is_free = total % (power * 10) == 0
        return value if is_free and total > 0 else None


_of = lru_cache(maxsize=None)(_Words.of)
#: Languages that write a number of several words as one.
COMPOUNDING = [name for name, entry in _ENTRIES.items() if entry.get("is_compound") and name != "chinese"]
#: Shorter words are also other words.
_MIN_LENGTH = 8
#: A number in English words.
SPELLED = _of("english").number


def words_of(language: str) -> list[str]:
    """The number words of a language; none if they are not known."""
    return list(_of(language).values) if language in _ENTRIES else []


def is_number(word: str, language: str) -> bool:
    """Whether a word is a number of at least `_MIN_LENGTH` letters."""
    return len(word) >= _MIN_LENGTH and bool(_of(language).number.fullmatch(word))


def value_of_word(word: str) -> int | None:
    """The value of one number word in English; None for any other word."""
    return _of("english").values.get(word)


def in_figures(text: str, language: str = "english") -> str:
    """A text with its numbers in words in figures; unchanged if the language's number words are not known."""
    language = "chinese" if language == "japanese" else language
    if language not in _ENTRIES:
        return text
    words = _of(language)
    shown = ""
    start = 0
    while match := words.number.search(text, start):
        value, num_words, length = words.value(match[0])
        end = match.start() + length
        is_number = bool(
            num_words > 1 or match[0][:length].casefold() not in words.alone or _END.match(text, end)
        )
        decimals = _POINT.match(text, end)
        if decimals:
            is_number = False
            end = decimals.end()
        figures = f" {value} " if language == "chinese" else str(value)
        shown += text[start : match.start()] + (figures if is_number else text[match.start() : end])
        start = end
    return shown + text[start:]
