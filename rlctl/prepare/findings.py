"""One finding about data: what, how often, the first places, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "error"]

#: Places shown of each finding.
EXAMPLES_SHOWN = 5
_SINGULAR = {"have": "has", "are": "is", "were": "was", "cannot": "cannot"}
_RANKS: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class DataFinding:
    """One thing found in data.

    Attributes:
        code: its name, for scripts: `duplicates`, `leak-exact`, …
        severity: `error`: training fails or learns the wrong thing; `warning`: look at it before training;
            `info`: good to know.
        what: one sentence.
        count: rows (or files) it holds for.
        examples: the first few, as `file:row` or `file:row: detail`.
        fix: what to do about it; "" where nothing needs doing.
    """

    code: str
    severity: Severity
    what: str
    count: int
    examples: tuple[str, ...] = ()
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """In JSON's types, for manifests and reports."""
        return asdict(self) | {"examples": list(self.examples)}


def worst_first(findings: Iterable[DataFinding]) -> list[DataFinding]:
    """Errors, warnings, infos; the most frequent first in each."""
    return sorted(findings, key=lambda finding: (_RANKS[finding.severity], -finding.count, finding.code))


def reaches(findings: Iterable[DataFinding], level: Severity) -> bool:
    """Whether one of them is at least that bad."""
    return any(_RANKS[finding.severity] <= _RANKS[level] for finding in findings)


def lines(findings: Iterable[DataFinding]) -> list[str]:
    """The findings as plain text, worst first: a line each, examples and remedy indented below."""
    result = []
    for finding in worst_first(findings):
        result.append(f"{finding.severity}: {finding.what}")
        result += [f"    {example}" for example in finding.examples]
        if finding.fix:
            result.append(f"    fix: {finding.fix}")
    return result


class Places:
    """Counts rows something holds for, and remembers the first few."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, where: str, detail: str = "") -> None:
        """One more."""
        self.count += 1
        if len(self.first) < EXAMPLES_SHOWN:
            self.first.append(f"{where}: {detail}" if detail else where)

    def finding(self, code: str, severity: Severity, what: str, fix: str = "") -> list[DataFinding]:
        """As a finding, if there was any; `what` begins with a verb in the plural, for the rows."""
        if not self.count:
            return []
        return [DataFinding(code, severity, rows_that(self.count, what), self.count, tuple(self.first), fix)]


def rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} row{'s' if count != 1 else ''}"


def agree(count: int, verb: str) -> str:
    """The verb as so many rows have it: `1 row has`, `2 rows have`.

    Args:
        count: rows.
        verb: in the plural; more words may follow.
    """
    plural, space, rest = verb.partition(" ")
    return verb if count != 1 else _SINGULAR.get(plural, f"{plural}s") + space + rest


def rows_that(count: int, verb: str) -> str:
    """`1 row has …`, `2 rows have …`; arguments as of `agree`."""
    return f"{rows(count)} {agree(count, verb)}"


def share(count: int, total: int, verb: str) -> str:
    """`1 row of 4 (25.0%) has …`; arguments as of `agree`."""
    return f"{rows(count)} of {total:,} ({count / max(1, total):.1%}) {agree(count, verb)}"


def _counted(
    code: str, severity: Severity, what: str, count: int, examples: Sequence[str], fix: str = ""
) -> list[DataFinding]:
    """The finding with its first examples; none where no row is concerned."""
    found = tuple(examples[:EXAMPLES_SHOWN])
    return [DataFinding(code, severity, what, count, found, fix)] if count else []


def duplicates(count: int, total: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Rows that ask what an earlier row asks, of `total`."""
    return _counted(
        "duplicates",
        "warning",
        f"{share(count, total, 'ask')} what an earlier row asks",
        count,
        examples,
        "`rlctl prepare-data parquet … --duplicates drop` keeps the first of each",
    )


