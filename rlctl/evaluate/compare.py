"""Compares two evaluations on their shared questions: paired differences with confidence intervals."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.evaluate.evaluate_report import read_evaluation
from rlctl.evaluate.intervals import (
    ALIKE,
    LEVEL,
    SHARE,
    Difference,
    Range,
    estimate,
    paired,
    questions_needed,
)
from rlctl.evaluate.page import TableRow, drawn, render_page, stderr_text
from rlctl.evaluate.request import checked_ks
from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import OVERALL, RIGHT, Question, bounds_of, questions_of

DIFFERENCE_HEADINGS = ("A", "stderr", "B", "stderr", "B − A", "stderr", "95 % interval", "p")
#: Maximum number of examples of questions that are right only in A, and only in B.
EXAMPLES = 3
#: Difference of shares for which the number of questions needed is reported.
WORTH_SEEING = 0.02

#: Data source, hash of the conversation, and occurrence number of that conversation (from 0).
_Identity = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of both evaluations over their shared questions."""

    name: str  # `avg`, `pass@4`, `maj@8` …
    #: a, b: means of A and B
    a: float
    b: float
    difference: Difference  # B − A, paired by question
    is_share: bool  # whether values are known to lie in [0, 1], so that differences are percentage points
    #: a_stderr, b_stderr: standard errors of `a` and `b` over the shared questions; None for one question
    a_stderr: float | None
    b_stderr: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison over one data source or over all questions."""

    data_source: str  # name of the source, or `overall`
    #: num_shared, num_only_a, num_only_b: questions in both evaluations, only in A (excluded), only in B
    #: (excluded)
    num_shared: int
    num_only_a: int
    num_only_b: int
    figures: list[Figure]  # metrics with a value in both evaluations
    conclusion: str  # the conclusion from the mean rewards, in one sentence


@dataclass(frozen=True, slots=True)
class Flipped:
    """A question that most responses of one side answer right, and at most half of the other's."""

    right_in: str  # `A` or `B`
    data_source: str
    question: str  # as the model reads it
    ground_truth: str
    #: a, b: share of right responses
    a: float
    b: float
    #: a_response, b_response: the first response that is right, or wrong, as most of this side are
    a_response: str
    b_response: str


@dataclass(frozen=True, slots=True)
class CompareReport:
    """Result of `compare`: a comparison per data source, last one over all questions if there are several."""

    a: str
    b: str
    comparisons: list[Comparison]
    num_flipped: dict[str, int]  # `A`, `B` → number of questions that are right only there, see `Flipped`
    flipped: list[Flipped]  # up to `EXAMPLES` of each, those with the largest differences
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Side:
    """One evaluation: `results.json`, and questions by identity."""

    about: Mapping[str, Any]
    questions: Mapping[_Identity, Question]

    @classmethod
    def read(cls, directory: Path) -> _Side:
        about, samples = read_evaluation(directory)
        return cls(about, _by_identity(samples))

    @property
    def score_range(self) -> Range | None:
        """Least and greatest possible reward; None: not known."""
        ends = self.about.get("score_range")
        return None if ends is None else (ends[0], ends[1])

    @property
    def limit(self) -> float:
        """Allowed share of ungraded responses."""
        return float(self.about["reward"]["max_error_fraction"])

    def ungraded(self, keys: Iterable[_Identity]) -> str:
        """`5 of 90` if more responses to these questions than allowed have no grade; else empty."""
        questions = [self.questions[key] for key in keys]
        total = sum(len(question.samples) for question in questions)
        missing = total - sum(len(question.graded) for question in questions)
        return f"{missing:,} of {total:,}" if missing > self.limit * total else ""

    def of(self, source: str) -> _Side:
        """The same evaluation restricted to one data source."""
        chosen = {key: value for key, value in self.questions.items() if value.data_source == source}
        return _Side(self.about, chosen)

    def right(self, key: _Identity) -> float:
        """Share of right responses to a question, of those that are graded; NaN without any."""
        graded = self.questions[key].graded
        return sum(map(_is_right, graded)) / len(graded) if graded else math.nan

    def response(self, key: _Identity) -> str:
        """The first response to a question that is right or wrong as most of its responses are."""
        graded = self.questions[key].graded
        is_right = self.right(key) > 0.5
        return next((sample.response for sample in graded if _is_right(sample) == is_right), "")


