"""Two evaluations of the same questions: is one model better, and how sure is that."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlctl.errors import UsageError
from rlctl.evaluate.evaluate_report import read_evaluation
from rlctl.evaluate.intervals import Difference, estimate, paired, questions_needed
from rlctl.evaluate.request import checked_ks
from rlctl.evaluate.samples import EvalSample
from rlctl.evaluate.scores import OVERALL, Question, questions_of
from rlctl.spec.reward import RewardSpec

#: Difference in shares for which the number of questions needed is reported.
WORTH_SEEING = 0.02


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both evaluations over the questions they share.

    Attributes:
        name: `avg`, `pass@4`, `maj@8` …
        a, b: the means.
        a_stderr, b_stderr: their standard errors over the shared questions; None for one question.
        difference: B − A, paired by question.
        is_share: whether all values lie in [0, 1], so that differences are points.
    """

    name: str
    a: float
    b: float
    difference: Difference
    is_share: bool
    a_stderr: float | None
    b_stderr: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One data source, or all questions together.

    Attributes:
        data_source: its name, or `overall`.
        num_shared, num_only_a, num_only_b: questions of both, and those left out.
        figures: of those with a value on both sides.
        verdict: the conclusion from the mean rewards, in one sentence.
    """

    data_source: str
    num_shared: int
    num_only_a: int
    num_only_b: int
    figures: list[Figure]
    verdict: str


@dataclass(frozen=True, slots=True)
class CompareReport:
    """Everything `compare` found: one comparison per source (the last of all), and warnings."""

    a: str
    b: str
    comparisons: list[Comparison]
    warnings: list[str]

    def as_document(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(a: Path, b: Path, ks: Sequence[int] | None = None) -> CompareReport:
    """Compare two evaluations by the questions they share.

    Questions are paired by their conversation, so neither order nor chat template matters; one that
    occurs twice is paired first with first and second with second.

    Args:
        a, b: directories of evaluations.
        ks: of pass@k; None: those of 1, 4, 8 that both allow.

    Raises:
        UsageError: not evaluations, no question in common, or k > n.
    """
    texts = frozenset({"response", "ground_truth"})
    about_a, samples_a = read_evaluation(a, without=texts)
    about_b, samples_b = read_evaluation(b, without=texts)
    n = min(int(about_a["sampling"]["n"]), int(about_b["sampling"]["n"]))
    ks = checked_ks(ks, n)
    questions_a, questions_b = _by_identity(samples_a), _by_identity(samples_b)
    if not questions_a.keys() & questions_b.keys():
        raise UsageError(
            f"the evaluations share no question ({len(questions_a)} and {len(questions_b)})",
            where=f"{a} and {b}",
            fix="evaluate both models with the same --data",
        )
    sources = sorted({question.data_source for question in (*questions_a.values(), *questions_b.values())})
    limits = (_max_error_fraction(about_a), _max_error_fraction(about_b))
    comparisons = [
        _comparison(source, _of(source, questions_a), _of(source, questions_b), ks, n, limits)
        for source in sources
    ]
    if len(sources) > 1:
        comparisons.append(_comparison(OVERALL, questions_a, questions_b, ks, n, limits))
    warnings = [
        *_warnings(about_a, about_b),
        *_ungraded("A", about_a, samples_a),
        *_ungraded("B", about_b, samples_b),
    ]
    return CompareReport(str(a), str(b), comparisons, warnings)


_Identity = tuple[str, str, int]


def _by_identity(samples: Sequence[EvalSample]) -> dict[_Identity, Question]:
    """Questions by data source, hash of the conversation, and which of its occurrences it is."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[_Identity, Question] = {}
    for question in questions_of(samples):
        asked = question.samples[0]
        text = json.dumps(asked.messages, sort_keys=True) if asked.messages else asked.prompt
        name = (question.data_source, hashlib.sha256(text.encode()).hexdigest())
        found[*name, seen[name]] = question
        seen[name] += 1
    return found


def _of(source: str, questions: Mapping[_Identity, Question]) -> dict[_Identity, Question]:
    return {key: question for key, question in questions.items() if question.data_source == source}