def conflicts(count: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Rows that ask what an earlier row asks, and have another answer."""
    return _counted(
        "conflicting-answers",
        "warning",
        rows_that(count, "ask what an earlier row asks, with another ground truth"),
        count,
        examples,
        "find out which answer is right: one of them teaches the wrong thing",
    )


def near_duplicates(count: int, total: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Rows that ask almost what an earlier row asks."""
    return _counted(
        "near-duplicates",
        "info",
        f"{share(count, total, 'ask')} almost what an earlier row asks",
        count,
        examples,
        "`--near-duplicates drop` keeps the first of each",
    )


_LEAKS: dict[str, tuple[Severity, str]] = {
    "exact": ("error", "ask a question of"),
    "masked": ("warning", "ask, but for the numbers, a question of"),
    "ngram": ("warning", "share 13 words in a row with a question of"),
}


def leaked(
    kind: str, file: str, count: int, examples: Sequence[str] = (), split: str = "train"
) -> list[DataFinding]:
    """Rows that occur in the test split or a benchmark.

    Args:
        kind: `exact`, `masked` or `ngram`.
        file: where they occur.
        count: rows.
        examples: the first few.
        split: the rows are of; `test`: they are not trained on.
    """
    severity, words = _LEAKS[kind]
    if split == "test":
        what = f"of the test split {agree(count, words)} {file}"
        fix = "the test split is then no measure apart from that file: remove them from the input"
        return _counted(f"test-leak-{kind}", "warning", f"{rows(count)} {what}", count, examples, fix)
    fix = (
        "`rlctl prepare-data parquet … --leakage drop` leaves them out: "
        "scores on that file would measure memory"
    )
    return _counted(f"leak-{kind}", severity, rows_that(count, f"{words} {file}"), count, examples, fix)


def overlong(
    count: int, limit: int, done: str, examples: Sequence[str] = (), unit: str = "tokens"
) -> list[DataFinding]:
    """Prompts over the limit.

    Args:
        count: rows.
        limit: the longest a prompt may be.
        done: what was done with them: `kept`, `dropped`, `cut`.
        examples: the first few.
        unit: of the limit.
    """
    kept = done == "kept"
    have = "have" if kept else f"were {done} for"
    fix = "raise data.max_prompt_length, or prepare with --overlong drop, cut-left or cut-right"
    return [
        DataFinding(
            "overlong",
            "warning" if kept else "info",
            rows_that(count, f"{have} prompts of more than {limit:,} {unit}"),
            count,
            tuple(examples[:EXAMPLES_SHOWN]),
            fix if kept else "",
        )
    ]


def beyond_context(count: int, context: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Prompts that leave the model no room."""
    return _counted(
        "beyond-context",
        "error",
        rows_that(count, f"have prompts that fill or exceed the model's context of {context:,} tokens"),
        count,
        examples,
        "no response fits behind them: drop or cut them with --max-prompt-length and --overlong",
    )


def ungradable(count: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Ground truths their own grader does not accept."""
    return _counted(
        "ground-truth",
        "error",
        rows_that(count, "have a ground truth that their grader cannot read or compare"),
        count,
        examples,
        "their rewards would be wrong: fix the ground truth, or name another data_source or reward",
    )


def no_answer_form(count: int, examples: Sequence[str] = (), *, is_known: bool = True) -> list[DataFinding]:
    """Mathematics whose prompts ask for no form of the answer that the grader looks for.

    Args:
        count: rows.
        examples: the first few.
        is_known: a grader is registered for their sources; others may have a reward of their own.
    """
    what = "are graded as mathematics, and the prompt asks for no form of the answer (\\boxed{}, ####, …)"
    fix = r"add --instruction 'Put the final answer in \boxed{}.': else right answers may be read wrong"
    severity: Severity = "warning" if is_known else "info"
    return _counted("no-answer-form", severity, rows_that(count, what), count, examples, fix)


def contradicted(count: int, examples: Sequence[str] = ()) -> list[DataFinding]:
    """Ground truths other than what the worked solution calculates last."""
    what = "have a ground truth that contradicts the last calculation <<…=n>> of the worked solution"
    fix = "find out which is right, and correct or remove the row"
    return _counted("contradicted-answer", "warning", rows_that(count, what), count, examples, fix)


def unknown_source(source: str, count: int) -> DataFinding:
    """A data source no grader is registered for."""
    return DataFinding(
        "no-grader",
        "warning",
        rows_that(count, f"have data_source {source!r}, for which no grader is registered"),
        count,
        fix="`reward.name: auto` grades them as mathematics: name the reward, or rename the source",
    )