def compare(a: Path, b: Path, ks: Sequence[int] | None = None) -> CompareReport:
    """Compares two evaluations on their shared questions.

    Questions are paired by their conversation, so order and chat template do not matter. Repeated questions
    are paired in order of occurrence.

    Raises:
        UsageError: a directory is not an evaluation, no question is shared, or k > n.
    """
    sides = _Side.read(a), _Side.read(b)
    n = min(int(side.about["sampling"]["n"]) for side in sides)
    ks = checked_ks(ks, n)
    counts = [len(side.questions) for side in sides]
    if not sides[0].questions.keys() & sides[1].questions.keys():
        raise UsageError(
            f"the evaluations have no question in common ({counts[0]} and {counts[1]})",
            where=f"{a} and {b}",
            fix="evaluate both models with the same --data",
        )
    sources = sorted({question.data_source for side in sides for question in side.questions.values()})
    comparisons = [_comparison(source, sides[0].of(source), sides[1].of(source), ks, n) for source in sources]
    warnings = list(_warnings(*sides))
    if len(sources) > 1:
        comparisons.append(_comparison(OVERALL, *sides, ks, n))
        warnings.append(
            f"{len(sources)} data sources are compared at the {LEVEL:.0%} level each: equal models show a "
            f"difference on at least one of them in about {1.0 - LEVEL ** len(sources):.0%} of cases"
        )
    return CompareReport(str(a), str(b), comparisons, *_flipped(*sides), warnings)


def _is_right(sample: EvalSample) -> bool:
    return sample.reward is not None and sample.reward >= RIGHT


def _flipped(a: _Side, b: _Side) -> tuple[dict[str, int], list[Flipped]]:
    """Numbers of questions that are right only in A or only in B, and examples."""
    shares = {key: (a.right(key), b.right(key)) for key in a.questions if key in b.questions}
    gains = {key: in_b - in_a for key, (in_a, in_b) in shares.items()}
    flipped = [key for key, both in shares.items() if min(both) <= 0.5 < max(both)]
    flipped.sort(key=lambda key: -abs(gains[key]))
    of_side = {
        "A": [key for key in flipped if gains[key] < 0],
        "B": [key for key in flipped if gains[key] > 0],
    }
    shown = [key for keys in of_side.values() for key in keys[:EXAMPLES]]
    examples = []
    for key in shown:
        asked = a.questions[key].samples[0]
        about = ("B" if gains[key] > 0 else "A", asked.data_source, asked.prompt, asked.ground_truth)
        examples.append(Flipped(*about, *shares[key], a.response(key), b.response(key)))
    return {side: len(keys) for side, keys in of_side.items()}, examples


def _by_identity(samples: Sequence[EvalSample]) -> dict[_Identity, Question]:
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[_Identity, Question] = {}
    for question in questions_of(samples):
        asked = question.samples[0]
        text = json.dumps(asked.messages, sort_keys=True) if asked.messages else asked.prompt
        name = (question.data_source, hashlib.sha256(text.encode()).hexdigest())
        found[*name, seen[name]] = question
        seen[name] += 1
    return found


def _comparison(source: str, a: _Side, b: _Side, ks: Sequence[int], n: int) -> Comparison:
    shared = [key for key in a.questions if key in b.questions]
    values = [(a.questions[key].figures(ks, n), b.questions[key].figures(ks, n)) for key in shared]
    bounds = a.score_range if a.score_range == b.score_range else None
    names = values[0][0] if values else ()
    figures = [
        figure for name in names if (figure := _figure(name, values, bounds_of(name, bounds))) is not None
    ]
    conclusion = _conclusion(figures[0]) if figures and figures[0].name == "avg" else "nothing to compare"
    if a.ungraded(shared) or b.ungraded(shared):
        conclusion = "no conclusion: too many responses could not be graded"
    left_out = (len(a.questions) - len(shared), len(b.questions) - len(shared))
    return Comparison(source, len(shared), *left_out, figures, conclusion)


_Values = dict[str, float | None]


def _figure(name: str, values: Sequence[tuple[_Values, _Values]], bounds: Range | None) -> Figure | None:
    both = ((in_a[name], in_b[name]) for in_a, in_b in values)
    pairs = [(first, second) for first, second in both if first is not None and second is not None]
    most = math.inf if bounds is None else bounds[1] - bounds[0]
    difference = paired([second - first for first, second in pairs], most=most)
    a, b = (estimate([pair[side] for pair in pairs], bounds=bounds) for side in (0, 1))
    if difference is None or a is None or b is None:
        return None
    return Figure(
        name=name,
        a=a.value,
        b=b.value,
        difference=difference,
        is_share=bounds == SHARE,
        a_stderr=a.stderr,
        b_stderr=b.stderr,
    )


def _conclusion(figure: Figure) -> str:
    measured = figure.difference
    scale, unit, number = (100.0, "points", ".1f") if figure.is_share else (1.0, "of reward", ".3g")
    better, sign = ("B", 1.0) if measured.value > 0 else ("A", -1.0)
    if measured.low is None or measured.high is None:
        if abs(measured.value) < ALIKE:
            return "no difference on any question"
        each = (
            "one question" if measured.num_questions == 1 else f"each of {measured.num_questions} questions"
        )
        return (
            f"no conclusion: B − A is {measured.value * scale:+.3g} {unit} on {each}, which gives no interval"
        )
    if measured.low <= 0.0 <= measured.high:
        needed = ""
        if figure.is_share and measured.deviation:
            count = questions_needed(measured.deviation, WORTH_SEEING)
            needed = f"; about {count:,} questions would be needed to see {WORTH_SEEING * 100:.0f} points"
        return f"no difference detected{needed}"
    low, high = sorted((sign * scale * measured.low, sign * scale * measured.high))
    value = sign * scale * measured.value
    return f"{better} is better by {value:{number}} {unit} (95 %: {low:{number}} to {high:{number}})"


