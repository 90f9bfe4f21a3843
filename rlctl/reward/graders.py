"""The graders by name; no torch, so that a grading process starts fast."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.reward import choice, countdown, exact, function, maths
from rlctl.reward.protocol import Sample
from rlctl.reward.sources import GraderName, SourceGrader, grader_for, knows_source

__all__ = ["GRADERS", "GraderName", "SourceGrader", "answer_of", "grader_for", "knows_source", "load_grader"]

Grader = Callable[[str, str], float]

#: name → grade(response, ground_truth), the one function training and evaluation share
GRADERS: dict[GraderName, Grader] = {
    "exact": exact.grade,
    "maths": maths.grade,
    "multiple_choice": choice.grade,
    "countdown": countdown.grade,
}
#: name → answer_of(response), see below
_READERS: dict[str, Callable[[str], str | None]] = {
    "exact": exact.answer_of,
    "maths": maths.answer_of,
    "multiple_choice": choice.answer_of,
    "countdown": countdown.answer_of,
}


def answer_of(grader: str, response: str) -> str | None:
    """What a response answers, as text that is equal for answers the grader takes for equal.

    For majority votes. Like the grader, it may be kept busy for ever: call it where that can be ended.

    Args:
        grader: a name in `GRADERS`; all others read no answers.
        response: of a model.

    Returns:
        None: it gives no answer, or nothing is known of how to read one.
    """
    reader = _READERS.get(grader)
    return reader(response) if reader else None


def load_grader(name: str) -> Callable[[Sample], object]:
    """What a grading process calls: a grader above, or the user's `file.py:function`.

    Raises:
        UsageError: the user's function cannot be had; see `rlctl.reward.function.load`.
    """
    for known, grade in GRADERS.items():
        if name == known:
            return lambda sample: grade(sample.response, sample.ground_truth)
    return function.load(name)
