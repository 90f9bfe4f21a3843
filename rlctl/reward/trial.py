"""A reward tried on responses whose score is known, one call at a time, before anything is trained on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlctl.reward.protocol import Failure, Sample, Scorer
from rlctl.reward.round_trip import right_answer, wrong_answer
from rlctl.reward.sources import grader_for

Kind = Literal["ground truth", "number changed", "empty answer", "stored response"]

#: Of each list in a report.
MAX_SHOWN = 20
#: Characters of a response's end in a report.
END_CHARS = 160
#: Stored rewards are float32.
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """A response and the score that it should get."""

    kind: Kind  # where the response comes from
    #: the response and what may be known when it is graded. How a ground truth is written as a response, and
    #: one with a number changed, depends on who grades: see `rlctl.reward.round_trip`
    sample: Sample
    expected: float | None  # its score; None: nothing is expected but a number
    where: str  # the row, for messages


@dataclass(slots=True)
class Tally:
    """Counts of one term, kind and source. `num_compared` leaves out errors and what has no expectation."""

    term: str
    kind: Kind
    data_source: str
    num: int = 0
    num_compared: int = 0
    num_agreeing: int = 0
    num_errors: int = 0


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A score that is not the expected one."""

    term: str
    kind: Kind
    data_source: str
    where: str
    response_end: str
    ground_truth: str
    expected: float
    got: float


@dataclass(slots=True)
class Trial:
    """Grades of the cases; of disagreements and errors the first `MAX_SHOWN`."""

    tallies: list[Tally] = field(default_factory=list)
    disagreements: list[Disagreement] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # `term, row: text`
    durations: dict[str, float] = field(default_factory=dict)  # seconds per response, all terms together

    @property
    def num_disagreements(self) -> int:
        """Of all terms, kinds and sources."""
        return sum(tally.num_compared - tally.num_agreeing for tally in self.tallies)

    @property
    def num_errors(self) -> int:
        """Likewise."""
        return sum(tally.num_errors for tally in self.tallies)

    def as_document(self) -> dict[str, Any]:
        """The trial in JSON's types."""
        return {
            "num_disagreements": self.num_disagreements,
            "num_errors": self.num_errors,
            "seconds_per_call": self.durations or None,
            "tallies": [asdict(tally) for tally in self.tallies],
            "disagreements": [asdict(one) for one in self.disagreements],
            "errors": self.errors,
        }


#: What stored rewards are compared with when there are several terms: their weighted sum.
SUM = "weighted sum"


def try_reward(
    terms: Mapping[str, tuple[float, Scorer]],
    graders: Mapping[str, str],
    cases: Sequence[Case],
    progress: Callable[[int, int], None],
) -> Trial:
    """Score every case, one after the other, so that each call's time is its own.

    Ground truths, the same with a number changed, and empty answers are compared term by term, stored
    rewards with the weighted sum. A reward model is expected nothing of; tests for programs, and tasks with
    many solutions, are not tried as responses.

    `terms` maps a label to (weight, who scores), `graders` to a grader's name.
    """
    trial = Trial()
    tallies: dict[tuple[str, Kind, str], Tally] = {}
    seconds: list[float] = []
    # Start what is started late, so that the first call's time is like the others'.
    of_each_source = list({case.sample.data_source: case.sample for case in cases}.values())
    for _, scorer in terms.values():
        scorer.grade(of_each_source)
    for done, case in enumerate(cases):
        progress(done, len(cases))
        asked = {name: sample for name in terms if (sample := _sample(graders[name], case))}
        started = time.perf_counter()
        grades = {name: terms[name][1].grade([sample])[0] for name, sample in asked.items()}
        if asked:
            seconds.append(time.perf_counter() - started)
        is_stored = case.kind == "stored response"
        total = 0.0
        for name, grade in grades.items():
            if isinstance(grade, Failure) and grade.kind == "inapplicable":
                continue
            tally = tallies.setdefault(_key(name, case), Tally(*_key(name, case)))
            tally.num += 1
            if isinstance(grade, Failure) and grade.score is not None:  # wrong: it ended its own grading
                grade = grade.score  # noqa: PLW2901
            if isinstance(grade, Failure):
                tally.num_errors += 1
                trial.errors += [f"{name}, {case.where}: {grade.text.strip()}"][
                    : MAX_SHOWN - len(trial.errors)
                ]
                total = math.nan
                continue
            total += terms[name][0] * grade
            if not is_stored and graders[name] != "model":
                _compare(trial, tally, replace(case, sample=asked[name]), grade)
        if is_stored and case.expected is not None and not math.isnan(total):
            name = SUM if len(terms) > 1 else next(iter(terms))
            tally = tallies.setdefault(_key(name, case), Tally(*_key(name, case)))
            tally.num += name == SUM
            _compare(trial, tally, case, total)
    progress(len(cases), len(cases))
    trial.tallies = sorted(tallies.values(), key=lambda tally: (tally.kind, tally.data_source, tally.term))
    if seconds:
        p50, p99 = np.quantile(seconds, (0.5, 0.99), method="higher").tolist()
        mean = sum(seconds) / len(seconds)
        trial.durations = {"num": len(seconds), "mean": mean, "p50": p50, "p99": p99, "max": max(seconds)}
    return trial


def _key(term: str, case: Case) -> tuple[str, Kind, str]:
    return term, case.kind, case.sample.data_source


def _sample(grader: str, case: Case) -> Sample | None:
    """What a grader is given; None: the case does not apply to it."""
    answers = {"ground truth": right_answer, "number changed": wrong_answer}
    if case.kind not in answers:
        return case.sample
    actual = grader_for(case.sample.data_source) if grader == "auto" else grader
    response = answers[case.kind](actual, case.sample.ground_truth)
    return None if response is None else replace(case.sample, response=response)


def _compare(trial: Trial, tally: Tally, case: Case, got: float) -> None:
    if case.expected is None:
        return
    tally.num_compared += 1
    if math.isclose(got, case.expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        tally.num_agreeing += 1
    elif len(trial.disagreements) < MAX_SHOWN:
        sample = case.sample
        end, truth = sample.response[-END_CHARS:], sample.ground_truth[:END_CHARS]
        trial.disagreements.append(
            Disagreement(
                tally.term, case.kind, sample.data_source, case.where, end, truth, case.expected, got
            )
        )
