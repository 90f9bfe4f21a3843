"""Selects the grader of a reward term; with `auto`, of each row by the name of its data source."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlctl.registry import GRADERS
from rlctl.reward.pool import GradingPool, is_ours, is_scorer
from rlctl.reward.protocol import Failure, Grade, GradeAndAnswer, Sample, Scorer

if TYPE_CHECKING:
    import torch

    from rlctl.spec.rollout import RewardSpec

Graded = TypeVar("Graded")
_BOUNDED = r"(?:^|[/_.\- ])(?:{})(?:$|[/_.\- ])"


@lru_cache(maxsize=1024)
def _registered(data_source: str) -> str | None:
    of_sources = (part for part in GRADERS.parts() if part.data_sources)
    return next((part.name for part in of_sources if _matches(part.data_sources, data_source)), None)


def _matches(pattern: str, data_source: str) -> bool:
    return bool(re.search(_BOUNDED.format(pattern), data_source, re.IGNORECASE))


def grader_for(data_source: str) -> str:
    """The grader that `auto` selects for rows of this source; `maths` for unknown sources."""
    return _registered(data_source) or "maths"


def knows_source(data_source: str) -> bool:
    """Whether a grader is known for this source; other sources are graded as mathematics."""
    return _registered(data_source) is not None


def scorer_of(name: str, params: dict[str, Any], spec: RewardSpec, device: torch.device) -> Scorer:
    """Creates the scorer of a term.

    Raises:
        UsageError: a function or reward model cannot be used.
        EnvironmentFailure: a model cannot be fetched or placed, or code cannot be confined here.
    """
    if is_scorer(name):
        scorer: Scorer = GRADERS[name](spec, device)
        return scorer
    if is_ours(name) and GRADERS.part(name).in_process:
        return LocalScorer(name)
    pool = GradingPool(name, params)
    if not is_ours(name):
        pool.check()
    return pool


class LocalScorer(Scorer):
    """Calls a grader in this process."""

    reads_answers = True

    def __init__(self, name: str) -> None:
        self._part = GRADERS.part(name)

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Returns one grade per sample, in order."""
        return [self._grade(sample) for sample in samples]

    def grade_and_read(self, samples: Sequence[Sample]) -> list[GradeAndAnswer]:
        """Returns grades and answers."""
        read: Callable[[str], str | None] = self._part.answer_of or (lambda _: None)
        return [(self._grade(sample), read(sample.response)) for sample in samples]

    def _grade(self, sample: Sample) -> Grade:
        try:
            return float(self._part.function(sample.response, sample.ground_truth))
        except Exception:
            return Failure(traceback.format_exc())


@GRADERS.register(
    "auto",
    label="by each row's source",
    formula="the score of the grader of the row's `data_source`; `maths` for sources without a grader",
)
class SourceScorer(Scorer):
    """Grades each row with the grader of its data source; a grader is started when first needed."""

    reads_answers = True

    def __init__(self, spec: RewardSpec, device: torch.device) -> None:
        self._start = partial(scorer_of, params={}, spec=spec, device=device)
        self._scorers: dict[str, Scorer] = {}

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Returns one grade per sample, in order."""
        return self._by_source(samples, lambda scorer, some: scorer.grade(some))

    def grade_and_read(self, samples: Sequence[Sample]) -> list[GradeAndAnswer]:
        """Returns grades and answers."""
        return self._by_source(samples, lambda scorer, some: scorer.grade_and_read(some))

    def close(self) -> None:
        """Ends the grading processes."""
        for scorer in self._scorers.values():
            scorer.close()

    def _by_source(
        self, samples: Sequence[Sample], grade: Callable[[Scorer, Sequence[Sample]], list[Graded]]
    ) -> list[Graded]:
        """Applies `grade` to the samples of each grader; returns the results in the order of `samples`."""
        places: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            places.setdefault(grader_for(sample.data_source), []).append(place)
        graded: dict[int, Graded] = {}
        for grader, rows in places.items():
            if grader not in self._scorers:
                self._scorers[grader] = self._start(grader)
            graded |= zip(rows, grade(self._scorers[grader], [samples[row] for row in rows]), strict=True)
        return [graded[place] for place in range(len(samples))]
