"""Finds training questions that occur in a benchmark or the test split; reports, drops or refuses them.

Three kinds of match, from certain to suspected: `exact` (the same words), `masked` (the same words except for
numbers), `ngram` (13 consecutive words in common, the length of Brown et al. 2020, appendix C). Words are
compared after NFKC and case folding. Punctuation is ignored, arithmetic operators are not: 2 + 3 differs from
2 * 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.benchmarks import NamedFile, find_named
from rlctl.data.recipes import read_rows
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.decide import Decision, RowStatus
from rlctl.prepare.engines import run
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.staging import StagedBlock, Staging
from rlctl.prepare.words import Hashes, WordKeys, mixed

Kind = Literal["exact", "masked", "ngram"]
#: From certain to suspected.
KINDS: tuple[Kind, ...] = ("exact", "masked", "ngram")
#: (file, kind of match) → matching rows.
Found = dict[tuple[str, Kind], list[int]]

TEST = "the test split"
#: An n-gram in more questions of a file than this count and this share of them is ignored: it belongs to the
#: prompt, not to a question.
COMMON_QUESTIONS, COMMON_SHARE = 10, 0.01
HASHED_AT_ONCE = 1024
#: Up to this many rows are compared in this process.
LOCAL_ROWS = 20_000


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


def find_leaks(request: PrepareRequest, staging: Staging, decision: Decision, progress: Progress) -> None:
    """Compares training rows with the test split and `request.against`; reports, drops or refuses matches.

    Test rows are also compared with `request.against`, but matches are only reported because test rows are
    not used for training.

    Raises:
        UsageError: a file of `against` cannot be read, or rows leak and `request.leakage` is `refuse`.
    """
    is_train = decision.is_kept & ~decision.is_test
    is_test = decision.is_kept & decision.is_test
    is_compared = decision.is_kept if request.against else is_train
    progress.phase("leakage", int(is_compared.sum()))
    benchmarks = [(file.name, questions_of(file)) for file in find_named(request.against)]
    reference = Reference.build([(TEST, staging.questions(is_test)), *benchmarks])
    reference.save(staging.file("reference"))
    tasks = ((block, is_compared[block.rows]) for block in staging.blocks if is_compared[block.rows].any())
    workers = request.num_workers if request.workers or is_compared.sum() > LOCAL_ROWS else 1
    splits, found_in = {"train": is_train, "test": is_test}, dict[str, Found](train={}, test={})
    for (block, wanted), matches in run("local", scan, reference, tasks, workers):
        for (file, kind), places in matches.items():
            rows = block.first_row + np.array(places)
            for split, is_in in splits.items():
                if (split, file) != ("test", TEST):
                    found_in[split].setdefault((file, kind), []).extend(rows[is_in[rows]].tolist())
        progress.advance(int(wanted.sum()))
    found = found_in["train"]
    rows = np.unique(np.array([row for places in found.values() for row in places], dtype=np.int64))
    by_file: dict[str, dict[str, int]] = {}
    for (file, kind), places in sorted(found.items()):
        if places:
            by_file.setdefault(file, {})[kind] = len(places)
    decision.report["leakage"] = {"rows": len(rows), "by_file": by_file}
    decision.report["leakage_checks"] = [
        leakage_comparison(
            split,
            file,
            int(is_in.sum()),
            {kind: len(found_in[split].get((file, kind), ())) for kind in KINDS},
        )
        for split, is_in in splits.items()
        for file in reference.names
        if is_in.any() and (split, file) != ("test", TEST)
    ]
    decision.findings += _findings(staging, found_in["test"], "test-leak")
    leaked = _findings(staging, found, "leak")
    if len(rows) and request.leakage == "refuse":
        lines = "".join(f"\n  {line}" for line in findings.lines(leaked))
        occur = findings.agree(len(rows), "occur")
        raise UsageError(
            f"{findings.rows(len(rows))} of the training data {occur} in held-out data:{lines}",
            fix="pass --leakage drop to leave them out",
        )
    if request.leakage == "drop":
        decision.status[rows] = RowStatus.LEAKED_DROPPED
    else:
        decision.findings += leaked


def _findings(staging: Staging, found: Found, code: str) -> list[findings.DataFinding]:
    result = []
    for (file, kind), places in sorted(found.items(), key=lambda item: KINDS.index(item[0][1])):
        examples = staging.places(sorted(places))
        result += findings.row_finding(f"{code}-{kind}", len(places), examples, file=file)
    return result


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
    """Yields the questions of a benchmark or a file; the first row determines the layout of a file.

    Raises:
        UsageError: none of its rows has a question.
    """
    problem, num_good = "", 0
    for record, row, why in read_rows(file.source, file.recipe):
        if row is not None:
            num_good += 1
            yield row.question
        problem = problem or (why and f"{record.where}: {why}")
    if not num_good:
        raise UsageError(f"no question can be read from it: {problem}", where=str(file.source.path))
