"""What can be wrong with the rows of one file, checked block by block."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np

from rlctl.data.parsed_record import is_integer
from rlctl.data.schema import Row
from rlctl.prepare.duplicates import normalise, repeated, text_key
from rlctl.prepare.findings import (
    EXAMPLES_SHOWN,
    DataFinding,
    Places,
    conflicts,
    contradicted,
    duplicates,
    no_answer_form,
    rows,
    rows_that,
)
from rlctl.prepare.words import mixed
from rlctl.reward.sources import grader_for, knows_source

STYLES = {"rule", "model", "code"}
#: Different complaints shown of one file; the rest are counted together.
REASONS_SHOWN = 10
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: What asks for an answer at a known place or in a known form.
_FORM = re.compile(
    r"\\(?:boxed|fbox)|\bboxed\b|####|</?answer>|\banswer\b[\"'*]*\s*(?::|is\b)"
    r"|\bfinal (?:answer|result|number)\b"
    r"|\banswer (?:in|inside|within|after|as|should|must|on)\b"
    r"|\b(?:put|write|state|report|return|output|end|finish)\b[^.?!\n]{0,60}\banswer\b",
    re.IGNORECASE,
)
#: GSM8K's annotation of a calculation: <<3+4=7>>.
_CALCULATION = re.compile(r"<<[^<>\n]*=\s*([^<>=\n]+?)\s*>>")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)
_DETAIL = re.compile(r"'[^']*'|\d+")


class BadRowGroups:
    """Rows that cannot be used, by complaint."""

    def __init__(self) -> None:
        self._places: dict[str, Places] = defaultdict(Places)
        self._first: dict[str, str] = {}

    def add(self, where: str, reason: str) -> None:
        """One more; complaints that differ in names and numbers only are one."""
        kind = _DETAIL.sub("…", reason)
        if kind not in self._first and len(self._first) >= REASONS_SHOWN:
            kind = reason = "other complaints"
        self._first.setdefault(kind, reason)
        self._places[kind].add(where, reason)

    def findings(self) -> list[DataFinding]:
        """One per complaint."""
        fix = "correct them, or let `rlctl prepare-data parquet … --bad-rows quarantine` set them aside"
        return [
            finding
            for kind, places in self._places.items()
            for finding in places.finding("bad-rows", "error", f"cannot be used: {self._first[kind]}", fix)
        ]


class TextChecks:
    """Characters and styles that are there by mistake."""

    def __init__(self) -> None:
        self._control, self._replaced = Places(), Places()
        self._styles: dict[str, Places] = defaultdict(Places)

    def add(self, row: Row, where: str) -> None:
        """Check one row."""
        texts = [row.ground_truth, *(message.content for message in row.prompt)]
        for text in texts:
            if found := _CONTROL.search(text):
                self._control.add(where, f"U+{ord(found[0]):04X}")
                break
        if any("\ufffd" in text for text in texts):
            self._replaced.add(where)
        if row.style not in STYLES and len(self._styles) < REASONS_SHOWN:
            self._styles[row.style].add(where)

    def findings(self) -> list[DataFinding]:
        """What was found."""
        control = "have control characters in the prompt or the ground truth"
        replaced = "have U+FFFD, which stands where a character was lost"
        found = self._control.finding("control-characters", "warning", control, "clean the source")
        found += self._replaced.finding("lost-characters", "warning", replaced, "decode the source as UTF-8")
        for style, places in self._styles.items():
            what = f"have reward_model.style {style!r}, which is graded as `rule`"
            found += places.finding("style", "info", what, "write rule, model or code")
        return found


#: (code, detail) of something that a row's answer or its prompt's instruction makes doubtful.
Doubt = tuple[Literal["no-answer-form", "no-answer-form, unknown source", "contradicted-answer"], str]


class AnswerDoubts:
    """Rows whose prompt asks for no answer the grader can find, or whose gold contradicts its solution."""

    def __init__(self) -> None:
        self._places: dict[str, Places] = defaultdict(Places)

    def add(self, doubts: Iterable[Doubt], where: str) -> None:
        """Of one row."""
        for code, detail in doubts:
            self._places[code].add(where, detail)

    def findings(self) -> list[DataFinding]:
        """What was found."""
        known, unknown = (self._places[f"no-answer-form{end}"] for end in ("", ", unknown source"))
        wrong = self._places["contradicted-answer"]
        return [
            *contradicted(wrong.count, wrong.first),
            *no_answer_form(known.count, known.first),
            *no_answer_form(unknown.count, unknown.first, is_known=False),
        ]


def answer_doubts(row: Row) -> list[Doubt]:
    """What is doubtful about a row's answer."""
    doubts: list[Doubt] = []
    if row.style == "rule" and grader_for(row.data_source) == "maths" and not asks_for_form(row):
        known = knows_source(row.data_source)
        doubts.append(("no-answer-form" if known else "no-answer-form, unknown source", ""))
    if detail := contradiction(row):
        doubts.append(("contradicted-answer", detail))
    return doubts


