"""The first pass: every block transformed and staged, every bad row named, counted and set aside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlctl.data.blocks import Block, records_of
from rlctl.data.recipes import Recipe
from rlctl.data.sources import Source, read_blocks
from rlctl.errors import UsageError
from rlctl.prepare import findings
from rlctl.prepare.engines import run
from rlctl.prepare.findings import DataFinding, Places
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.row_checks import AnswerDoubts
from rlctl.prepare.staging import Staging
from rlctl.prepare.transform import BadRow, Transformed, TransformPlan, transform

QUARANTINE = "quarantine.jsonl"
PROBLEMS_SHOWN = 5
#: Inputs up to this size are not worth processes of their own.
SMALL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Intake:
    """What the first pass found.

    Attributes:
        num_bad: rows that were never staged.
        bad_places: places of staged rows that are bad as well.
        findings: data sources without a grader, ground truths such rows have, and doubtful answers.
    """

    num_bad: int
    bad_places: list[int]
    findings: list[DataFinding]


class BadRows:
    """Counts rows that cannot be used, remembers the first few, and sets all aside where asked to."""

    def __init__(self, quarantine: IO[str] | None = None) -> None:
        self._quarantine = quarantine
        self.count = 0
        self.first: list[str] = []

    def add(self, path: Path, row: BadRow) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < PROBLEMS_SHOWN:
            self.first.append(f"{path}:{row.number}: {row.reason}")
        if self._quarantine is not None:
            entry = {"file": str(path), "row": row.number, "reason": row.reason, "raw": row.raw}
            self._quarantine.write(json.dumps(entry) + "\n")

    def error(self, num_rows: int, fix: str) -> UsageError:
        """All of it as one error."""
        more = [f"and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        lines = "".join(f"\n  {line}" for line in [*self.first, *more])
        return UsageError(f"{self.count} of {num_rows} rows cannot be used:{lines}", fix=fix)


def take_in(
    request: PrepareRequest,
    plan: TransformPlan,
    sources: Sequence[Source],
    staging: Staging,
    stage: Path,
    progress: Progress,
) -> Intake:
    """Transform and stage everything.

    Raises:
        UsageError: a source cannot be read, rows are bad and are not to be set aside, or all are.
        RunFailure: a worker died.
        EnvironmentFailure: Ray is not installed or does not start.
    """
    num_bytes = sum(source.path.stat().st_size for source in sources)
    workers = request.num_workers if request.workers or num_bytes > SMALL_BYTES else 1
    graders, doubts = _GraderCheck(), AnswerDoubts()
    by_file: Counter[Path] = Counter()
    by_source: Counter[str] = Counter()
    bad_places: list[int] = []
    progress.phase("reading", num_bytes)
    with ExitStack() as stack:
        quarantine: IO[str] | None = None
        if request.bad_rows == "quarantine":
            quarantine = stack.enter_context((stage / QUARANTINE).open("w", encoding="utf-8"))
        bad = BadRows(quarantine)
        blocks = (block for source in sources for block in read_blocks(source))
        for block, done in run(request.engine, transform, plan, blocks, workers):
            failed = graders.check(block, done) if request.check_graders else {}
            bad_places += [staging.num_rows + place for place in failed]
            for row in sorted([*done.bad, *failed.values()], key=lambda row: row.number):
                bad.add(block.path, row)
            staging.add(block, done)
            for number, found in done.doubts:
                doubts.add(found, f"{block.path}:{number}")
            by_file[block.path] += done.num_records
            by_source.update(done.sources)
            progress.advance(block.num_bytes, done.num_records)
    staging.finish()
    _check_usable(sources, by_file, staging, bad, plan.recipe, is_refused=quarantine is None)
    return Intake(
        bad.count - len(bad_places),
        bad_places,
        [*graders.findings(), *doubts.findings(), *_unknown(by_source)],
    )


def _check_usable(
    sources: Sequence[Source],
    by_file: Counter[Path],
    staging: Staging,
    bad: BadRows,
    recipe: Recipe,
    *,
    is_refused: bool,
) -> None:
    empty = next((source.path for source in sources if not by_file[source.path]), None)
    if empty:
        raise UsageError("the file is empty: it has no rows", where=str(empty))
    if bad.count == staging.num_records:
        keys = f"prompts were looked for in {recipe.prompt_key!r}, answers in {recipe.answer_key!r}"
        fix = f"{keys} (recipe {recipe.name}): say --prompt-key, --answer-key or --recipe"
        raise bad.error(staging.num_records, fix)
    if bad.count and is_refused:
        fix = f"correct them, or pass --bad-rows quarantine to set them aside in {QUARANTINE}"
        raise bad.error(staging.num_records, fix)


class _GraderCheck:
    """Sends ground truths to their own graders, which must give them 1.

    A row of a source that has a grader is bad where it fails. For other sources nothing says that the
    grader asked, the one for mathematics, is the one that will be used: those are a finding only.
    """

    def __init__(self) -> None:
        self._places = Places()

    def check(self, block: Block, done: Transformed) -> dict[int, BadRow]:
        """The bad rows of a block by their place among its rows."""
        from rlctl.reward.round_trip import check_ground_truths
        from rlctl.reward.sources import knows_source

        reasons = check_ground_truths(done.truths)
        wrong: dict[int, tuple[int, str]] = {}  # number → place, reason
        for place, truth in enumerate(done.truth_of if any(reasons) else ()):
            if truth < 0 or not reasons[truth]:
                continue
            number, (source, text) = int(done.keys["number"][place]), done.truths[truth]
            if knows_source(source):
                wrong[number] = (place, f"the ground truth cannot be graded: {reasons[truth]}")
            else:
                self._places.add(f"{block.path}:{number}", f"{text[:60]!r}: {reasons[truth]}")
        return {
            wrong[record.number][0]: BadRow(record.number, wrong[record.number][1], record.raw)
            for record in (records_of(block) if wrong else ())
            if record.number in wrong
        }

    def findings(self) -> list[DataFinding]:
        """Of sources that have no grader."""
        return findings.ungradable(self._places.count, self._places.first)


def _unknown(by_source: Counter[str]) -> list[DataFinding]:
    from rlctl.reward.sources import knows_source

    return [
        findings.unknown_source(name, count)
        for name, count in sorted(by_source.items())
        if not knows_source(name)
    ]
