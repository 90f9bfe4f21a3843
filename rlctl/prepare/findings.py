"""Findings about data: a sentence, the number of rows, examples and the fix; checks of single rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Literal

from rlctl.data.schema import Row
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

_FIRST_KEPT = "`rlctl prepare-data parquet … --duplicates drop` keeps the first of each"
_LEAK_FIX = (
    "`rlctl prepare-data parquet … --leakage drop` leaves them out: scores on that file would be inflated"
)
_TEST_LEAK_FIX = "the test split then repeats that file: remove these rows from the input"
_NO_FORM = r"are graded as mathematics, and the prompt requests no form of the answer (\boxed{{}}, ####, …)"
_NO_FORM_FIX = (
    r"add --instruction 'Put the final answer in \boxed{}.': else right answers may not be recognised"
)
_EXACT, _MASKED = "ask a question of {file}", "ask a question of {file} with other numbers"
_NGRAM = "share 13 words in a row with a question of {file}"

#: Kind → severity; predicate of the sentence, starting with a plural verb; and the fix.
_ROW_FINDINGS: dict[str, tuple[Severity, str, str]] = {
    "duplicates": ("warning", "repeat the question of an earlier row", _FIRST_KEPT),
    "conflicting-answers": (
        "warning",
        "repeat the question of an earlier row, with another ground truth",
        "find out which answer is right, and remove the other row",
    ),
    "near-duplicates": (
        "info",
        "repeat the question of an earlier row with small changes",
        "`--near-duplicates drop` keeps the first of each",
    ),
    "leak-exact": ("error", _EXACT, _LEAK_FIX),
    "leak-masked": ("warning", _MASKED, _LEAK_FIX),
    "leak-ngram": ("warning", _NGRAM, _LEAK_FIX),
    "test-leak-exact": ("warning", _EXACT, _TEST_LEAK_FIX),
    "test-leak-masked": ("warning", _MASKED, _TEST_LEAK_FIX),
    "test-leak-ngram": ("warning", _NGRAM, _TEST_LEAK_FIX),
    "overlong": (
        "warning",
        "have prompts of more than {limit:,} {unit}",
        "raise data.max_prompt_length, or prepare with --overlong drop, cut-left or cut-right",
    ),
    "overlong-changed": ("info", "were {done} for prompts of more than {limit:,} tokens", ""),
    "beyond-context": (
        "error",
        "have prompts that fill or exceed the model's context of {context:,} tokens",
        "no response fits after them: drop or cut them with --max-prompt-length and --overlong",
    ),
    "ground-truth": (
        "error",
        "have a ground truth that their grader cannot read or compare",
        "their rewards would be wrong: fix the ground truth, or name another data_source or reward",
    ),
    "no-answer-form": ("warning", _NO_FORM, _NO_FORM_FIX),
    "no-answer-form-unknown": ("info", _NO_FORM, _NO_FORM_FIX),
    "contradicted-answer": (
        "warning",
        "have a ground truth that contradicts the last calculation <<…=n>> of the worked solution",
        "find out which is right, and correct or remove the row",
    ),
    "media": (
        "error",
        "have pictures, videos or sound, of which training reads nothing: their prompts are only the text",
        "remove these rows, or what the questions can do without",
    ),
    "no-grader": (
        "warning",
        "have data_source {source!r}, for which no grader is registered",
        "`reward.name: auto` grades them as mathematics: name the reward, or rename the source",
    ),
    "bad-rows": (
        "error",
        "cannot be used: {reason}",
        "correct them, or let `rlctl prepare-data parquet … --bad-rows quarantine` move them",
    ),
    "uncalled-tests": (
        "error",
        "have tests in a function that nothing calls",
        "every program would pass: call it, as in check(f)",
    ),
    "control-characters": (
        "warning",
        "have control characters in the prompt or the ground truth",
        "clean the source",
    ),
    "lost-characters": (
        "warning",
        "have U+FFFD, which replaces a character that was lost",
        "decode the source as UTF-8",
    ),
    "style": (
        "info",
        "have reward_model.style {style!r}, which is graded as `rule`",
        "write rule, model or code",
    ),
    "placeholder": (
        "error",
        "have no answer, or a placeholder in place of one, as ground truth",
        "a response that repeats it would score 1: `rlctl prepare-data parquet` leaves these rows out",
    ),
    "placeholder-dropped": (
        "warning",
        "had no answer, or a placeholder in place of one, as ground truth, and were dropped",
        "`--placeholders keep` keeps those with a text",
    ),
}
#: Kinds reported under the code of another kind.
_CODES = {
    "placeholder-dropped": "placeholder",
    "overlong-changed": "overlong",
    "no-answer-form-unknown": "no-answer-form",
}

#: Kind of a finding about rows, and a detail about this row.
Doubt = tuple[str, str]

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
STYLES = {"rule", "model", "code"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Matches instructions that specify the place or the format of the answer.
_FORM = re.compile(
    r"\\(?:boxed|fbox)|\bboxed\b|####|</?answer>|\banswer\b[\"'*]*\s*(?::|is\b)"
    r"|\bfinal (?:answer|result|number)\b"
    r"|\banswer (?:in|inside|within|after|as|should|must|on)\b"
    r"|\b(?:put|write|state|report|return|output|end|finish)\b[^.?!\n]{0,60}\banswer\b",
    re.IGNORECASE,
)
#: GSM8K's annotation of a calculation: <<3+4=7>>.
_CALCULATION = re.compile(r"<<[^<>\n]*=\s*([^<>=\n]+?)\s*>>")
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
_NUMBER = re.compile(
    r"(?P<whole>-?[1-9]\d{0,14})|(?P<decimal>-?(?:0|[1-9]\d{0,8})\.\d{1,6})"
    r"|(?P<fraction>-?[1-9]\d{0,8}/[1-9]\d{0,8})|(?P<latex>-?\\[dt]?frac\{[1-9]\d{0,8}\}\{[1-9]\d{0,8}\})",
    re.ASCII,
)
#: Different numbers of each form that are checked.
CHECKED_PER_FORM = 100
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+", re.ASCII)


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

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-serializable dict for manifests and reports."""
        return asdict(self) | {"examples": list(self.examples)}