def asks_for_form(row: Row) -> bool:
    """Whether the prompt names a place or form of the answer, such as a box."""
    for message in reversed(row.prompt):
        before, question, after = message.content.partition(row.question)
        if _names_form(after) or _names_form(before) or (question and _FORM.search(question)):
            return True
    return False


@lru_cache(maxsize=1024)  # instructions are the same in most rows
def _names_form(instruction: str) -> bool:
    return _FORM.search(instruction) is not None


def contradiction(row: Row) -> str:
    """How the ground truth differs from what the solution calculates last; "" where it does not.

    A ground truth that is the calculated number rounded to fewer places agrees; so does one that the text
    after the calculation arrives at.
    """
    place = row.answer.rfind("<<")
    found = _CALCULATION.match(row.answer, place) if place >= 0 else None
    if found is None:
        return ""
    try:
        calculated, truth = (
            Decimal(text.replace(",", "").strip(" $%")) for text in (found[1], row.ground_truth)
        )
        if not (calculated.is_finite() and truth.is_finite()):
            return ""
        exponent = truth.as_tuple().exponent
    except InvalidOperation:  # one of them is no number: nothing is known
        return ""
    unit = Decimal(1).scaleb(min(0, int(exponent)))
    if calculated == truth or (calculated % unit and abs(calculated - truth) < unit):
        return ""
    rest = row.answer[found.end() :].partition("####")[0].replace(",", "")
    if any(Decimal(number) == abs(truth) for number in _NUMBER.findall(rest)):
        return ""
    return f"{found[0]} and {row.ground_truth}"


class SplitChecks:
    """Whether `extra_info` of a file says one thing throughout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._splits: Counter[str] = Counter()
        self._sources: dict[str, int] = {}
        self._index, self._index_source = array("q"), array("q")

    @property
    def split(self) -> str:
        """The split most rows name; "" for none."""
        return self._splits.most_common(1)[0][0] if self._splits else ""

    def add(self, row: Row) -> None:
        """Check one row."""
        if isinstance(split := row.extra.get("split"), str) and split:
            self._splits[split] += 1
        if is_integer(row.extra.get("index")):
            self._index.append(row.index)
            self._index_source.append(self._sources.setdefault(row.data_source, len(self._sources)))

    def findings(self) -> list[DataFinding]:
        """What was found."""
        found = []
        where = (str(self._path),)
        if len(self._splits) > 1:
            counts = ", ".join(f"{split!r} {rows(count)}" for split, count in self._splits.most_common())
            what = f"extra_info.split is not the same in all rows: {counts}"
            fix = "keep each split in a file of its own"
            found.append(DataFinding("mixed-splits", "warning", what, len(self._splits), where, fix))
        named = re.match(r"(train|test|val)", self._path.name)
        if named and self.split and not _agree(named[0], self.split):
            what = f"the file's name says {named[0]}, extra_info.split says {self.split}"
            found.append(
                DataFinding("split-name", "warning", what, 1, where, "rename the file, or correct the split")
            )
        keys = np.array(self._index, np.uint64) + mixed(np.array(self._index_source, np.uint64))
        surplus = len(keys) - len(np.unique(keys))
        if surplus:
            what = rows_that(surplus, "have the extra_info.index of another row of the same source")
            found.append(DataFinding("repeated-index", "info", what, surplus, where))
        return found


def _agree(named: str, split: str) -> bool:
    is_train = split.lower().startswith("train")
    return is_train == (named == "train")


class QuestionHashes:
    """Hashes of what each row asks and answers: 20 bytes a row."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Any, Any]] = []

    def add(self, block: Sequence[Row], numbers: Sequence[int]) -> None:
        """Some more rows, and the number each stands on."""
        keys = np.array(
            [text_key(text) for text in normalise([row.question for row in block])], dtype=np.uint64
        )
        truths = np.array([crc32(row.ground_truth.encode()) for row in block], dtype=np.uint32)
        self._parts.append((keys, truths, np.array(numbers, dtype=np.int64)))

    def arrays(self) -> tuple[Any, Any, Any]:
        """Question hashes, answer hashes and row numbers."""
        if not self._parts:
            return np.zeros(0, np.uint64), np.zeros(0, np.uint32), np.zeros(0, np.int64)
        joined = [np.concatenate(part) for part in zip(*self._parts, strict=True)]
        self._parts = [(joined[0], joined[1], joined[2])]
        return self._parts[0]

    def findings(self, path: Path) -> list[DataFinding]:
        """Repeated questions, and those of them that are answered otherwise."""
        keys, truths, numbers = self.arrays()
        if not len(keys):
            return []
        later, first = repeated(keys)
        other = truths[later] != truths[first]

        def shown(places: Any, firsts: Any) -> list[str]:
            pairs = zip(numbers[places[:EXAMPLES_SHOWN]], numbers[firsts[:EXAMPLES_SHOWN]], strict=True)
            return [f"{path}:{number}: as row {earlier}" for number, earlier in pairs]

        return [
            *duplicates(len(later), len(keys), shown(later, first)),
            *conflicts(int(other.sum()), shown(later[other], first[other])),
        ]
