"""The language of a sentence, and its numbers in the notation that graders read.

`languages.toml` lists the languages whose denials are known. A sentence in any other language may deny the
number in it ("Ke karabo ha se 72."), so it states nothing.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rlctl.lazy import lazy_pattern
from rlctl.reward import number_words
from rlctl.reward.statement_words import UNITS, VERBS

_ENTRIES = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))


#: Beginnings of the nouns for the answer that languages in Latin letters without accents have.
_NOUNS = [
    noun
    for entry in _ENTRIES.values()
    for noun in re.findall(r"(?:^|\|)([a-z]{4,})", entry.get("answer", ""))
]


def may_announce(text: str) -> bool:
    """Whether a text may have a noun for the answer in a language other than English."""
    return not text.isascii() or any(map(text.lower().__contains__, _NOUNS))


def in_languages(key: str) -> str:
    """The alternatives of a key of `languages.toml` over all languages."""
    return "|".join(entry[key] for entry in _ENTRIES.values() if key in entry)


@dataclass(frozen=True, slots=True)
class Language:
    """A language that a sentence is written in."""

    name: str  # of an entry of `languages.toml`; "" if there is none for it
    has_decimal_comma: bool = False

    @property
    def is_known(self) -> bool:
        """Whether its denials are known."""
        return bool(self.name)


_LANGUAGES = {name: Language(name, entry.get("comma", False)) for name, entry in _ENTRIES.items()}
ENGLISH = _LANGUAGES["english"]
_UNKNOWN = Language("")
_MIN_ENGLISH_FORM = 5
#: English verbs with -ed and -ing, and units in full, which other languages do not have.
_ENGLISH_FORMS = {verb for verb in VERBS if verb.endswith(("ed", "ing")) and len(verb) >= _MIN_ENGLISH_FORM}
_ENGLISH_FORMS |= {f"{unit}s" for unit in UNITS if len(unit) >= _MIN_ENGLISH_FORM}
_ENGLISH_WORDS = _ENGLISH_FORMS.union(_ENTRIES["english"]["words"].split(), number_words.words_of("english"))
#: Minimum length of number words that show the language; "once" is also English.
_MIN_LENGTH = 5
#: Word → the languages in which it is frequent.
_NAMES: dict[str, list[str]] = {}
for _name, _entry in _ENTRIES.items():
    for _word in _entry.get("words", "").split():
        _NAMES.setdefault(_word, []).append(_name)
for _name in _ENTRIES:
    for _word in number_words.words_of(_name):
        if len(_word) >= _MIN_LENGTH or _name == "english":
            _NAMES.setdefault(_word, []).append(_name)
#: Scripts, those of fewer languages first: Persian has letters that Arabic lacks, Japanese has Chinese ones.
_SCRIPTS = [
    (lazy_pattern(_ENTRIES[name]["script"], re.IGNORECASE), _LANGUAGES[name])
    for name in sorted(_ENTRIES, key=lambda name: name in {"arabic", "persian", "chinese"})
    if "script" in _ENTRIES[name]
]
#: Phrases of short words that show the language.
_PHRASES = [
    (lazy_pattern(entry["phrase"], re.IGNORECASE), _LANGUAGES[name])
    for name, entry in _ENTRIES.items()
    if "phrase" in entry
]
#: Letters that are in no known script, or that only languages without an entry have.
_OTHER_LETTER = lazy_pattern(r"[\u0370-\u1dff\u1ea0-\u1ef9\u2d00-\ud7ff]")
_NO_SCRIPT = lazy_pattern(
    r"[әғқңөұүһҗҙҫѓќҷӣӯӡӑӗђћњљџўңҥҡҳջ]|[\u0530-\u058f\u10a0-\u10ff\u1200-\u139f\u1780-\u17ff]"
)
_LATEX = lazy_pattern(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+|\$[^$\n]*\$|\\\(.*?\\\)|<[^<>\n]*>")
_WORD = lazy_pattern(r"(?<!\d)[^\W\d_]+")
#: Minimum share of a language's frequent words among the words of a sentence; English has a long list.
_SHARE, _ENGLISH_SHARE = 0.34, 0.25
#: A sentence of fewer words whose language is not recognised may be a name, a label or a unit: "72 clips".
_MIN_WORDS = {True: 3, False: 2}  # by whether it begins with its number
_BEGINS_WITH_NUMBER = lazy_pattern(r"[^\w]*\d")
_LABEL = lazy_pattern(r"[:=]\s*\W{0,4}\d")


def language_of(text: str, otherwise: Language = ENGLISH) -> Language:
    """The language of a sentence or a whole response.

    Args:
        otherwise: of a text without words, such as "72 km".
    """
    text = _LATEX.sub(" ", text)
    if not text.isascii() and _OTHER_LETTER.search(text):
        if _NO_SCRIPT.search(text.casefold()):
            return _UNKNOWN
        for script, language in _SCRIPTS:
            if script.search(text):
                return language
    for phrase, language in _PHRASES:
        if phrase.search(text):
            return language
    words = [word for word in _WORD.findall(text) if len(word) > 1 or not word.isascii()]
    is_ascii = text.isascii()
    if is_ascii and words and 2 * sum(word.lower() in _ENGLISH_WORDS for word in words) > len(words):
        return ENGLISH
    names = Counter(name for word in words for name in _languages_of(word.casefold()))
    if names:
        name, count = names.most_common(1)[0]
        if names[otherwise.name] == count:
            name = otherwise.name
        is_name = [word[0].isupper() and word.casefold() not in _NAMES for word in words]
        num_words = max(1, len(words) - sum(is_name))
        is_english = name == ENGLISH.name and is_ascii
        is_sure = is_english or any(
            (len(word) > 2 or not word.isascii()) and name in _languages_of(word.casefold()) for word in words
        )
        if is_sure and count >= num_words * (_ENGLISH_SHARE if is_english else _SHARE):
            return _LANGUAGES[name]
    is_label = _LABEL.search(text) or len(words) < _MIN_WORDS[bool(_BEGINS_WITH_NUMBER.match(text))]
    return otherwise if is_label else _UNKNOWN


@lru_cache(maxsize=4096)
def _languages_of(word: str) -> list[str]:
    """The languages in which a word is frequent, or a number in one word, such as "zweiundsiebzig"."""
    names = _NAMES.get(word)
    if names is None:
        names = [name for name in number_words.COMPOUNDING if number_words.is_number(word, name)]
    return names


#: A number with its separators, apart from those in brackets such as (3,5). In order: groups of three digits,
#: a decimal comma. A comma in LaTeX may stand in braces.
_COMMA = r"(?:,|\{,\})"
_GROUPED = lazy_pattern(
    rf"(?<![\w.,}}])(?<!\d )([1-9]\d{{0,2}})((?:\.\d{{3}})+|(?:[ ]\d{{3}})+)(?:{_COMMA}(\d+))?(?![\d]|[.,]\d)"
)
_DECIMAL = lazy_pattern(rf"(?<![\w.,}}])(?<!\d )(\d+){_COMMA}(\d+)(?![\d]|(?:,|\{{,\}}|\.)\d)")
_OPENING = lazy_pattern(r"(?:[(\[]|\\\{)\s*[-+]?$")
_CLOSING = lazy_pattern(r"\s*(?:[)\]]|\\\})")


def with_decimal_points(sentence: str) -> str:
    """A sentence of a language with decimal commas, with its numbers as in English: 1.234,5 is 1234.5."""
    return _DECIMAL.sub(_with_point, _GROUPED.sub(_with_point, sentence))


def _with_point(number: re.Match[str]) -> str:
    text = number.string
    if _OPENING.search(text, max(0, number.start() - 4), number.start()) and _CLOSING.match(
        text, number.end()
    ):
        return number[0]
    *whole, decimals = number.groups()
    digits = re.sub("[. ]", "", "".join(whole))
    return digits if decimals is None else f"{digits}.{decimals}"
