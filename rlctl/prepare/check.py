"""Checks data files without changing them; one pass finds all problems.

Memory holds one block of rows at a time, plus about 40 bytes of hashes and numbers per row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow.parquet as pq

from rlctl.data.read import REQUIRED, is_row_schema
from rlctl.data.schema import Row
from rlctl.prepare.benchmarks import find_named
from rlctl.prepare.blocks import Record
from rlctl.prepare.duplicates import (
    ID_COLUMNS,
    column_keys,
    normalise,
    repeated,
    row_keys,
    text_key,
    with_answers,
)
from rlctl.prepare.findings import (
    EXAMPLES_SHOWN,
    NO_ANSWER,
    DataFinding,
    RowFindings,
    Severity,
    TruthChecks,
    agree,
    has_number,
    placeholder,
    row_doubts,
    row_finding,
    rows,
    source_findings,
    text_doubts,
    worst_first,
)
from rlctl.prepare.leakage import KINDS, Reference, leakage_comparison, questions_of
from rlctl.prepare.lengths import LengthQuantiles, MeasuredRow, PromptLengths, characters, template_findings
from rlctl.prepare.recipes import Recipe, columns_read, read_rows, recognise
from rlctl.prepare.request import Progress
from rlctl.prepare.sources import Source, find_sources, read_blocks, read_records
from rlctl.prepare.transform import usable_rows

#: Limits per file on the different problems shown, and on the data sources without a grader.
REASONS_SHOWN, SOURCES_SHOWN = 10, 20
#: First rows of each file that show the instructions in its prompts.
SAMPLED_ROWS = 2_000
_DETAIL = re.compile(r"'[^']*'|\d+")


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Files to check, and what to check them against."""

    files: tuple[str, ...]  # files, directories, or anything else `prepare` reads
    #: model whose tokenizer and chat template measure the prompts; None: prompt length is in characters
    model: str | None = None
    against: tuple[str, ...] = ()  # benchmarks by name, and files, whose questions must not occur in `files`
    max_prompt_length: int | None = None  # in tokens; in characters without a model
    trust_remote_code: bool = False  # allow custom code of the model's tokenizer
    #: arguments of the model's chat template, as `data.chat_template_kwargs` in training
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: as `data.continue_final_message` in training
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class FileReport:
    """Layout and contents of one file."""

    path: Path  # of the file
    recipe: str | None  # name of the layout of its first row; None: no row can be read
    rows: int  # all rows, usable or not
    #: name → type: the Arrow type in Parquet, otherwise the Python type of the first row's value
    columns: dict[str, str]
    data_sources: dict[str, int]  # data source → usable rows


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of checking all files."""

    files: list[FileReport]  # in the order given
    findings: list[DataFinding]  # worst first
    lengths: LengthQuantiles  # of all usable prompts
    model: dict[str, Any] | None = None  # tokenizer and template of the lengths; None: no model was given
    leakage: tuple[dict[str, Any], ...] = ()  # `leakage_comparison` of each file and file of `against`

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serializable dict."""
        return {
            "files": [asdict(file) | {"path": str(file.path)} for file in self.files],
            "findings": [asdict(finding) for finding in self.findings],
            "lengths": self.lengths.to_json() if self.lengths.total else None,
            "model": self.model,
            "leakage": list(self.leakage),
        }


def check(request: CheckRequest, progress: Progress | None = None) -> CheckReport:
    """Reads every file once and reports all problems.

    Raises:
        UsageError: a file is missing or unreadable, or the model has no tokenizer.
        EnvironmentFailure: the hub is needed and cannot be reached.
    """
    progress = progress or Progress()
    sources = find_sources(request.files)
    lengths = None
    if request.model is not None:
        kwargs = request.chat_template_kwargs
        lengths = PromptLengths(
            request.model, trust_remote_code=request.trust_remote_code, chat_template_kwargs=kwargs
        )
    against = [(file.name, questions_of(file)) for file in find_named(request.against)]
    first = (islice(read_rows(source), SAMPLED_ROWS) for source in sources if against)
    reference = Reference(against, (row.question for _, row, _ in chain.from_iterable(first) if row))
    measured = LengthQuantiles("tokens" if lengths else "characters")
    probes = _Probes(
        lengths=lengths,
        reference=reference,
        limit=request.max_prompt_length,
        measured=measured,
        continue_final_message=request.continue_final_message,
    )
    progress.phase("reading", sum(source.num_bytes for source in sources))
    checks = [_FileCheck(source, probes, progress) for source in sources]
    findings = [finding for file in checks for finding in file.findings()] + _shared_questions(checks)
    if lengths is not None:
        findings += template_findings(lengths.renderer)
    compared = tuple(comparison for file in checks for comparison in file.comparisons())
    described = lengths.describe() if lengths else None
    reports = [file.report() for file in checks]
    return CheckReport(
        files=reports,
        findings=worst_first(findings),
        lengths=measured,
        model=described,
        leakage=compared,
    )


