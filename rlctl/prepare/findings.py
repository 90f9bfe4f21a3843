"""Findings about data: a sentence, the number of rows, examples and the fix; checks of single rows."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rlctl.data.schema import Row
from rlctl.extras import MissingPackage
from rlctl.reward.build import grader_for, knows_source

Severity = Literal["info", "warning", "error"]
#: Kind of a finding about rows, and the values that fill in its sentence.
_Kind = tuple[str, tuple[tuple[str, Any], ...]]

#: Description of a missing ground truth.
NO_ANSWER = "no answer"
#: Examples shown per finding.
EXAMPLES_SHOWN = 5
_SINGULAR = {"have": "has", "are": "is", "were": "was", "cannot": "cannot"}
_RANKS: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}

#: Kind → `severity`, `what`, `fix` and `code`, which the file explains.
_ROW_FINDINGS = tomllib.loads(Path(__file__).with_name("findings.toml").read_text(encoding="utf-8"))

#: Kind of a finding about rows, and a detail about this row.
Doubt = tuple[str, str]

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Matches instructions that specify the place or the format of the answer.
_FORM = re.compile(
    r"\\(?:boxed|fbox)|\bboxed\b|####|</?answer>|\banswer\b[\"'*]*\s*(?::|is\b)"
    r"|\bfinal (?:answer|result|number)\b"
    r"|\banswer (?:in|inside|within|after|as|should|must|on)\b"
    r"|\b(?:reply|respond|answer)\b[^.?!\n]{0,20}\b(?:with|as|using|in)\b"
    r"|\b(?:only|just|nothing but)\b[^.?!\n]{0,20}\b(?:number|integer|value|result|digit|letter)s?\b"
    r"|\b(?:number|integer|value|result|digits?|letter)s?\s+only\b"
    r"|\b(?:put|write|state|report|return|output|end|finish)\b[^.?!\n]{0,60}\banswer\b",
    re.IGNORECASE,
)
#: Every match has one of these.
_FORM_WORDS = ("box", "answer", "####", "final", "reply", "respond", "only", "just", "nothing but")
#: A ground truth that is a number, and one that may be mathematics.
_NUMBER = re.compile(r"\s*[-+−]?\s*[$€£]?\s*\d[\d,._ ]*(?:/\s*\d+)?\s*%?\s*")
_MAY_BE_MATHEMATICS = re.compile(r"[\d\\]")
#: Texts that data sets write in place of a mathematical answer. "none" in small letters may be an answer.
_PLACEHOLDER = re.compile(
    r"(?i:proof|(?:see|refer to) (?:the )?(?:proof|solution|explanation|above)|n\s*/\s*a|nan|null|tbd|todo"
    r"|(?:answer |solution )?not[ _-]?(?:found|available|provided|given)|no[ _-]?answer|no solution found"
    r"|missing|placeholder)|None|[-–—?.…_]+"
)
_WRAPPED = re.compile(r"\\(?:boxed|text|mathrm|textbf)\s*\{(.*)\}|[\[({<](.*)[\])}>]|\$(.*)\$", re.DOTALL)
#: Numbers that `TruthChecks` ignores: no leading zeros, thousands separators, exponents, factorials.
_ANY_NUMBER = re.compile(
    r"(?<![\d.,^_])(?<!\^\{)(?<!\^\{-)(?:[1-9]\d{0,14}|0(?=\.))(?:\.\d{1,6})?(?!\d|!|[.,]\d)", re.ASCII
)
#: Ground truths of each form that are checked, characters of a form, and number of forms that are counted.
CHECKED_PER_FORM, FORM_CHARS, MAX_FORMS = 100, 60, 20_000


@dataclass(frozen=True, slots=True)
class DataFinding:
    """One finding about data."""

    code: str  # stable identifier for scripts: `duplicates`, `leak-exact`, …
    #: `error`: training fails or learns the wrong thing; `warning`: check before training; `info`: no action
    #: needed
    severity: Severity
    what: str  # one sentence
    count: int  # affected rows (or columns, files)
    examples: tuple[str, ...] = ()  # the first few, as `file:row` or `file:row: detail`
    fix: str = ""  # recommended action; "" if none is needed


def row_finding(
    kind: str, count: int, examples: Sequence[str] = (), *, total: int | None = None, **values: Any
) -> list[DataFinding]:
    """A list with one finding about rows; empty if `count` is 0.

    `kind` is a key of `findings.toml`, and `values` fill in its sentence. With `total`, the number of all
    rows, the sentence also gives the share.
    """
    if not count:
        return []
    entry = _ROW_FINDINGS[kind]
    words = entry["what"].format(**values)
    if kind.startswith("test-leak"):
        sentence = f"{rows(count)} of the test split {agree(count, words)}"
    else:
        sentence = f"{rows(count)} {agree(count, words)}" if total is None else share(count, total, words)
    first = tuple(examples[:EXAMPLES_SHOWN])
    code = entry.get("code", kind)
    fix = entry.get("fix", "")
    return [
        DataFinding(
            code=code,
            severity=entry["severity"],
            what=sentence,
            count=count,
            examples=first,
            fix=fix,
        )
    ]


class RowFindings:
    """Counts rows by kind of finding and by `values`, and keeps the first few examples of each."""

    def __init__(self) -> None:
        self._counts: Counter[_Kind] = Counter()
        self._first: dict[_Kind, list[str]] = {}

    def add(self, kind: str, where: str, detail: str = "", **values: Any) -> None:
        """Adds one row; for `kind` and `values` see `row_finding`."""
        key = (kind, tuple(values.items()))
        self._counts[key] += 1
        first = self._first.setdefault(key, [])
        if len(first) < EXAMPLES_SHOWN:
            first.append(f"{where}: {detail}" if detail else where)

    def count(self, kind: str, **values: Any) -> int:
        """Number of rows of a kind with these `values`."""
        return self._counts[kind, tuple(values.items())]

    def findings(self) -> list[DataFinding]:
        """One finding for each kind and each combination of `values`."""
        return [
            finding
            for (kind, values), first in self._first.items()
            for finding in row_finding(kind, self._counts[kind, values], first, **dict(values))
        ]


def worst_first(findings: Iterable[DataFinding]) -> list[DataFinding]:
    """Sorts findings by severity (errors first), then by count, descending."""
    return sorted(findings, key=lambda finding: (_RANKS[finding.severity], -finding.count, finding.code))


def reaches(findings: Iterable[DataFinding], level: Severity) -> bool:
    """Whether any finding has at least this severity."""
    return any(_RANKS[finding.severity] <= _RANKS[level] for finding in findings)


def lines(findings: Iterable[DataFinding]) -> list[str]:
    """Findings as plain text, worst first: one line each, with examples and fix indented below."""
    result = []
    for finding in worst_first(findings):
        result.append(f"{finding.severity}: {finding.what}")
        result += [f"    {example}" for example in finding.examples]
        if finding.fix:
            result.append(f"    fix: {finding.fix}")
    return result


def rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} row{'s' if count != 1 else ''}"


def agree(count: int, verb: str) -> str:
    """Inflects the plural verb that `verb` starts with for `count` rows: `has` for 1, `have` for 2."""
    plural, space, rest = verb.partition(" ")
    return verb if count != 1 else _SINGULAR.get(plural, f"{plural}s") + space + rest


def share(count: int, total: int, verb: str) -> str:
    """`1 row of 4 (25.0%) has …`; for `verb` see `agree`."""
    return f"{rows(count)} of {total:,} ({count / max(1, total):.1%}) {agree(count, verb)}"


def text_doubts(row: Row) -> Iterator[Doubt]:
    """Yields doubts about control characters and U+FFFD replacement characters."""
    texts = [row.ground_truth, *(message.content for message in row.prompt)]
    match = next(filter(None, map(_CONTROL.search, texts)), None)
    if match:
        yield "control-characters", f"U+{ord(match[0]):04X}"
    if any("\ufffd" in text for text in texts):
        yield "lost-characters", ""


def row_doubts(row: Row) -> list[Doubt]:
    """Doubts about the answer's format."""
    doubts: list[Doubt] = []
    is_mathematics = bool(row.is_ruled and row.ground_truth) and grader_for(row.data_source) == "maths"
    if is_mathematics and not specifies_answer_form(row):
        if knows_source(row.data_source):
            doubts.append(("no-answer-form", ""))
        elif _MAY_BE_MATHEMATICS.search(row.ground_truth):
            doubts.append(("no-answer-form-unknown", ""))
    return doubts


