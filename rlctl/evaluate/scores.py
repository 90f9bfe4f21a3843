"""From graded samples to figures per data source. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rlctl.evaluate.intervals import Estimate, estimate
from rlctl.evaluate.passk import pass_at_k

#: A response is right, for pass@k, at this reward or more.
RIGHT = 1.0
OVERALL = "overall"


@dataclass(slots=True)
class QuestionScores:
    """What the samples of one question came to.

    Attributes:
        data_source: the question's source.
        rewards: of the samples that could be graded.
        num_samples: all of them.
        num_truncated: cut off at the length limit.
        num_tokens: response tokens of all samples together.
    """

    data_source: str
    rewards: list[float] = field(default_factory=list)
    num_samples: int = 0
    num_truncated: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of one data source, or of all questions together.

    Attributes:
        data_source: its name, or `overall`.
        num_questions, num_samples: how much was evaluated.
        num_grader_errors: samples the grader failed on; they are left out, not scored 0.
        avg: mean reward (avg@n); None when nothing could be graded.
        pass_at: k → pass@k, over the questions with at least k graded samples.
        truncated_fraction: samples cut off at the length limit / samples.
        mean_length: response tokens per sample.
    """

    data_source: str
    num_questions: int
    num_samples: int
    num_grader_errors: int
    avg: Estimate | None
    pass_at: dict[int, Estimate | None]
    truncated_fraction: float
    mean_length: float


def summarise(questions: Iterable[QuestionScores], ks: Sequence[int]) -> list[Score]:
    """One `Score` per data source, by name, and a last one of all questions together.

    With a single source that one would repeat it, and is left out.
    """
    by_source: dict[str, list[QuestionScores]] = {}
    for question in questions:
        by_source.setdefault(question.data_source, []).append(question)
    scores = [_score(source, by_source[source], ks) for source in sorted(by_source)]
    if len(scores) > 1:
        everything = [question for group in by_source.values() for question in group]
        scores.append(_score(OVERALL, everything, ks))
    return scores


def _score(name: str, questions: list[QuestionScores], ks: Sequence[int]) -> Score:
    num_samples = sum(question.num_samples for question in questions)
    graded = [question.rewards for question in questions if question.rewards]
    return Score(
        data_source=name,
        num_questions=len(questions),
        num_samples=num_samples,
        num_grader_errors=num_samples - sum(len(rewards) for rewards in graded),
        avg=estimate([sum(rewards) / len(rewards) for rewards in graded]),
        pass_at={k: estimate([_pass(rewards, k) for rewards in graded if len(rewards) >= k]) for k in ks},
        truncated_fraction=sum(question.num_truncated for question in questions) / num_samples,
        mean_length=sum(question.num_tokens for question in questions) / num_samples,
    )


def _pass(rewards: list[float], k: int) -> float:
    return pass_at_k(len(rewards), sum(reward >= RIGHT for reward in rewards), k)