@dataclass(frozen=True, slots=True)
class _Probes:
    """Settings and shared state of the checks of all files."""

    lengths: PromptLengths | None  # measures prompts in tokens; None: lengths are in characters
    reference: Reference  # questions that must not occur in the files
    limit: int | None  # maximum prompt length; None: no maximum
    measured: LengthQuantiles  # of the lengths of all usable prompts
    continue_final_message: bool  # of the request
    truths: TruthChecks = field(default_factory=TruthChecks)


class _FileCheck:
    """Runs all checks of one file, block by block."""

    def __init__(self, source: Source, probes: _Probes, progress: Progress) -> None:
        self.path = source.path
        self._probes = probes
        first = next((record.values for record in read_records(source) if record.values is not None), None)
        is_parquet = self.path.suffix.lower() == ".parquet"
        self._schema = pq.read_schema(self.path) if is_parquet else None
        self._columns = {str(name): type(value).__name__ for name, value in (first or {}).items()}
        if self._schema is not None:
            self._columns = {field.name: str(field.type) for field in self._schema}
        name = None if first is None else recognise(first)
        if self._schema is not None and is_row_schema(self._schema.names) and name not in {None, "dapo-math"}:
            name = "verl"
        continues = probes.continue_final_message
        self._recipe = Recipe(name, continue_final_message=continues).resolve() if name else None
        self._num_rows = 0
        self._sources: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()  # of these, rows whose answer is a number
        self.split = ""  # the first `extra_info.split`; "" if no row has one
        self._reasons: dict[str, str] = {}  # problem without names and numbers → its first message
        self._bad = RowFindings()
        self._found = RowFindings()
        self._missing = RowFindings()
        parts = []
        for block in read_blocks(source):
            usable, bad = usable_rows(self._recipe or Recipe("generic").resolve(), probes.lengths, block)
            for record in bad:
                self._note_bad(record.where, record.problem)
            parts.append(self._check_rows(usable))
            self._num_rows += len(usable) + len(bad)
            progress.advance(block.num_bytes)
        #: over the usable rows: hashes, see `_check_rows`
        self.hashes = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def report(self) -> FileReport:
        """Layout and contents of the file."""
        name = self._recipe.name if self._recipe else None
        return FileReport(
            path=self.path,
            recipe=name,
            rows=self._num_rows,
            columns=self._columns,
            data_sources=dict(self._sources.most_common()),
        )

    def comparisons(self) -> list[dict[str, Any]]:
        """Counts the usable rows that occur in each reference file."""
        return [
            leakage_comparison(
                str(self.path),
                name,
                self._sources.total(),
                {kind: self._found.count(f"leak-{kind}", file=name) for kind in KINDS},
            )
            for name in self._probes.reference.names
        ]

    def findings(self) -> list[DataFinding]:
        """All findings about the file."""
        of_file = column_findings(self.path, self._schema.names) if self._schema else []
        if not any(finding.code == "missing-columns" for finding in of_file):
            of_file += self._bad.findings()
        of_file += self._found.findings() + self._missing_findings() + self._repeat_findings()
        return of_file + source_findings(self._sources, self._numbers)[:SOURCES_SHOWN]

    def _missing_findings(self) -> list[DataFinding]:
        """The finding about rows without an answer; data without any is for rewards that read none."""
        count = self._missing.count("placeholder")
        if count and count == self._sources.total():
            (finding,) = self._missing.findings()
            places = [example.partition(": ")[0] for example in finding.examples]
            return row_finding("no-answers", count, places)
        return self._missing.findings()

    def _repeat_findings(self) -> list[DataFinding]:
        """Findings about repeated questions, and about those repeated with another ground truth."""
        questions, truths, numbers, columns, *ids = self.hashes
        keys = row_keys(questions, columns, ids)

        def found(kind: str, later: Any, first: Any, **total: int) -> list[DataFinding]:
            pairs = zip(numbers[later[:EXAMPLES_SHOWN]], numbers[first], strict=False)
            examples = [f"{self.path}:{number}: as row {earlier}" for number, earlier in pairs]
            return row_finding(kind, len(later), examples, **total)

        later, first = repeated(keys)
        is_other = truths[later] != truths[first]
        disputed = found("conflicting-answers", later[is_other], first[is_other])
        return found("duplicates", *repeated(with_answers(keys, truths)), total=len(keys)) + disputed

    def _note_bad(self, where: str, reason: str) -> None:
        """Records an unusable row. Problems that differ only in names and numbers count as one."""
        kind = _DETAIL.sub("…", reason)
        if kind not in self._reasons and len(self._reasons) >= REASONS_SHOWN:
            kind = reason = "other complaints"
        self._bad.add("bad-rows", where, reason, reason=self._reasons.setdefault(kind, reason))

    def _check_rows(self, usable: Sequence[tuple[Record, MeasuredRow]]) -> tuple[Any, ...]:
        """Checks the usable rows of a block and returns their part of `hashes`."""
        block = [measured.row for _, measured in usable]
        ruled: list[tuple[Record, Row]] = []
        for record, usable_row in usable:
            row = usable_row.row
            self._sources[row.data_source] += 1
            self._numbers[row.data_source] += has_number(row)
            for kind, detail in (*text_doubts(row), *row_doubts(row)):
                self._found.add(kind, record.where, detail)
            self.split = self.split or str(row.extra.get("split") or "")
            answer = placeholder(row)
            if answer == NO_ANSWER:
                self._missing.add("placeholder", record.where, answer)
            elif answer:
                self._found.add("placeholder", record.where, answer)
            elif row.is_ruled:
                ruled.append((record, row))
        truths = self._probes.truths
        complaints = truths.problems([(row.data_source, row.ground_truth) for _, row in ruled])
        for (record, row), why in zip(ruled, complaints, strict=True):
            missing = truths.missing(row.data_source)
            if missing:
                self._found.add("answers-not-checked", record.where, package=missing.package)
            elif why:
                self._found.add("ground-truth", record.where, f"{row.ground_truth[:60]!r}: {why}")
        self._check_lengths(usable)
        for record, usable_row in usable:
            for way, file in self._probes.reference.matches(usable_row.row.question):
                self._found.add(f"leak-{way}", record.where, file=file)
        recipe = self._recipe or Recipe("generic").resolve()
        others = [
            column_keys(measured.row.extra, columns_read(recipe, record.values or {})[1])
            for record, measured in usable
        ]
        return (  # question, ground truth, row number, other columns, those that name a row
            np.array([text_key(normalise(row.question)) for row in block], np.uint64),
            np.array([crc32(row.ground_truth.encode()) for row in block], np.uint32),
            np.array([record.number for record, _ in usable], np.int64),
            np.array([columns for columns, _ in others], np.uint64),
            *(np.array([ids[name] for _, ids in others], np.uint64) for name in ID_COLUMNS),
        )

    def _check_lengths(self, usable: Sequence[tuple[Record, MeasuredRow]]) -> None:
        probes = self._probes
        unit = self._probes.measured.unit
        context = probes.lengths.context if probes.lengths else None
        for record, measured in usable:
            length = measured.num_tokens if probes.lengths else characters(measured.row)
            probes.measured.add([length])
            if probes.limit is not None and length > probes.limit:
                self._found.add("overlong", record.where, f"{length:,} {unit}", limit=probes.limit, unit=unit)
            if context is not None and length >= context:
                self._found.add("beyond-context", record.where, f"{length:,} tokens", context=context)


