"""Interface of graders: samples in, one score per response out.

Imports no torch at run time, because grading processes import this module.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Literal

from rlctl.errors import visible
from rlctl.lazy import lazy_pattern, torch
from rlctl.reward.thoughts import without_thoughts

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.episodes import Episodes


@dataclass(slots=True)  # not frozen: made in a fifth of the time, for every response
class Sample:
    """One response and the information available to its grader."""

    response: str  # with special tokens except start, end, padding, unknown
    ground_truth: str
    prompt: str = ""  # as the policy reads it, chat template included
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # of the row, JSON-serialisable
    messages: Sequence[Mapping[str, str]] = ()  # the prompt as {role, content}, if known
    response_ids: Sequence[int] = ()  # tokens of the response, if known
    conversation: Sequence[Mapping[str, Any]] = ()  # all messages of an episode of several turns

    def without_thoughts(self) -> Sample:
        """What built-in graders read: the response after its thoughts, which the prompt may open."""
        text = without_thoughts(self.response, self.prompt)
        return Sample(
            response=text,
            ground_truth=self.ground_truth,
            prompt="",
            data_source=self.data_source,
            extra_info=self.extra_info,
            messages=self.messages,
        )


#: Reason why a grading gave no score; see `Failure.kind`.
FailureKind = Literal["error", "machine", "time-out", "memory", "crash", "inapplicable"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A grading that gave no score."""

    text: str  # the reason: a traceback or one line
    #: `error`: the grader raised an exception; `machine`: its process could not be started or got too little
    #: processor time; `time-out`, `memory`: it reached a limit; `crash`: its process died; `inapplicable`:
    #: the grader does not grade this sample, but other terms may
    kind: FailureKind = "error"
    #: score of a response that caused the failure; None: the grader or the ground truth caused it, and the
    #: response is excluded, not scored 0
    score: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", visible(self.text))


Grade = float | Failure
GradeAndAnswer = tuple[Grade, str | None]


