"""The first pass: every block transformed and staged, every bad row named, counted and set aside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlctl.data.blocks import Block, records_of
from rlctl.data.sources import Source, read_blocks
from rlctl.errors import UsageError
from rlctl.prepare.engines import run
from rlctl.prepare.findings import DataFinding, row_finding
from rlctl.prepare.request import PrepareRequest, Progress
from rlctl.prepare.row_checks import RowFindings
from rlctl.prepare.staging import Staging
from rlctl.prepare.transform import BadRow, Transformed, TransformPlan, transform

QUARANTINE = "quarantine.jsonl"
PROBLEMS_SHOWN = 5
#: Inputs up to this size are read in this process.
SMALL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Intake:
    """What the first pass found."""

    num_bad: int  # rows that were never staged
    bad_places: list[int]  # places of staged rows that are bad as well
    #: data sources without a grader, ground truths such rows have, and doubtful answers
    findings: list[DataFinding]


class _BadRows:
    """Counts rows that cannot be used, keeps the first few, and writes all to `quarantine` if given."""

    def __init__(self, quarantine: IO[str] | None) -> None:
        self._quarantine = quarantine
        self.count = 0
        self._first: list[str] = []

    def add(self, path: Path, row: BadRow) -> None:
        """One more."""
        self.count += 1
        if len(self._first) < PROBLEMS_SHOWN:
            self._first.append(f"{path}:{row.number}: {row.reason}")
        if self._quarantine is not None:
            entry = {"file": str(path), "row": row.number, "reason": row.reason, "raw": row.raw}
            self._quarantine.write(json.dumps(entry) + "\n")

    def error(self, num_rows: int, fix: str) -> UsageError:
        """All of it as one error."""
        more = [f"and {self.count - len(self._first)} more"] if self.count > len(self._first) else []
        lines = "".join(f"\n  {line}" for line in [*self._first, *more])
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
    from rlctl.reward.sources import knows_source

    num_bytes = sum(source.path.stat().st_size for source in sources)
    workers = request.num_workers if request.workers or num_bytes > SMALL_BYTES else 1
    found = RowFindings()
    by_file: Counter[Path] = Counter()
    by_source: Counter[str] = Counter()
    bad_places: list[int] = []
    progress.phase("reading", num_bytes)
    sets_aside = request.bad_rows == "quarantine"
    with (stage / QUARANTINE).open("w", encoding="utf-8") if sets_aside else nullcontext() as quarantine:
        bad = _BadRows(quarantine)
        blocks = (block for source in sources for block in read_blocks(source))
        for block, done in run(request.engine, transform, plan, blocks, workers):
            failed = _grader_failures(block, done, found) if request.check_graders else {}
            bad_places += [staging.num_rows + place for place in failed]
            for row in sorted([*done.bad, *failed.values()], key=lambda row: row.number):
                bad.add(block.path, row)
            staging.add(block, done)
            for number, doubts in done.doubts:
                for kind, detail in doubts:
                    found.add(kind, f"{block.path}:{number}", detail)
            by_file[block.path] += done.num_records
            by_source.update(done.sources)
            progress.advance(block.num_bytes, done.num_records)
    staging.finish()
    if empty := next((source.path for source in sources if not by_file[source.path]), None):
        raise UsageError("the file is empty: it has no rows", where=str(empty))
    if bad.count == staging.num_records:
        recipe = plan.recipe
        keys = f"prompts were looked for in {recipe.prompt_key!r}, answers in {recipe.answer_key!r}"
        fix = f"{keys} (recipe {recipe.name}): say --prompt-key, --answer-key or --recipe"
        raise bad.error(staging.num_records, fix)
    if bad.count and not sets_aside:
        fix = f"correct them, or pass --bad-rows quarantine to set them aside in {QUARANTINE}"
        raise bad.error(staging.num_records, fix)
    unknown = [
        finding
        for name, count in sorted(by_source.items())
        if not knows_source(name)
        for finding in row_finding("no-grader", count, source=name)
    ]
    return Intake(bad.count - len(bad_places), bad_places, [*found.findings(), *unknown])


def _grader_failures(block: Block, done: Transformed, found: RowFindings) -> dict[int, BadRow]:
    """Rows of a block whose ground truth their own grader does not give 1, by their place among its rows.

    Only rows of a source that has a grader are bad. For other sources it is not known that the grader asked,
    the one for mathematics, is the one that will be used: those are a finding only.
    """
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
            found.add("ground-truth", f"{block.path}:{number}", f"{text[:60]!r}: {reasons[truth]}")
    return {
        wrong[record.number][0]: BadRow(record.number, wrong[record.number][1], record.raw)
        for record in (records_of(block) if wrong else ())
        if record.number in wrong
    }
