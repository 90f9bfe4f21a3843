"""Finds training questions that occur in a benchmark or the test split.

Three kinds of match, from certain to suspected: `exact` (the same words), `masked` (the same words except for
numbers), `ngram` (13 consecutive words in common, the length of Brown et al. 2020, appendix C). Words are
compared after `compatible` and case folding. A word is a run of letters and digits, or one mathematical sign:
2 + 3 differs from 2 * 3. Other punctuation only separates words. Words and n-grams are 64-bit hashes,
computed for many questions at a time in NumPy.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.records import RowError
from rlctl.errors import UsageError
from rlctl.prepare.benchmarks import NamedFile
from rlctl.prepare.duplicates import compatible, text_key
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
HASHED_AT_ONCE = 1024

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

#: Words of an n-gram; also the minimum number of words, not counting numbers, of a text compared with masked
#: numbers: shorter texts ("How much is # + #?") match by chance.
NGRAM = 13

#: Arithmetic operators; a minus counts only before a number or bracket, otherwise it is a hyphen.
_MINUS = re.compile(rb"-(?=[ \t\r\n]*[\d(])")
_SIGNS = b"+*/^=<>\x01"
#: Scripts without spaces: each character is a word.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")

_SPACE, _LETTER, _DIGIT, _SIGN = range(4)


def leakage_comparison(
    rows_of: str, against: str, num_rows: int, counts: Mapping[Kind, int]
) -> dict[str, Any]:
    """How many of the `num_rows` rows of a split or file occur in a reference file; also reported if 0.

    `counts` has the matching rows by their strictest kind of match.
    """
    about: dict[str, Any] = {"rows_of": rows_of, "against": against, "of": num_rows}
    return about | {"rows": sum(counts.values())} | dict(counts)


class Reference:
    """Questions that must not occur in the training data, as 64-bit hashes (8 bytes per n-gram).

    A saved reference is pickled as its directory.

    `files`: file → kind of match → sorted hashes, as returned by `build`.
    """

    def __init__(self, files: Mapping[str, Mapping[Kind, Hashes]]) -> None:
        self._files = files
        self._directory: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference.load, (self._directory, self.names)

    @classmethod
    def build(cls, files: Iterable[tuple[str, Iterable[str]]], compared: Iterable[str] = ()) -> Reference:
        """Builds a reference from (name, questions) of each file; skips files without questions.

        `compared`: a sample of the questions to compare. What most of them share is an instruction, which a
        file of few questions does not show.
        """
        hashed = {name: _hashes(iter(questions))[0] for name, questions in files}
        _, common = _hashes(iter(compared), INSTRUCTION_SHARE)
        for hashes in hashed.values():
            hashes["ngram"] = hashes["ngram"][~_among(hashes["ngram"], common)]
        return cls({name: hashes for name, hashes in hashed.items() if len(hashes["exact"])})

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return list(self._files)

    def save(self, directory: Path) -> None:
        """Writes the reference to a new directory."""
        self._directory = directory
        directory.mkdir()
        for place, hashes in enumerate(self._files.values()):
            for kind in KINDS:
                np.save(directory / f"{place}-{kind}.npy", hashes[kind])

    @classmethod
    def load(cls, directory: Path, names: Sequence[str]) -> Reference:
        """Loads a saved reference memory-mapped, so that all processes share one copy."""
        return cls(
            {
                name: {kind: np.load(directory / f"{place}-{kind}.npy", mmap_mode="r") for kind in KINDS}
                for place, name in enumerate(names)
            }
        )

    def matches(self, questions: Sequence[str]) -> list[frozenset[tuple[Kind, str]]]:
        """For each question, the files that contain it, each with the strictest kind of match."""
        asked = WordKeys(questions)
        found: list[set[tuple[Kind, str]]] = [set() for _ in questions]
        for file, known in self._files.items():
            exact = _among(asked.exact, known["exact"])
            masked = asked.is_masked & _among(asked.masked, known["masked"]) & ~exact
            shared = np.zeros(len(questions), dtype=bool)
            shared[asked.ngram_of[_among(asked.ngrams, known["ngram"])]] = True
            for kind, is_match in zip(KINDS, (exact, masked, shared & ~exact & ~masked), strict=True):
                for place in np.flatnonzero(is_match):
                    found[place].add((kind, file))
        return [frozenset(ways) for ways in found]


def _once_per_question(keys: WordKeys, chosen: NDArray[np.bool_]) -> Hashes:
    """Hashes of the n-grams of the chosen questions; an n-gram repeated within a question counts once."""
    is_chosen = chosen[keys.ngram_of]
    hashes = keys.ngrams[is_chosen]
    _, first = np.unique(hashes + mixed(keys.ngram_of[is_chosen].astype(np.uint64)), return_index=True)
    found: Hashes = hashes[first]
    return found


def _hashes(
    questions: Iterator[str], common_share: float = COMMON_SHARE
) -> tuple[dict[Kind, Hashes], Hashes]:
    """Sorted hashes of questions, of those with masked numbers, of rare n-grams; and of common n-grams."""
    seen: set[int] = set()
    masked, ngrams = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    while chunk := list(islice(questions, HASHED_AT_ONCE)):
        keys = WordKeys(chunk)
        is_new = np.zeros(len(chunk), dtype=bool)
        for place, key in enumerate(keys.exact.tolist()):
            if key not in seen:
                seen.add(key)
                is_new[place] = True
        masked.append(keys.masked[is_new & keys.is_masked])
        ngrams.append(_once_per_question(keys, is_new))
    most = max(COMMON_QUESTIONS, int(common_share * len(seen)))
    all_ngrams = np.concatenate(ngrams)
    ngrams.clear()  # halves the memory
    all_ngrams.sort()
    is_first = np.ones(len(all_ngrams), dtype=bool)
    is_first[1:] = all_ngrams[1:] != all_ngrams[:-1]
    is_common = np.zeros(len(all_ngrams), dtype=bool)
    others = max(0, len(all_ngrams) - most)
    is_common[:others] = all_ngrams[:others] == all_ngrams[most:]
    exact = np.sort(np.fromiter(seen, dtype=np.uint64, count=len(seen)))
    found: dict[Kind, Hashes] = {"exact": exact, "masked": np.unique(np.concatenate(masked))}
    return found | {"ngram": all_ngrams[is_first & ~is_common]}, all_ngrams[is_first & is_common]


def _among(values: Hashes, known: Hashes) -> NDArray[np.bool_]:
    """Mask of the values that occur in the sorted array `known`."""
    if not len(known):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(known[places] == values)


def scan(reference: Reference, task: tuple[StagedBlock, NDArray[np.bool_]]) -> Found:
    """Indices within the block of the rows in the mask (rows,) of `task` that occur in the reference."""
    block, wanted = task
    questions = block.questions(wanted)
    places = np.flatnonzero(wanted).tolist()
    found: Found = {}
    for start in range(0, len(questions), HASHED_AT_ONCE):
        part = reference.matches(questions[start : start + HASHED_AT_ONCE])
        for place, matches in zip(places[start:], part, strict=False):
            for kind, file in matches:
                found.setdefault((file, kind), []).append(place)
    return found


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
            what, fix = f"no question can be read from this row: {error}", "correct or remove it"
            raise UsageError(what, where=record.where, fix=fix) from None


def mixed(values: Hashes) -> Hashes:
    """Mixes the bits so that each output bit depends on all input bits (SplitMix64, Steele et al. 2014)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _odd(first: int, count: int) -> Hashes:
    """Fixed pseudo-random odd numbers; multiplication by an odd number is invertible modulo 2⁶⁴."""
    return mixed(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


#: Class of each byte value; bytes of non-ASCII characters are letters.
_CLASSES = np.zeros(256, dtype=np.uint8)
_CLASSES[[*b"abcdefghijklmnopqrstuvwxyz", *range(128, 256)]] = _LETTER
_CLASSES[list(b"0123456789")] = _DIGIT
_CLASSES[list(_SIGNS)] = _SIGN
_BYTE_VALUES = np.where(_CLASSES == _SPACE, np.uint64(0), _odd(1, 256))
_NUMBER, _BASE = _odd(1000, 2)


class WordKeys:
    """Hashes that identify each question of a block.

    Attributes:
        exact: (N,) hash of the word sequence.
        masked: (N,) the same with each run of words that contain digits replaced by one placeholder.
        is_masked: (N,) whether `masked` is usable: there are numbers, and at least `NGRAM` other words.
        ngrams: (M,) hashes of all n-grams of `NGRAM` words, question by question.
        ngram_of: (M,) index of the question of each n-gram.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        words, has_digit, counts = _word_hashes([_plain(question) for question in questions])
        question = np.repeat(np.arange(len(questions)), counts)
        sums = _Sums(words)
        self.exact = mixed(sums.of_runs(counts))
        for place in np.flatnonzero(counts == 0).tolist():  # a text without words, such as "?!"
            self.exact[place] = text_key(questions[place].strip())
        is_kept = np.ones(len(words), dtype=np.bool_)  # not the second or a later number of a run
        is_kept[1:] = ~(has_digit[1:] & has_digit[:-1] & (question[1:] == question[:-1]))
        num_kept = np.bincount(question[is_kept], minlength=len(questions))
        self.masked = mixed(_Sums(np.where(has_digit, _NUMBER, words)[is_kept]).of_runs(num_kept))
        num_numbers = np.bincount(question[has_digit], minlength=len(questions))
        self.is_masked = (num_numbers > 0) & (counts - num_numbers >= NGRAM)
        windows = sums.of_windows(NGRAM)
        inside = question[: len(windows)] == question[NGRAM - 1 :][: len(windows)]
        self.ngrams: Hashes = windows[inside]
        self.ngram_of: Places = question[: len(windows)][inside]


class _Sums:
    """Polynomial hashes Σ valueᵢ·baseⁱ modulo 2⁶⁴ of any run of values, from one cumulative sum."""

    def __init__(self, values: Hashes) -> None:
        powers, self._inverses = _powers(1 << len(values).bit_length())
        self._sums = np.zeros(len(values) + 1, dtype=np.uint64)
        np.cumsum(values * powers[: len(values)], out=self._sums[1:])

    def between(self, starts: Places, ends: Places) -> Hashes:
        """Hashes of the runs [start, end)."""
        return np.asarray((self._sums[ends] - self._sums[starts]) * self._inverses[starts])

    def of_runs(self, counts: Places) -> Hashes:
        """Hashes of consecutive runs of `counts` values."""
        ends = np.cumsum(counts)
        return self.between(ends - counts, ends)

    def of_windows(self, width: int) -> Hashes:
        """Hashes of all windows of `width` values."""
        starts = np.arange(max(0, len(self._sums) - width))
        return self.between(starts, starts + width)


@lru_cache(maxsize=4)
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """baseⁱ and base⁻ⁱ modulo 2⁶⁴; the inverse exists because the base is odd."""
    both = [np.full(count, base, dtype=np.uint64) for base in (_BASE, pow(int(_BASE), -1, 1 << 64))]
    for powers in both:
        powers[0] = 1
        np.cumprod(powers, out=powers)
    return both[0], both[1]


class _Plain(dict[int, str]):
    """Code point → a part of a word, a word of its own, or what separates words; ASCII stays as it is."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)
        if code < 128:
            plain = character
        elif kind == "Sm" or _UNSPACED.match(character):
            plain = f" {character} "
        elif kind == "Nd":
            plain = str(unicodedata.decimal(character))
        elif kind[0] in "LMN":  # marks too: they are the vowels of Hindi and Thai
            plain = character
        elif kind == "Cf":  # invisible, also inside words
            plain = ""
        else:
            plain = " " if kind == "Zs" else ","
        return self.setdefault(code, plain)


_PLAIN = _Plain()


def _plain(text: str) -> bytes:
    """The text in lower case as bytes, in which only ASCII characters and spaces separate words."""
    if text.isascii():
        return text.lower().encode()
    return compatible(text).casefold().translate(_PLAIN).encode()


def _word_hashes(texts: Sequence[bytes]) -> tuple[Hashes, NDArray[np.bool_], Places]:
    """Hashes of the words of all texts (W,), whether each word has a digit (W,), and words per text (N,)."""
    joined = _MINUS.sub(b"\x01", b"\x00".join(texts))  # the length does not change
    content = np.frombuffer(joined, dtype=np.uint8)
    classes = _CLASSES[content]
    is_word = classes != _SPACE
    is_sign = classes == _SIGN
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1] | is_sign[1:] | is_sign[:-1]
    starts = np.flatnonzero(is_start)
    text_ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64)
    counts = np.diff(np.searchsorted(starts, text_ends), prepend=0)
    has_digit = np.zeros(len(starts), dtype=np.bool_)
    has_digit[np.searchsorted(starts, np.flatnonzero(classes == _DIGIT), side="right") - 1] = True
    ends = np.append(starts[1:], len(content))  # separators have the value 0
    return mixed(_Sums(_BYTE_VALUES[content]).between(starts, ends)), has_digit, counts
