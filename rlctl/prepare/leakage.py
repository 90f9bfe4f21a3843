"""Finds training questions that occur in a benchmark or the test split.

Three kinds of match, from certain to suspected: `exact` (the same words), `masked` (the same words except for
numbers), `ngram` (13 consecutive words in common, the length of Brown et al. 2020, appendix C). Words are
compared after `compatible` and case folding. A word is a run of letters and digits, or one mathematical sign:
2 + 3 differs from 2 * 3. Other punctuation only separates words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unicodedata import decimal
from zlib import crc32

import numpy as np
import regex
from numpy.typing import NDArray

from rlctl.data.records import RowError
from rlctl.errors import UsageError
from rlctl.prepare.benchmarks import NamedFile
from rlctl.prepare.duplicates import compatible
from rlctl.prepare.recipes import Recipe
from rlctl.prepare.sources import read_records
from rlctl.prepare.transform import StagedBlock

Kind = Literal["exact", "masked", "ngram"]
#: From certain to suspected.
KINDS: tuple[Kind, ...] = ("exact", "masked", "ngram")
#: (file, kind of match) → matching rows.
Found = dict[tuple[str, Kind], list[int]]

#: An n-gram in more questions of a file than this count and this share of them is ignored: it belongs to the
#: prompt, not to a question. So does one in more than this share of the questions to compare.
COMMON_QUESTIONS, COMMON_SHARE, INSTRUCTION_SHARE = 10, 0.01, 0.5
#: Words of an n-gram; also the minimum number of words, not counting numbers, of a text compared with masked
#: numbers: shorter texts ("How much is # + #?") match by chance.
NGRAM = 13

#: One character of a script without spaces, a run of letters (with the marks that are vowels of Hindi and
#: Thai) and digits, or a sign. A minus counts only before a number or bracket, otherwise it is a hyphen.
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]|[[\p{L}\p{M}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}]]+"
    r"|[+*/^=<>]|[\p{Sm}--\p{ASCII}]|-(?=\s*[\p{Nd}(])",
    regex.VERSION1,
)
_INVISIBLE = regex.compile(r"\p{Cf}+")
_OTHER_DIGIT = regex.compile(r"[\p{Nd}--[0-9]]", regex.VERSION1)
_DIGIT = re.compile("[0-9]")


def leakage_comparison(
    rows_of: str, against: str, num_rows: int, counts: Mapping[Kind, int]
) -> dict[str, Any]:
    """How many of the `num_rows` rows of a split or file occur in a reference file; also reported if 0.

    `counts` has the matching rows by their strictest kind of match.
    """
    about: dict[str, Any] = {"rows_of": rows_of, "against": against, "of": num_rows}
    return about | {"rows": sum(counts.values())} | dict(counts)


class _QuestionKeys(NamedTuple):
    """Hashes that identify a question. Those of integers are the same in all processes."""

    exact: int  # of all words
    masked: int | None  # with each run of words that contain digits as one placeholder; None: not compared
    ngrams: set[int]  # of all n-grams of `NGRAM` words


def _keys_of(question: str) -> _QuestionKeys:
    text = compatible(question).casefold()
    if not text.isascii():
        text = _OTHER_DIGIT.sub(lambda digit: str(decimal(digit[0])), _INVISIBLE.sub("", text))
    words = _WORD.findall(text) or [question.strip()]  # a text without words, such as "?!"
    hashes = [crc32(word.encode()) for word in words]
    is_number = [_DIGIT.search(word) is not None for word in words]
    masked = None
    if 0 < sum(is_number) <= len(words) - NGRAM:
        kept = [not (here and before) for here, before in zip(is_number, [False, *is_number], strict=False)]
        shown = (0 if number else word for word, number in zip(hashes, is_number, strict=True))
        masked = hash(tuple(word for word, is_kept in zip(shown, kept, strict=True) if is_kept))
    starts = range(len(hashes) - NGRAM + 1)
    ngrams = {hash(tuple(hashes[start : start + NGRAM])) for start in starts}
    return _QuestionKeys(hash(tuple(hashes)), masked, ngrams)


@dataclass(frozen=True, slots=True)
class _Known:
    """The questions of one file."""

    exact: set[int]
    masked: set[int]
    ngrams: NDArray[np.int64]  # sorted, without those that many questions share

    def match(self, keys: _QuestionKeys) -> Kind | None:
        """The strictest kind of match."""
        if keys.exact in self.exact:
            return "exact"
        if keys.masked in self.masked:
            return "masked"
        asked = np.fromiter(keys.ngrams, np.int64)
        places = np.searchsorted(self.ngrams, asked)
        is_inside = places < len(self.ngrams)
        return "ngram" if (self.ngrams[places[is_inside]] == asked[is_inside]).any() else None


def _read(questions: Iterable[str], common_share: float) -> tuple[_Known, NDArray[np.int64]]:
    """The questions of a file, and the n-grams that more than a share of them have in common."""
    exact = set[int]()
    masked = set[int]()

    def ngrams() -> Iterator[int]:
        for keys in map(_keys_of, questions):
            if keys.exact not in exact:
                exact.add(keys.exact)
                masked.update([keys.masked] if keys.masked is not None else ())
                yield from keys.ngrams

    found, counts = np.unique(np.fromiter(ngrams(), np.int64), return_counts=True)
    is_common = counts > max(COMMON_QUESTIONS, int(common_share * len(exact)))
    return _Known(exact, masked, found[~is_common]), found[is_common]


class Reference:
    """Questions that must not occur in the training data, as hashes (8 bytes per n-gram).

    `files`: name → its questions; files without questions are skipped. `compared`: a sample of the questions
    to compare. What most of them share is an instruction, which a file of few questions does not show.
    """

    def __init__(self, files: Iterable[tuple[str, Iterable[str]]], compared: Iterable[str] = ()) -> None:
        _, common = _read(compared, INSTRUCTION_SHARE)
        self._files: dict[str, _Known] = {}
        for name, questions in files:
            known, _ = _read(questions, COMMON_SHARE)
            ngrams = np.setdiff1d(known.ngrams, common, assume_unique=True)
            if known.exact:
                self._files[name] = _Known(known.exact, known.masked, ngrams)

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return list(self._files)

    def matches(self, question: str) -> list[tuple[Kind, str]]:
        """The files that contain a question, each with the strictest kind of match."""
        if not self._files:
            return []
        keys = _keys_of(question)
        return [(kind, file) for file, known in self._files.items() if (kind := known.match(keys))]


def scan(reference: Reference, task: tuple[StagedBlock, NDArray[np.bool_]]) -> Found:
    """Indices within the block of the rows in the mask (rows,) of `task` that occur in the reference."""
    block, wanted = task
    leaks: Found = {}
    for place, question in zip(np.flatnonzero(wanted).tolist(), block.questions(wanted), strict=True):
        for kind, file in reference.matches(question):
            leaks.setdefault((file, kind), []).append(place)
    return leaks


def questions_of(file: NamedFile) -> Iterator[str]:
    """Yields the question of every row of a benchmark or a file; the first row determines a file's layout.

    Raises:
        UsageError: a row has no question; names it.
    """
    recipe = file.recipe or Recipe().resolve([file.source])
    for record in read_records(file.source):
        try:
            yield recipe.question(record, file.source.name)
        except RowError as error:
            message = f"no question can be read from this row: {error}"
            fix = "correct or remove it"
            raise UsageError(message, where=record.where, fix=fix) from None