def _shared_questions(checks: Sequence[_FileCheck]) -> list[DataFinding]:
    """Findings about rows that repeat a question of an earlier file."""
    findings = []
    for index, later in enumerate(checks):
        keys, _, numbers, *_ = later.hashes
        for earlier in checks[:index]:
            shared = np.flatnonzero(np.isin(keys, earlier.hashes[0]))
            if not len(shared):
                continue
            repeat = agree(len(shared), "repeat")
            message = f"{rows(len(shared))} of {later.path} {repeat} the question of a row of {earlier.path}"
            differ = later.split != earlier.split
            examples = tuple(f"{later.path}:{number}" for number in numbers[shared[:EXAMPLES_SHOWN]])
            fix = (
                "a test split must not share questions with the training split"
                if differ
                else "drop one of them"
            )
            severity: Severity = "error" if differ else "warning"
            findings.append(
                DataFinding(
                    code="shared-questions",
                    severity=severity,
                    what=message,
                    count=len(shared),
                    examples=examples,
                    fix=fix,
                )
            )
    return findings


def column_findings(path: Path, names: Sequence[str]) -> list[DataFinding]:
    """A finding if columns are missing."""
    missing = [name for name in REQUIRED if name not in names] if is_row_schema(names) else []
    if not missing:
        return []
    message = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing: no row can be read"
    fix = "convert the source with `rlctl prepare-data parquet`"
    return [
        DataFinding(
            code="missing-columns",
            severity="error",
            what=message,
            count=len(missing),
            examples=(str(path),),
            fix=fix,
        )
    ]