def has_number(row: Row) -> bool:
    """Whether the ground truth is a number."""
    return _NUMBER.fullmatch(row.ground_truth) is not None


def source_findings(num_rows: Mapping[str, int], num_numbers: Mapping[str, int]) -> list[DataFinding]:
    """Findings about data sources without a grader; a remark where all answers are numbers.

    Args:
        num_rows: data source → number of its rows.
        num_numbers: data source → number of rows with `has_number`.
    """
    return [
        finding
        for name, count in num_rows.items()
        if not knows_source(name)
        for finding in row_finding(
            "no-grader-of-numbers" if num_numbers.get(name) == count else "no-grader", count, source=name
        )
    ]


def placeholder(row: Row) -> str:
    """Describes a ground truth that is no answer: missing, or a placeholder such as `proof`; "" if it is one.

    Only answers that are graded as mathematics can be placeholders: elsewhere such a text may be the answer.
    """
    text = row.ground_truth.strip()
    if not text:
        return NO_ANSWER
    if not row.is_ruled or grader_for(row.data_source) != "maths":
        return ""
    while wrapped := _WRAPPED.fullmatch(text):
        text = next(inner for inner in wrapped.groups() if inner is not None).strip()
    return repr(row.ground_truth[:60]) if _PLACEHOLDER.fullmatch(text.rstrip(".! ") or text) else ""


