"""All checks of one file, block by block."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.data.blocks import Block, Record, records_of
from rlctl.data.checks import RowError
from rlctl.data.recipes import Recipe, RecipeName, recognise
from rlctl.data.schema import Row
from rlctl.data.sources import Source, read_blocks
from rlctl.prepare import findings
from rlctl.prepare.columns import column_findings, is_verl, read_schema
from rlctl.prepare.findings import DataFinding, Places
from rlctl.prepare.histogram import Histogram
from rlctl.prepare.leakage import KINDS, Kind, LeakageComparison, Reference
from rlctl.prepare.lengths import PromptLengths
from rlctl.prepare.request import Progress
from rlctl.prepare.row_checks import (
    AnswerDoubts,
    BadRowGroups,
    QuestionHashes,
    SplitChecks,
    TextChecks,
    answer_doubts,
)
from rlctl.reward.round_trip import check_ground_truths
from rlctl.reward.sources import knows_source

#: Data sources without a grader named one by one.
SOURCES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class FileReport:
    """What a file is.

    Attributes:
        path: of the file.
        recipe: the layout its first row has; None: no row can be read.
        num_rows: usable or not.
        columns: name → type: Arrow's of Parquet, of other formats Python's of the first row's value.
        sources: data source → usable rows.
    """

    path: Path
    recipe: RecipeName | None
    num_rows: int
    columns: dict[str, str]
    sources: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        about = {"path": str(self.path), "recipe": self.recipe, "rows": self.num_rows}
        return about | {"columns": self.columns, "data_sources": self.sources}


@dataclass(frozen=True, slots=True)
class Probes:
    """What all files are compared with.

    Attributes:
        lengths: measures prompts in tokens; None: characters are counted.
        reference: questions that must not occur.
        limit: the longest a prompt may be; None: any length.
        histogram: of the lengths of all usable prompts.
    """

    lengths: PromptLengths | None
    reference: Reference
    limit: int | None
    histogram: Histogram


class FileCheck:
    """One file; `read` it, then ask for `findings` and `report`."""

    def __init__(self, source: Source, probes: Probes) -> None:
        self.path = source.path
        self.questions, self.splits = QuestionHashes(), SplitChecks(source.path)
        self._source, self._probes = source, probes
        self._schema = read_schema(source.path)
        self._columns = {field.name: str(field.type) for field in self._schema or ()}
        self._recipe: Recipe | None = None
        self._num_rows = 0
        self._sources: Counter[str] = Counter()
        self._bad, self._text, self._answers = BadRowGroups(), TextChecks(), AnswerDoubts()
        self._ungradable, self._overlong, self._beyond = Places(), Places(), Places()
        self._structured = Places()
        self._leaks: dict[tuple[Kind, str], Places] = defaultdict(Places)

    def read(self, progress: Progress) -> None:
        """Check every row.

        Raises:
            UsageError: the file as a whole cannot be read.
        """
        for block in read_blocks(self._source):
            before = self._num_rows
            self._read_block(block)
            progress.advance(block.num_bytes, self._num_rows - before)

    def report(self) -> FileReport:
        """What the file is."""
        name = self._recipe.name if self._recipe else None
        return FileReport(self.path, name, self._num_rows, self._columns, dict(self._sources.most_common()))

    def comparisons(self) -> list[LeakageComparison]:
        """How many usable rows occur in each file they must not occur in."""
        num_rows = self._sources.total()
        return [
            LeakageComparison(
                str(self.path),
                name,
                num_rows,
                {kind: self._leaks[kind, name].count for kind in KINDS if (kind, name) in self._leaks},
            )
            for name in self._probes.reference.names
        ]

    def findings(self) -> list[DataFinding]:
        """What is wrong with it."""
        found = column_findings(self.path, self._schema) if self._schema else []
        if not any(finding.code == "missing-columns" for finding in found):
            found += self._bad.findings()
        found += (
            self._answers.findings()
            + self._text.findings()
            + self.splits.findings()
            + self.questions.findings(self.path)
        )
        structured = (
            "have a ground truth that is a list or a structure, where training reads text or a number"
        )
        fix = "`rlctl prepare-data parquet` turns it into text"
        found += self._structured.finding("structured-truth", "error", structured, fix)
        found += findings.ungradable(self._ungradable.count, self._ungradable.first)
        unknown = [source for source in self._sources if not knows_source(source)]
        found += [
            findings.unknown_source(source, self._sources[source]) for source in unknown[:SOURCES_SHOWN]
        ]
        for (kind, file), places in self._leaks.items():
            found += findings.leaked(kind, file, places.count, places.first)
        return found + self._length_findings()

    def _length_findings(self) -> list[DataFinding]:
        unit, limit = self._probes.histogram.unit, self._probes.limit
        context = self._probes.lengths.context if self._probes.lengths else None
        found = []
        if limit is not None:
            found += findings.overlong(self._overlong.count, limit, "kept", self._overlong.first, unit)
        if context is not None:
            found += findings.beyond_context(self._beyond.count, context, self._beyond.first)
        return found

    def _read_block(self, block: Block) -> None:
        pairs = [(record, row) for record in records_of(block) if (row := self._row(record)) is not None]
        if not pairs:
            return
        records, rows = [record for record, _ in pairs], [row for _, row in pairs]
        self.questions.add(rows, [record.number for record in records])
        for record, row in pairs:
            self._sources[row.data_source] += 1
            self._text.add(row, record.where)
            self._answers.add(answer_doubts(row), record.where)
            self.splits.add(row)
        self._grade(records, rows)
        self._measure(records, rows)
        matches = self._probes.reference.matches([row.question for row in rows])
        for record, ways in zip(records, matches, strict=True):
            for way in ways:
                self._leaks[way].add(record.where)

    def _row(self, record: Record) -> Row | None:
        """The record as a row; None where it is none, which is noted."""
        self._num_rows += 1
        if record.values is None:
            self._bad.add(record.where, record.problem)
            return None
        if self._recipe is None:
            verl = self._schema is not None and is_verl(self._schema.names)
            name = recognise(record.values)
            self._recipe = Recipe("verl" if verl and name != "dapo-math" else name).resolve()
            self._columns = self._columns or {
                str(name): type(value).__name__ for name, value in record.values.items()
            }
        try:
            row = self._recipe.to_row(record.values, self.path, record.number - 1)
        except RowError as error:
            self._bad.add(record.where, str(error))
            return None
        reward_model = record.values.get("reward_model")
        truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        if self._schema is not None and isinstance(truth, list | dict):
            self._structured.add(record.where)
        return row

    def _grade(self, records: list[Record], rows: list[Row]) -> None:
        ruled = [(record, row) for record, row in zip(records, rows, strict=True) if row.style == "rule"]
        complaints = check_ground_truths([(row.data_source, row.ground_truth) for _, row in ruled])
        for (record, row), why in zip(ruled, complaints, strict=True):
            if why:
                self._ungradable.add(record.where, f"{row.ground_truth[:60]!r}: {why}")

    def _measure(self, records: list[Record], rows: list[Row]) -> None:
        probes, context = self._probes, None
        if probes.lengths is None:
            lengths = [sum(len(message.content) for message in row.prompt) for row in rows]
        else:
            measured = probes.lengths.measure(rows)
            context, lengths = probes.lengths.context, measured.num_tokens
            for record, why in zip(records, measured.problems, strict=True):
                if why:
                    self._bad.add(record.where, why)
        probes.histogram.add(length for length in lengths if length)
        for record, length in zip(records, lengths, strict=True):
            if probes.limit is not None and length > probes.limit:
                self._overlong.add(record.where, f"{length:,} {probes.histogram.unit}")
            if context is not None and length >= context:
                self._beyond.add(record.where, f"{length:,} tokens")