def row_finding(
    kind: str, count: int, examples: Sequence[str] = (), *, total: int | None = None, **values: Any
) -> list[DataFinding]:
    """A list with one finding about rows; empty if `count` is 0.

    `kind` is a key of `_ROW_FINDINGS`, and `values` fill in its sentence. With `total`, the number of all
    rows, the sentence also gives the share.
    """
    if not count:
        return []
    severity, what, fix = _ROW_FINDINGS[kind]
    what = what.format(**values)
    if kind.startswith("test-leak"):
        sentence = f"{rows(count)} of the test split {agree(count, what)}"
    else:
        sentence = f"{rows(count)} {agree(count, what)}" if total is None else share(count, total, what)
    first = tuple(examples[:EXAMPLES_SHOWN])
    return [DataFinding(_CODES.get(kind, kind), severity, sentence, count, first, fix)]


class RowFindings:
    """Counts rows by kind of finding and by `values`, and keeps the first few examples of each."""

    def __init__(self) -> None:
        self._counts: Counter[_Kind] = Counter()
        self._first: dict[_Kind, list[str]] = {}

    def add(self, kind: str, where: str, detail: str = "", **values: Any) -> None:
        """Adds one row; for `kind` and `values` see `row_finding`."""
        key = (kind, tuple(values.items()))
        self._counts[key] += 1
        if len(first := self._first.setdefault(key, [])) < EXAMPLES_SHOWN:
            first.append(f"{where}: {detail}" if detail else where)

    def count(self, kind: str, **values: Any) -> int:
        """Number of rows of a kind with these `values`."""
        return self._counts[kind, tuple(values.items())]

    def findings(self) -> list[DataFinding]:
        """One finding for each kind and each combination of `values`."""
        return [
            found
            for (kind, values), first in self._first.items()
            for found in row_finding(kind, self._counts[kind, values], first, **dict(values))
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
    if found := next(filter(None, map(_CONTROL.search, texts)), None):
        yield "control-characters", f"U+{ord(found[0]):04X}"
    if any("\ufffd" in text for text in texts):
        yield "lost-characters", ""


def row_doubts(row: Row, values: Mapping[str, Any]) -> list[Doubt]:
    """Doubts about pictures and sound in the record's `values`, the answer's format, and a contradiction."""
    doubts: list[Doubt] = [("media", name) for name in _MEDIA if values.get(name)]
    if row.is_ruled and grader_for(row.data_source) == "maths" and not specifies_answer_form(row):
        known = knows_source(row.data_source)
        doubts.append(("no-answer-form" if known else "no-answer-form-unknown", ""))
    if detail := contradiction(row):
        doubts.append(("contradicted-answer", detail))
    if name := uncalled_tests(row):
        doubts.append(("uncalled-tests", name))
    return doubts


def uncalled_tests(row: Row) -> str:
    """Name of a function with asserts if the tests of programs are only in functions that nothing calls."""
    if grader_for(row.data_source) != "code" or row.ground_truth.lstrip().startswith("{"):
        return ""
    try:
        body = ast.parse(row.ground_truth).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the grader refuses it
        return ""
    defined = {one.name: one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    others = [node for one in body if one not in defined.values() for node in ast.walk(one)]
    if any(isinstance(node, ast.Assert) or getattr(node, "id", None) in defined for node in others):
        return ""
    tests = (name for name, one in defined.items() if any(isinstance(n, ast.Assert) for n in ast.walk(one)))
    return next(tests, "")


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
        if found := [(row.where, what) for row in group if (what := placeholder(row))]:
            where, what = found[0]
            notes.append(
                f"warning: {name}: in {rows(len(found))} the ground truth is a placeholder, and a response "
                f"that repeats it scores 1 ({where}: {what}); `rlctl prepare-data parquet` leaves them out"
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

    def problems(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """The problem of each (data source, ground truth), "" if there is none; see `check_ground_truths`."""
        from rlctl.reward.trial import check_ground_truths

        forms = {pair: self._form(*pair) for pair in pairs}
        found: dict[tuple[str, str], str] = {}
        for _ in range(2):  # again for forms that failed
            asked = [pair for pair, form in forms.items() if pair not in found and self._is_needed(form)]
            found |= zip(asked, check_ground_truths(asked), strict=True)
            self._failed |= {forms[pair] for pair in asked if found[pair]}
        return [found.get(pair, "") for pair in pairs]

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
    for message in reversed(row.prompt):
        before, question, after = message.content.partition(row.question)
        if _names_form(after) or _names_form(before) or (question and _FORM.search(question)):
            return True
    return False


@lru_cache(maxsize=1024)  # most rows have the same instruction
def _names_form(instruction: str) -> bool:
    return _FORM.search(instruction) is not None


def contradiction(row: Row) -> str:
    """Describes how the ground truth contradicts the last annotated calculation; "" if it does not.

    A ground truth also agrees if it is the calculated number rounded to fewer decimals or in another unit
    (cents, percent), or if it occurs in the text after the calculation.
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
        unit = Decimal(1).scaleb(min(0, int(truth.as_tuple().exponent)))
        is_rounded = calculated % unit and abs(calculated - truth) < unit
        if is_rounded or truth in {calculated, calculated * 100, calculated / 100}:
            return ""
    except InvalidOperation:  # one of them is not a number, or has too many digits to round it
        return ""
    rest = row.answer[found.end() :].partition("####")[0].replace(",", "")
    if any(Decimal(number) == abs(truth) for number in _NUMBER.findall(rest)):
        return ""
    return f"{found[0]} and {row.ground_truth}"