def placeholder_notes(rows_of: Mapping[str, Iterable[Row]]) -> list[str]:
    """A warning for each group of rows, by its name, in which ground truths are placeholders."""
    notes = []
    for name, group in rows_of.items():
        texts = [(row.where, placeholder(row)) for row in group]
        placeholders = [(where, text) for where, text in texts if text not in {"", NO_ANSWER}]
        if placeholders:
            where, text = placeholders[0]
            notes.append(
                f"warning: {name}: in {rows(len(placeholders))} the ground truth is a placeholder, and a "
                f"response that repeats it scores 1 ({where}: {text}); "
                "`rlctl prepare-data parquet` leaves them out"
            )
    return notes


class TruthChecks:
    """Checks ground truths with their graders, for one run.

    The mathematics grader reads texts that differ only in numbers alike. So of each such form only the first
    are checked, and the others if one of these cannot be graded.
    """

    def __init__(self) -> None:
        self._checked: Counter[str] = Counter()  # form → ground truths checked
        self._failed: set[str] = set()  # forms with a ground truth that cannot be graded
        self._missing: dict[str, MissingPackage] = {}  # grader → the package that it cannot do without

    def problems(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """The problem of each (data source, ground truth), "" if there is none; see `check_ground_truths`."""
        from rlctl.reward.trial import check_ground_truths

        forms = {pair: self._form(*pair) for pair in pairs}
        truth_problems: dict[tuple[str, str], str] = {}
        for _ in range(2):  # again for forms that failed
            asked = [
                pair
                for pair, form in forms.items()
                if pair not in truth_problems and not self.missing(pair[0]) and self._is_needed(form)
            ]
            for grader in {grader_for(source) for source, _ in asked}:
                of_grader = [pair for pair in asked if grader_for(pair[0]) == grader]
                try:
                    truth_problems |= zip(of_grader, check_ground_truths(of_grader), strict=True)
                except MissingPackage as error:
                    self._missing[grader] = error
            asked = [pair for pair in asked if pair in truth_problems]
            self._failed |= {forms[pair] for pair in asked if truth_problems[pair]}
        return [truth_problems.get(pair, "") for pair in pairs]

    def missing(self, source: str) -> MissingPackage | None:
        """The missing package because of which ground truths of this source are not checked, if any."""
        return self._missing.get(grader_for(source))

    @staticmethod
    def _form(source: str, truth: str) -> str:
        """The ground truth without its numbers; "" if it must be checked."""
        if len(truth) > FORM_CHARS or grader_for(source) != "maths":
            return ""
        form, count = _ANY_NUMBER.subn("#", truth)
        return form if count else ""

    def _is_needed(self, form: str) -> bool:
        is_new = form not in self._checked and len(self._checked) >= MAX_FORMS
        if not form or form in self._failed or is_new:
            return True
        self._checked[form] += 1
        return self._checked[form] <= CHECKED_PER_FORM


def specifies_answer_form(row: Row) -> bool:
    """Whether the prompt specifies the place or format of the answer, such as a box."""
    lower = row.prompt_text.lower()
    if not any(word in lower for word in _FORM_WORDS):  # quicker than the expression
        return False
    for message in reversed(row.prompt):
        before, question, after = message.content.partition(row.question)
        if _names_form(after) or _names_form(before) or (question and _FORM.search(question)):
            return True
    return False


@lru_cache(maxsize=1024)  # most rows have the same instruction
def _names_form(instruction: str) -> bool:
    return _FORM.search(instruction) is not None
