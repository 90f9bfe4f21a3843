"""The graders by name, and what `auto` means; no torch, so that a grading process starts fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlctl.reward import exact, function, maths
from rlctl.reward.protocol import Sample

GraderName = Literal["exact", "maths"]
Grader = Callable[[str, str], float]

#: name → grade(response, ground_truth), the one function training and evaluation share
GRADERS: dict[GraderName, Grader] = {"exact": exact.grade, "maths": maths.grade}

EXACT_SOURCES = frozenset({"embedded/addition"})


def grader_for(data_source: str) -> GraderName:
    """Who grades rows of this source when the spec says `auto`."""
    return "exact" if data_source in EXACT_SOURCES else "maths"


def load_grader(name: str) -> Callable[[Sample], object]:
    """What a grading process calls: a grader above, or the user's `file.py:function`.

    Raises:
        UsageError: the user's function cannot be had; see `rlctl.reward.function.load`.
    """
    for known, grade in GRADERS.items():
        if name == known:
            return lambda sample: grade(sample.response, sample.ground_truth)
    return function.load(name)