class Scorer:
    """One term of a reward. A subclass defines `grade`, or `grade_and_read` if it can extract answers."""

    @property
    def reads_answers(self) -> bool:
        """Whether it can extract answers from responses."""
        return False

    def set_policy(self, tokenizer: Any) -> None:
        """Sets the tokenizer of the policy whose responses it grades; None: unknown. Most need none."""

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """Returns a finite score or a `Failure` for each sample, in order."""
        return [grade for grade, _ in self.grade_and_read(samples, read_answers=False)]

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers: text that is equal for equal answers; None without an answer."""
        return [(grade, None) for grade in self.grade(samples)]

    def same_answers(self, samples: Sequence[Sample], answers: Sequence[str | None]) -> list[str | None]:
        """The answers of `grade_and_read`, with one text for all that the grader holds equal."""
        return list(answers)

    def take_remarks(self) -> list[str]:
        """What was said of each sample of the last grading, for the dump; empty: nothing."""
        return []

    def close(self) -> None:
        """Ends the processes and threads that it started. A later call starts them again."""


@lru_cache(maxsize=4096)  # the responses to a prompt share one ground truth
def accepted_answers(ground_truth: str) -> tuple[str, ...]:
    """The answers that a ground truth accepts: the items of a JSON list of texts, else the ground truth."""
    if not ground_truth.lstrip().startswith("["):
        return (ground_truth,)
    try:
        answers = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return (ground_truth,)
    is_list = isinstance(answers, list) and answers and all(isinstance(answer, str) for answer in answers)
    return tuple(answers) if is_list else (ground_truth,)


Compare = Callable[[str, str], float]


def any_accepted(compare: Compare) -> Compare:
    """Decorator of a grader of one answer: the score is the highest over `accepted_answers`."""

    @wraps(compare)
    def grade(response: str, ground_truth: str) -> float:
        first, *others = accepted_answers(ground_truth)
        score = compare(response, first)
        for answer in others:
            score = max(score, compare(response, answer))
        return score

    return grade


#: A response that must score 1 and one that must score 0; either is None if the ground truth gives none.
KnownResponses = tuple[str | None, str | None]
#: A number that is not a subscript; any number.
_NUMBERS = (lazy_pattern(r"(?<![_\d])(?<!_\{)\d+"), lazy_pattern(r"\d+"))


def same_and_changed(response: str) -> KnownResponses:
    """The response, and the response with its first number increased by one; None if it has no number.

    A subscript is changed only if there is no other number.
    """
    number = next(filter(None, (pattern.search(response) for pattern in _NUMBERS)), None)
    if number is None:
        return response, None
    other = str(int(number[0]) + 1).zfill(len(number[0]))
    return response, response[: number.start()] + other + response[number.end() :]


#: Digits of the largest part of a score, and decimals, to which scores are told apart.
_DIGITS, _DECIMALS = 12, 14
#: Significant digits of which float32 keeps all, and float32 itself.
_SINGLE_DIGITS, _LARGEST_SINGLE, _SINGLE = 7, 1e38, struct.Struct("f")


def _decimal(value: float) -> float:
    """The decimal of up to 7 digits of which a value is the rounding to float32; else the value."""
    if (
        value.is_integer()
        or not 1e-30 < abs(value) < _LARGEST_SINGLE
        or len(repr(value)) <= _SINGLE_DIGITS + 2
    ):
        return value
    decimal = float(f"{value:.{_SINGLE_DIGITS}g}")
    return decimal if _SINGLE.unpack(_SINGLE.pack(decimal))[0] == value else value


def exact_sum(parts: Iterable[float]) -> float:
    """Sum that is equal for equal scores, whatever their parts: 0.1 + 0.2 is 0.3, and 70.7 − 30.3 is 40.4.

    It is rounded to 12 digits of the largest part, and to 14 decimals; infinite parts are added as they are.
    A decimal in float32 counts as that decimal: 0.10000000149011612 is 0.1.
    """
    values = [_decimal(float(part)) for part in parts]
    largest = max((abs(value) for value in values), default=0.0)
    if not largest or not math.isfinite(sum(values)):
        return sum(values, 0.0)
    decimals = min(_DECIMALS, _DIGITS - 1 - math.floor(math.log10(largest)))
    return round(math.fsum(values), decimals) + 0.0  # without the sign of −0.0


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores of E episodes, the terms they consist of, and failures."""

    #: (E,) float32: weighted sum of the terms, plus the environment's reward and any overlong penalty; 0.0
    #: where not `valid`
    scores: Tensor
    valid: Tensor  # (E,) bool: every applicable term graded it; other episodes are excluded, not scored 0
    #: term → its scores (E,) float32 before weighting, and `overlong` if that penalty is on. Only meaningful
    #: where `valid`; 0.0 where this term failed, NaN where it does not apply.
    parts: dict[str, Tensor] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # the first few failures, as text
    #: term → failures; one sample may count in several
    errors_by_term: dict[str, int] = field(default_factory=dict)
    #: kind → number of failures caused by responses; these responses have a score and are valid
    timeouts: dict[FailureKind, int] = field(default_factory=dict)
    #: (E,) answers of the responses, as text that is equal for equal answers (for majority votes). Empty
    #: unless requested; None without an answer, or if no term can extract answers.
    answers: list[str | None] = field(default_factory=list)
    #: (E,) for each episode, term → what its grader said, such as a judge's reasons. Empty: nothing
    remarks: list[dict[str, str]] = field(default_factory=list)
    #: (E,) float32 `scores` without the overlong penalty, not rounded twice; None: there is no penalty
    before_penalty: Tensor | None = None

    def pick(self, episodes: Tensor | Sequence[int]) -> RewardResult:
        """Scores of the episodes with these indices (k,), in that order, without failures and answers."""
        chosen = torch.as_tensor(episodes, dtype=torch.int64)
        parts = {term: scores[chosen] for term, scores in self.parts.items()}
        before = None if self.before_penalty is None else self.before_penalty[chosen]
        remarks = [self.remarks[place] for place in chosen.tolist()] if self.remarks else []
        kept = (self.scores[chosen], self.valid[chosen], parts)
        return RewardResult(*kept, remarks=remarks, before_penalty=before)

    @classmethod
    def joined(cls, results: Sequence[RewardResult]) -> RewardResult:
        """All episodes, with the failures of all results, without answers."""
        before = [result.before_penalty for result in results if result.before_penalty is not None]
        return cls(
            scores=torch.cat([result.scores for result in results]),
            valid=torch.cat([result.valid for result in results]),
            parts={term: torch.cat([result.parts[term] for result in results]) for term in results[0].parts},
            errors=[error for result in results for error in result.errors],
            errors_by_term=sum((Counter(result.errors_by_term) for result in results), Counter()),
            timeouts=sum((Counter(result.timeouts) for result in results), Counter()),
            remarks=_joined_remarks(results),
            before_penalty=torch.cat(before) if before else None,
        )

    @property
    def graded(self) -> Tensor:
        """(E,) `scores` without the overlong penalty: the graders' scores.

        Evaluation and validation report them, and groups are compared by them.
        """
        return self.scores if self.before_penalty is None else self.before_penalty


def _joined_remarks(results: Sequence[RewardResult]) -> list[dict[str, str]]:
    if not any(result.remarks for result in results):
        return []
    return [one for result in results for one in result.remarks or [{}] * len(result.scores)]


@dataclass(frozen=True)
class Graded:
    """The episodes of one step that this rank sampled, in order of group and member, and their grades.

    Attributes:
        rewards: one score per episode.
        baseline: for ReMax, for every episode the grade of the greedy episode of its task; else None.
        sampling_cost: metrics of dynamic sampling, or of sampling ahead.
        dropped: further episodes that were sampled for the step, and that dynamic sampling does not use.
    """

    episodes: Episodes
    rewards: RewardResult
    baseline: RewardResult | None
    sampling_cost: dict[str, float]
    dropped: Sequence[Any] = ()

    @property
    def valid(self) -> Tensor:
        """(E,) bool: the episode is trained on: it is graded, and its baseline; the engine did not end it."""
        valid = self.rewards.valid & ~self.episodes.aborted
        return valid if self.baseline is None else valid & self.baseline.valid
