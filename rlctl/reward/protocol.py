"""What a reward is: rollouts in, one score per response out.

No torch here when it runs: grading processes import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlctl.metric_names import OVERLONG
from rlctl.user_code import visible

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Rollouts


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and what may be known when it is graded."""

    response: str
    ground_truth: str
    prompt: str = ""  # as the policy reads it, chat template included
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # the row's own, JSON-able
    messages: Sequence[Mapping[str, str]] = ()  # the prompt as {role, content}, where it is known
    response_ids: Sequence[int] = ()  # tokens of the response, where they are known


#: Why a grading gave no score.
FailureKind = Literal["error", "machine", "time-out", "memory", "crash", "inapplicable"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A grading that gave no score."""

    text: str  # why, a traceback or one line
    #: `error`: the grader raised an exception; `machine`: its process could not be started or got too little
    #: processor time; `time-out`, `memory`: it reached a limit; `crash`: its process died; `inapplicable`:
    #: the grader does not grade this sample, other terms may
    kind: FailureKind = "error"
    #: what the response gets because it caused the failure; None: the grader or the ground truth did, and the
    #: response is excluded, not scored 0
    score: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", visible(self.text))


Grade = float | Failure
GradeAndAnswer = tuple[Grade, str | None]


class Scorer:
    """One term of a reward."""

    @property
    def reads_answers(self) -> bool:
        """Whether it can read the answers of responses."""
        return False

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """A finite score or a `Failure` for each sample, in order."""
        raise NotImplementedError

    def grade_and_read(self, samples: Sequence[Sample]) -> list[GradeAndAnswer]:
        """Grades, and what each response answers: text that is equal for equal answers; None: nothing."""
        return [(grade, None) for grade in self.grade(samples)]

    def close(self) -> None:
        """End what it started: processes, threads. A later call starts them again."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores of one batch of B responses, what they are made of, and what could not be graded."""

    scores: Tensor  # (B,) float32: weighted sum of the terms plus any overlong penalty; 0.0 where not `valid`
    valid: Tensor  # (B,) bool: every term graded it; the others are left out, not scored 0
    #: term → its own scores (B,) float32 before the weight, and `overlong` when that is on. Meant to be
    #: read where `valid`; 0.0 where this term failed, NaN where it does not apply.
    parts: dict[str, Tensor] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)  # the first few failures, as text
    errors_by_term: dict[str, int] = field(
        default_factory=dict
    )  # term → failures; one sample may count in several
    #: kind → failures that responses caused themselves; these have a score and are valid
    timeouts: dict[FailureKind, int] = field(default_factory=dict)
    #: (B,) what each response answers, as text that is equal for equal answers: for majority votes. Empty
    #: unless asked for; None where there is no answer, or the reward reads none.
    answers: list[str | None] = field(default_factory=list)

    @property
    def graded(self) -> Tensor:
        """(B,) `scores` without the overlong penalty: what evaluation and validation report."""
        penalty = self.parts.get(OVERLONG)
        return self.scores if penalty is None else self.scores - penalty * self.valid


class Reward(Protocol):
    """Grades responses."""

    def score(self, rollouts: Rollouts, *, read_answers: bool = False) -> RewardResult:
        """One score per response, in order. Failures are reported, never raised: see `refuse_errors`.

        `read_answers` fills `RewardResult.answers`.
        """
        ...

    def close(self) -> None:
        """End the processes it started; a later `score` starts new ones."""
        ...
