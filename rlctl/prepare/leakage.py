"""Finds training questions that occur in a benchmark or the test split.

Three kinds of match, from certain to suspected: `exact` (the same words), `masked` (the same words except for
numbers), `ngram` (13 consecutive words in common, the length of Brown et al. 2020, appendix C). Words are
compared after `compatible` and case folding. A word is a run of letters and digits, or one mathematical sign:
2 + 3 differs from 2 * 3. Other punctuation only separates words. Words and n-grams are 64-bit hashes,
sorted and searched in NumPy.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.benchmarks import NamedFile
from rlctl.data.recipes import Recipe
from rlctl.data.records import RowError
from rlctl.data.sources import read_records
from rlctl.errors import UsageError
from rlctl.prepare.duplicates import compatible, text_key
from rlctl.prepare.transform import StagedBlock

Kind = Literal["exact", "masked", "ngram"]
#: From certain to suspected.
KINDS: tuple[Kind, ...] = ("exact", "masked", "ngram")
#: (file, kind of match) → matching rows.
Found = dict[tuple[str, Kind], list[int]]

#: An n-gram in more questions of a file than this count and this share of them is ignored: it belongs to the
#: prompt, not to a question.
COMMON_QUESTIONS, COMMON_SHARE = 10, 0.01
HASHED_AT_ONCE = 1024

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

#: Words of an n-gram; also the minimum number of words, not counting numbers, of a text compared with masked
#: numbers: shorter texts ("How much is # + #?") match by chance.
NGRAM = 13

#: A run of letters and digits, or a sign, in what `_Plain` gives. A minus counts only before a number or a
#: bracket, otherwise it is a hyphen.
_WORD = re.compile(r"[a-z0-9\x80-\U0010ffff]+|[+*/^=<>]|-(?=\s*[0-9(])")
_HAS_DIGIT = re.compile("[0-9]")
_NUMBER = "#"
#: Scripts without spaces: each character is a word.
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


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
    def build(cls, files: Iterable[tuple[str, Iterable[str]]]) -> Reference:
        """Builds a reference from (name, questions) of each file; skips files without questions."""
        hashed = {name: _hashes(iter(questions)) for name, questions in files}
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


def _hashes(questions: Iterator[str]) -> dict[Kind, Hashes]:
    """Sorted hashes of a file's questions, of the questions with masked numbers, and of the rare n-grams."""
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
    most = max(COMMON_QUESTIONS, int(COMMON_SHARE * len(seen)))
    all_ngrams = np.concatenate(ngrams)
    ngrams.clear()  # halves the memory
    all_ngrams.sort()
    is_rare = np.ones(len(all_ngrams), dtype=bool)
    is_rare[1:] = all_ngrams[1:] != all_ngrams[:-1]  # the first of equal ones
    others = max(0, len(all_ngrams) - most)
    is_rare[:others] &= all_ngrams[:others] != all_ngrams[most:]
    exact = np.sort(np.fromiter(seen, dtype=np.uint64, count=len(seen)))
    masked_keys = np.unique(np.concatenate(masked))
    return {"exact": exact, "masked": masked_keys, "ngram": all_ngrams[is_rare]}


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


#: Odd numbers: multiplication by them is invertible modulo 2⁶⁴.
_WEIGHTS = mixed(np.arange(1, NGRAM + 1, dtype=np.uint64)) | np.uint64(1)
_word_key = lru_cache(maxsize=1 << 16)(text_key)


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
        texts = [words_of(question) for question in questions]
        counts = np.array([len(words) for words in texts], np.int64)
        pairs = zip(texts, questions, strict=True)  # a text without words, such as "?!", is compared as it is
        self.exact = _keys(" ".join(words) or question.strip() for words, question in pairs)
        masked = [_masked(words) for words in texts]
        self.masked = _keys(text for text, _ in masked)
        num_others = np.array([number for _, number in masked], np.int64)
        self.is_masked: NDArray[np.bool_] = (num_others < counts) & (num_others >= NGRAM)
        flat = np.fromiter(map(_word_key, chain.from_iterable(texts)), np.uint64, int(counts.sum()))
        num_windows = max(0, len(flat) - NGRAM + 1)
        windows = sum(flat[place : place + num_windows] * weight for place, weight in enumerate(_WEIGHTS))
        question = np.repeat(np.arange(len(texts)), counts)
        first, last = question[:num_windows], question[NGRAM - 1 :]
        self.ngrams: Hashes = mixed(np.asarray(windows, np.uint64)[first == last])
        self.ngram_of: Places = first[first == last]


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case; see the top of this module."""
    plain = text.lower() if text.isascii() else compatible(text).casefold().translate(_PLAIN)
    return _WORD.findall(plain)


def _keys(texts: Iterable[str]) -> Hashes:
    return np.fromiter(map(text_key, texts), np.uint64)


def _masked(words: Sequence[str]) -> tuple[str, int]:
    """The words with one placeholder for each run of words with digits, and the number of the other words."""
    parts: list[str] = []
    num_others = 0
    for is_number, run in groupby(words, lambda word: _HAS_DIGIT.search(word) is not None):
        others = list(run)
        parts += [_NUMBER] if is_number else others
        num_others += 0 if is_number else len(others)
    return " ".join(parts), num_others


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
