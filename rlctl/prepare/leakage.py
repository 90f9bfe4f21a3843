"""Which questions occur in a benchmark or test split, word for word or nearly.

Three kinds, from sure to suspicious: `exact` (the same words), `masked` (the same but for the numbers),
`ngram` (13 words in a row in common, the length of Brown et al. 2020, appendix C). Words are compared after
NFKC and case folding; punctuation does not count, signs of arithmetic do: 2 + 3 is not 2 * 3.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlctl.prepare.words import WordKeys

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

Kind = Literal["exact", "masked", "ngram"]
#: From certain to suspected.
KINDS: tuple[Kind, ...] = ("exact", "masked", "ngram")

#: An n-gram in more questions of a file than both of these is a phrase of the file's prompts, not a question.
COMMON_QUESTIONS, COMMON_SHARE = 10, 0.01
HASHED_AT_ONCE = 1024
_NAMES = "names.json"


@dataclass(frozen=True, slots=True)
class LeakageComparison:
    """How many rows of one set occur in a file; also where none does.

    Attributes:
        rows_of: the rows that were compared: a split, or a file.
        against: the file.
        num_rows: rows compared.
        counts: rows that occur, by the strictest kind of match.
    """

    rows_of: str
    against: str
    num_rows: int
    counts: Mapping[Kind, int]

    @property
    def num_leaked(self) -> int:
        """Rows that occur in one of the ways."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        counts: dict[str, Any] = {kind: self.counts.get(kind, 0) for kind in KINDS}
        sides = {"rows_of": self.rows_of, "against": self.against}
        return sides | {"of": self.num_rows, "rows": self.num_leaked} | counts


@dataclass(frozen=True, slots=True)
class _File:
    """What is in one file: sorted hashes of its questions, of those without numbers, and of n-grams."""

    exact: Hashes
    masked: Hashes
    ngrams: Hashes


class Reference:
    """The questions one must not train on, as 64-bit hashes: 8 bytes per n-gram."""

    def __init__(self, files: Mapping[str, _File]) -> None:
        self._files = files

    @classmethod
    def build(cls, texts: Iterable[tuple[str, str]]) -> Reference:
        """Args:
        texts: (file, question) in any order; questions of one file belong together.
        """
        waiting: dict[str, list[str]] = defaultdict(list)
        builders: dict[str, _Builder] = defaultdict(_Builder)
        for file, question in texts:
            waiting[file].append(question)
            if len(waiting[file]) >= HASHED_AT_ONCE:
                builders[file].add(waiting.pop(file))
        for file, questions in waiting.items():
            builders[file].add(questions)
        return cls({file: builder.finish() for file, builder in builders.items()})

    @property
    def names(self) -> list[str]:
        """The files."""
        return list(self._files)

    def save(self, directory: Path) -> None:
        """Write it to a directory that does not exist yet."""
        directory.mkdir()
        names = list(self._files)
        (directory / _NAMES).write_text(json.dumps(names), encoding="utf-8")
        for place, name in enumerate(names):
            for kind, hashes in asdict(self._files[name]).items():
                np.save(directory / f"{place}-{kind}.npy", hashes)

    @classmethod
    def load(cls, directory: Path) -> Reference:
        """What `save` wrote, mapped: processes that load it share one copy."""
        names = json.loads((directory / _NAMES).read_text(encoding="utf-8"))
        kinds = [field.name for field in fields(_File)]

        def read(place: int) -> _File:
            return _File(*(np.load(directory / f"{place}-{kind}.npy", mmap_mode="r") for kind in kinds))

        return cls({name: read(place) for place, name in enumerate(names)})

    def matches(self, questions: Sequence[str]) -> list[frozenset[tuple[Kind, str]]]:
        """Of each question the files it occurs in, with the strictest kind of match; empty: none."""
        asked = WordKeys(questions)
        found: list[set[tuple[Kind, str]]] = [set() for _ in questions]
        for file, known in self._files.items():
            exact = _among(asked.exact, known.exact)
            masked = asked.is_masked & _among(asked.masked, known.masked) & ~exact
            shared = np.zeros(len(questions), dtype=bool)
            shared[asked.ngram_of[_among(asked.ngrams, known.ngrams)]] = True
            kinds: tuple[tuple[Kind, Any], ...] = (
                ("exact", exact),
                ("masked", masked),
                ("ngram", shared & ~exact & ~masked),
            )
            for kind, places in kinds:
                for place in np.flatnonzero(places):
                    found[place].add((kind, file))
        return [frozenset(ways) for ways in found]


class _Builder:
    """Collects one file's hashes, each different question once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._masked: list[Hashes] = []
        self._ngrams: list[Hashes] = []

    def add(self, questions: Sequence[str]) -> None:
        keys = WordKeys(questions)
        is_new = np.zeros(len(questions), dtype=bool)
        for place, key in enumerate(keys.exact.tolist()):
            if key not in self._seen:
                self._seen.add(key)
                is_new[place] = True
        self._masked.append(keys.masked[is_new & keys.is_masked])
        self._ngrams.append(keys.ngrams[is_new[keys.ngram_of]])

    def finish(self) -> _File:
        most = max(COMMON_QUESTIONS, int(COMMON_SHARE * len(self._seen)))
        exact = np.sort(np.fromiter(self._seen, dtype=np.uint64, count=len(self._seen)))
        self._seen.clear()
        ngrams = np.concatenate(self._ngrams)
        self._ngrams.clear()
        return _File(exact, np.unique(np.concatenate(self._masked)), _at_most(ngrams, most))


def _at_most(values: Hashes, most: int) -> Hashes:
    """The different values that are there at most so often, ascending; sorts `values` in place."""
    values.sort()
    is_first = np.ones(len(values), dtype=bool)
    is_first[1:] = values[1:] != values[:-1]
    common = values[most:][values[most:] == values[: max(0, len(values) - most)]]
    different = values[is_first]
    rare: Hashes = different[~_among(different, common)]
    return rare


def _among(values: Hashes, known: Hashes) -> NDArray[np.bool_]:
    """Which values are in the sorted array."""
    if not len(known):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(known[places] == values)
