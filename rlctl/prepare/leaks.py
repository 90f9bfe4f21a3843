"""Training rows that occur in the test split or in a benchmark: found, counted, left out or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlctl.data.checks import RowError
from rlctl.data.recipes import Recipe, recognise
from rlctl.data.sources import Source, find_sources, read_records
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.decide import Decision, RowStatus
from rlctl.prepare.engines import run
from rlctl.prepare.findings import EXAMPLES_SHOWN
from rlctl.prepare.leakage import HASHED_AT_ONCE, KINDS, Kind, LeakageComparison, Reference
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.staging import StagedBlock, Staging

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEST = "the test split"
REFERENCE = "reference"
#: So many rows are compared here and not in processes of their own.
LOCAL_ROWS = 20_000
Found = dict[tuple[str, Kind], list[int]]


def find_leaks(request: PrepareRequest, staging: Staging, decision: Decision, progress: Progress) -> None:
    """Compare the training rows with the test split and `request.against`, and do with them what was asked.

    The test rows are compared with `request.against` too. Those that occur there are reported only: they
    are not trained on.

    Raises:
        UsageError: a file of `against` cannot be read, or rows leak and `refuse` was asked for.
    """
    is_train = decision.is_kept & ~decision.is_test
    is_test = decision.is_kept & decision.is_test
    is_compared = decision.is_kept if request.against else is_train
    progress.phase("leakage", int(is_compared.sum()))
    directory = staging.file(REFERENCE)
    reference = Reference.build(_reference_questions(request, staging, is_test))
    reference.save(directory)
    _reference.cache_clear()  # this process may have had another one under that name
    tasks = ((block, is_compared[block.rows]) for block in staging.blocks if is_compared[block.rows].any())
    found: Found = {}
    found_in_test: Found = {}
    for (block, wanted), matches in run("local", scan, directory, tasks, _workers(request, is_compared)):
        for (file, kind), places in matches.items():
            rows = block.first_row + np.array(places)
            found.setdefault((file, kind), []).extend(rows[is_train[rows]].tolist())
            if file != TEST:
                found_in_test.setdefault((file, kind), []).extend(rows[is_test[rows]].tolist())
        progress.advance(int(wanted.sum()))
    rows = np.unique(np.array([row for places in found.values() for row in places], dtype=np.int64))
    by_file: dict[str, dict[str, int]] = {}
    for (file, kind), places in sorted(found.items()):
        if places:
            by_file.setdefault(file, {})[kind] = len(places)
    decision.report["leakage"] = {"rows": len(rows), "by_file": by_file}
    sides = (("train", is_train, found), ("test", is_test, found_in_test))
    decision.report["leakage_checks"] = [
        LeakageComparison(
            name, file, int(is_in.sum()), {kind: len(side.get((file, kind), ())) for kind in KINDS}
        ).to_json()
        for name, is_in, side in sides
        for file in reference.names
        if is_in.any() and (name, file) != ("test", TEST)
    ]
    decision.findings += _findings(staging, found_in_test, "test")
    if len(rows) and request.leakage == "refuse":
        lines = "".join(f"\n  {line}" for line in findings.lines(_findings(staging, found)))
        occur = findings.agree(len(rows), "occur")
        raise UsageError(
            f"{findings.rows(len(rows))} to train on {occur} in what must stay unseen:{lines}",
            fix="pass --leakage drop to leave them out",
        )
    if request.leakage == "drop":
        decision.status[rows] = RowStatus.LEAKED_DROPPED
    else:
        decision.findings += _findings(staging, found)


def scan(directory: Path, task: tuple[StagedBlock, NDArray[np.bool_]]) -> Found:
    """Places in a block of the wanted rows that occur in the saved reference, by file and kind."""
    reference = _reference(directory)
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


@lru_cache(maxsize=1)
def _reference(directory: Path) -> Reference:
    return Reference.load(directory)


def _reference_questions(
    request: PrepareRequest, staging: Staging, is_test: NDArray[np.bool_]
) -> Iterator[tuple[str, str]]:
    """(file, question) of everything that must not be trained on."""
    for question in staging.questions(is_test):
        yield TEST, question
    for source in find_sources(request.against):
        for question in questions_of(source):
            yield str(source.path), question


def questions_of(source: Source) -> Iterator[str]:
    """The questions of a benchmark file, whose layout is recognised by its first row.

    Raises:
        UsageError: none of its rows has a question.
    """
    recipe: Recipe | None = None
    problem, num_good = "", 0
    for record in read_records(source):
        if record.values is None:
            problem = problem or f"{record.where}: {record.problem}"
            continue
        recipe = recipe or Recipe(recognise(record.values)).resolve()
        try:
            yield recipe.to_row(record.values, source.path, 0).question
            num_good += 1
        except RowError as error:
            problem = problem or f"{record.where}: {error}"
    if not num_good:
        raise UsageError(f"no question can be read from it: {problem}", where=str(source.path))


def _workers(request: PrepareRequest, is_train: NDArray[np.bool_]) -> int:
    return request.num_workers if request.workers or is_train.sum() > LOCAL_ROWS else 1


def _findings(staging: Staging, found: Found, split: str = "train") -> list[findings.DataFinding]:
    return [
        finding
        for (file, kind), places in sorted(found.items(), key=lambda item: KINDS.index(item[0][1]))
        for finding in findings.leaked(
            kind, file, len(places), [staging.where(row) for row in sorted(places)[:EXAMPLES_SHOWN]], split
        )
    ]