def _comparison(
    source: str,
    a: Mapping[_Identity, Question],
    b: Mapping[_Identity, Question],
    ks: Sequence[int],
    n: int,
    limits: tuple[float, float],
) -> Comparison:
    shared = [(a[key], b[key]) for key in a if key in b]
    measures: dict[str, Callable[[Question], float | None]] = {"avg": Question.avg}
    measures |= {f"pass@{k}": lambda question, k=k: question.pass_at(k) for k in ks}  # type: ignore[misc]
    if n > 1:
        measures[f"maj@{n}"] = lambda question: question.majority(n)
    figures = [
        figure for name, measure in measures.items() if (figure := _figure(name, measure, shared)) is not None
    ]
    is_known = all(
        sum(len(pair[side].samples) - len(pair[side].graded) for pair in shared)
        <= limits[side] * sum(len(pair[side].samples) for pair in shared)
        for side in (0, 1)
    )
    verdict = _verdict(figures[0]) if figures and figures[0].name == "avg" else "nothing to compare"
    return Comparison(
        data_source=source,
        num_shared=len(shared),
        num_only_a=len(a) - len(shared),
        num_only_b=len(b) - len(shared),
        figures=figures,
        verdict=verdict if is_known else "no conclusion: too many responses could not be graded",
    )


def _figure(
    name: str, measure: Callable[[Question], float | None], shared: Iterable[tuple[Question, Question]]
) -> Figure | None:
    values = [
        (first, second)
        for in_a, in_b in shared
        if (first := measure(in_a)) is not None and (second := measure(in_b)) is not None
    ]
    difference = paired([second - first for first, second in values])
    a, b = (estimate([pair[side] for pair in values]) for side in (0, 1))
    if difference is None or a is None or b is None:
        return None
    is_share = all(0.0 <= value <= 1.0 for pair in values for value in pair)
    return Figure(name, a.value, b.value, difference, is_share, a.stderr, b.stderr)


def _verdict(figure: Figure) -> str:
    found = figure.difference
    scale, unit = (100.0, "points") if figure.is_share else (1.0, "of reward")
    if found.low is None or found.high is None:
        if found.value == 0.0:
            return "no difference on any question"
        better = "B" if found.value > 0 else "A"
        return (
            f"{better} is better by {abs(found.value) * scale:.3g} {unit}, the same on every one of "
            f"{found.num_questions} questions: no interval can be told"
        )
    if found.low <= 0.0 <= found.high:
        needed = ""
        if figure.is_share and found.deviation:
            count = questions_needed(found.deviation, WORTH_SEEING)
            needed = f"; about {count:,} questions would be needed to see {WORTH_SEEING * 100:.0f} points"
        return f"no difference can be told{needed}"
    better, sign = ("B", 1.0) if found.value > 0 else ("A", -1.0)
    low, high = sorted((sign * scale * found.low, sign * scale * found.high))
    number = ".1f" if figure.is_share else ".3g"
    value = sign * scale * found.value
    return f"{better} is better by {value:{number}} {unit} (95 %: {low:{number}} to {high:{number}})"


def _warnings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(a["sampling"].keys() | b["sampling"].keys()):
        in_a, in_b = a["sampling"].get(name), b["sampling"].get(name)
        if name not in {"n", "seed"} and in_a != in_b:
            yield f"sampled differently: {name} is {in_a} in A and {in_b} in B"
    if "base_url" in a["model"] or "base_url" in b["model"]:
        yield "a server applied its own chat template: whether both models read the same prompt is not known"
    elif a["model"].get("template_sha256") != b["model"].get("template_sha256"):
        yield "the chat templates differ: the models read the same questions in different words"
    if a["reward"] != b["reward"]:
        yield "graded differently: use `--regrade` with one --reward for both"


def _max_error_fraction(about: Mapping[str, Any]) -> float:
    return RewardSpec.model_validate(about["reward"]).max_error_fraction


def _ungraded(side: str, about: Mapping[str, Any], samples: Sequence[EvalSample]) -> Iterator[str]:
    limit = _max_error_fraction(about)
    count = sum(sample.reward is None for sample in samples)
    if count > limit * len(samples):
        yield (
            f"{count:,} of {len(samples):,} responses of {side} could not be graded, more than "
            f"reward.max_error_fraction ({limit:g}): they are excluded, and the figures may say little"
        )