def _warnings(a: _Side, b: _Side) -> Iterator[str]:
    of_a = a.about
    of_b = b.about
    for name in sorted(of_a["sampling"].keys() | of_b["sampling"].keys()):
        in_a = of_a["sampling"].get(name)
        in_b = of_b["sampling"].get(name)
        if name not in {"n", "seed"} and in_a != in_b:
            yield f"sampled differently: {name} is {in_a} in A and {in_b} in B"
    if of_a["model"].get("template_sha256") != of_b["model"].get("template_sha256"):
        yield "the chat templates differ: the models read the same questions in different prompts"
    elif num_other := _num_other_prompts(a, b):
        yield (
            f"{num_other:,} shared questions were asked in different prompts, for example by other "
            "chat_template_kwargs or instructions: the difference is not the models' alone"
        )
    if any(of_a[name] != of_b[name] for name in ("reward", "reward_files")):
        yield "graded differently: use `--regrade` with one --reward for both"
    for name in ("rlctl", "math-verify"):
        in_a = of_a["versions"].get(name)
        in_b = of_b["versions"].get(name)
        if in_a != in_b:
            yield f"graded by other versions: {name} is {in_a} in A and {in_b} in B; use `--regrade` for both"
    shared = a.questions.keys() & b.questions.keys()
    truths = [[side.questions[key].samples[0].ground_truth for key in shared] for side in (a, b)]
    changed = sum(in_a != in_b for in_a, in_b in zip(*truths, strict=True))
    if changed:
        yield f"{changed:,} shared questions have another ground truth in B: evaluate both with the same data"
    for name, side in (("A", a), ("B", b)):
        ungraded = side.ungraded(side.questions)
        if ungraded:
            excluded = "they are excluded, and the scores may be unreliable"
            yield (
                f"{ungraded} responses of {name} could not be graded, more than "
                f"reward.max_error_fraction ({side.limit:g}): {excluded}"
            )


def _num_other_prompts(a: _Side, b: _Side) -> int:
    """Number of shared questions whose rendered prompts differ."""
    if a.about["data"].get("prompts_sha256", "") == b.about["data"].get("prompts_sha256"):
        return 0
    shared = a.questions.keys() & b.questions.keys()
    return sum(a.questions[key].samples[0].prompt != b.questions[key].samples[0].prompt for key in shared)


def difference_rows(comparison: Comparison) -> list[TableRow]:
    """Table rows with the metrics of both evaluations and their differences."""
    rows = []
    for figure in comparison.figures:
        measured = figure.difference
        has_interval = measured.low is not None and measured.high is not None
        cells = (
            f"{figure.a:.3f}",
            stderr_text(figure.a_stderr),
            f"{figure.b:.3f}",
            stderr_text(figure.b_stderr),
            f"{measured.value:+.3f}",
            stderr_text(measured.stderr),
            f"{measured.low:+.3f} to {measured.high:+.3f}" if has_interval else "—",
            "—" if measured.p_value is None else f"{measured.p_value:.2g}",
        )
        rows.append(TableRow(figure.name, cells, (measured.value, measured.low, measured.high)))
    return rows


def shared_questions(comparison: Comparison) -> str:
    """`512 shared questions (3 only in A)`."""
    counts = (("A", comparison.num_only_a), ("B", comparison.num_only_b))
    only = ", ".join(f"{count:,} only in {side}" for side, count in counts if count)
    return f"{comparison.num_shared:,} shared questions" + (f" ({only})" if only else "")


def flipped_counts(report: CompareReport) -> str:
    """`12 questions are right only in A, 30 only in B`; empty if none is."""
    counts = report.num_flipped
    are = "question is" if counts["A"] == 1 else "questions are"
    return f"{counts['A']:,} {are} right only in A, {counts['B']:,} only in B" if any(counts.values()) else ""


def comparison_page(report: CompareReport) -> str:
    """Renders a comparison of two evaluations as an HTML page."""
    tables = []
    for comparison in report.comparisons:
        found = difference_rows(comparison)
        ends = [abs(end) for row in found for end in row.range or () if end is not None]
        reach = max([0.01, *ends])
        rows = [drawn(row, left=100.0, scale=96.0 / reach, zero=True) for row in found]
        about = {"name": comparison.data_source, "amount": shared_questions(comparison)}
        axis = (f"−{reach:.2g}", "B − A", f"+{reach:.2g}")
        tables.append(about | {"axis": axis, "rows": rows, "conclusion": comparison.conclusion})
    return render_page(
        "compare.html.j2",
        title="Is B better than A?",
        about=[f"A  {report.a}", f"B  {report.b}"],
        notes=report.warnings,
        headings=DIFFERENCE_HEADINGS,
        tables=tables,
        counts=flipped_counts(report),
        flipped=report.flipped,
    )
