"""Computes metrics per data source from graded samples. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlctl.evaluate.intervals import IntervalFigure, estimate
from rlctl.evaluate.samples import EvalSample, by_question

#: Minimum reward of a right response, for pass@k.
RIGHT = 1.0
OVERALL = "overall"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n responses, drawn without replacement, include one of the c right ones or more.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), 1 − C(n−c, k) / C(n, k), computed as a
    product of the probabilities that each draw is wrong too, which avoids factorials and overflow.

    Raises:
        ValueError: not 1 ≤ k ≤ n, or not 0 ≤ c ≤ n. There is no unbiased estimate for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} responses: k must be between 1 and n")
    if not 0 <= c <= n:
        raise ValueError(f"{c} right responses out of {n}")
    all_wrong = 1.0
    for draw in range(k):
        all_wrong *= max(0, n - c - draw) / (n - draw)
    return 1.0 - all_wrong


def majority_reward(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Mean reward of the responses with the most frequent answer, averaged over tied answers.

    The majority vote of Wang et al. 2022 (arXiv 2203.11171). Responses without an answer (None) count as
    votes for one common answer, which can win. Answers must be normalised so that equal answers are equal
    strings.

    Raises:
        ValueError: there are no responses, or the number of rewards differs.
    """
    if not answers:
        raise ValueError("no response has a vote")
    by_answer: dict[str | None, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        by_answer.setdefault(answer, []).append(reward)
    most = max(map(len, by_answer.values()))
    tied = [sum(votes) / most for votes in by_answer.values() if len(votes) == most]
    return sum(tied) / len(tied)


@dataclass(frozen=True, slots=True)
class Question:
    """The samples of one question."""

    data_source: str  # data source of the question
    samples: list[EvalSample]  # all samples
    graded: list[EvalSample]  # samples on which the grader did not fail
    has_votes: bool  # whether any response of the source has an answer; otherwise maj@n is undefined

    def figures(self, ks: Sequence[int], n: int) -> dict[str, float | None]:
        """Metrics by name; None if a metric has no value.

        `avg`: mean reward of the graded samples. `pass@k`: over the graded samples, if there are at least k.
        `maj@n` (n > 1): reward of the most frequent answer among the first n graded samples.
        """
        rewards = _rewards(self.graded)
        count, right = len(rewards), sum(reward >= RIGHT for reward in rewards)
        found: dict[str, float | None] = {"avg": _mean(rewards) if rewards else None}
        found |= {f"pass@{k}": pass_at_k(count, right, k) if count >= k else None for k in ks}
        if n > 1:
            answers = [voter.answer for voter in self.graded[:n]]
            has_vote = bool(answers) and self.has_votes
            found[f"maj@{n}"] = majority_reward(answers, rewards[:n]) if has_vote else None
        return found


@dataclass(frozen=True, slots=True)
class Score:
    """Metrics of one data source or of all questions. Every mean is over questions."""

    data_source: str  # name of the source, or `overall`
    #: num_questions, num_samples: numbers of questions and responses
    num_questions: int
    num_samples: int
    num_grader_errors: int  # samples on which the grader failed; they are excluded, not scored 0
    num_short: int  # questions with fewer than n graded samples
    #: `avg`, `pass@k` and, for n > 1, `maj@n`: see `Question.figures`; None if no question has a value
    figures: dict[str, IntervalFigure | None]
    truncated_fraction: IntervalFigure | None  # share of samples cut off at the length limit
    mean_length: IntervalFigure | None  # response tokens per sample
    grader_error_fraction: IntervalFigure | None  # share of samples on which the grader failed
    is_withheld: bool = False  # the grader failed on too many samples: all `figures` are None


def summarise(
    samples: Sequence[EvalSample], ks: Sequence[int], n: int, max_error_fraction: float = 1.0
) -> list[Score]:
    """One `Score` per data source, by name, and if there are several sources a last one over all questions.

    Args:
        samples: graded samples, n per question.
        ks: values of k for pass@k.
        n: requested responses per question.
        max_error_fraction: if the grader failed on a larger share of the samples of a score, it has no
            metrics.
    """
    by_source: dict[str, list[Question]] = {}
    for question in questions_of(samples):
        by_source.setdefault(question.data_source, []).append(question)
    limit = max_error_fraction
    scores = [_score(source, by_source[source], ks, n, limit) for source in sorted(by_source)]
    if len(scores) > 1:
        everything = [question for group in by_source.values() for question in group]
        scores.append(_score(OVERALL, everything, ks, n, limit))
    return scores


def questions_of(samples: Sequence[EvalSample]) -> list[Question]:
    """Groups samples by question, in order of first occurrence."""
    with_votes = {sample.data_source for sample in samples if sample.answer is not None}
    return [
        Question(
            data_source=group[0].data_source,
            samples=group,
            graded=[sample for sample in group if sample.reward is not None],
            has_votes=group[0].data_source in with_votes,
        )
        for group in by_question(samples)
    ]


def _score(
    name: str, questions: list[Question], ks: Sequence[int], n: int, max_error_fraction: float
) -> Score:
    num_samples = sum(len(question.samples) for question in questions)
    score = Score(
        data_source=name,
        num_questions=len(questions),
        num_samples=num_samples,
        num_grader_errors=num_samples - sum(len(question.graded) for question in questions),
        num_short=sum(len(question.graded) < n for question in questions),
        figures=_means(questions, ks, n),
        truncated_fraction=estimate([_mean([s.truncated for s in q.samples]) for q in questions]),
        mean_length=estimate(
            [_mean([s.num_tokens for s in q.samples]) for q in questions], is_share=False, least=0.0
        ),
        grader_error_fraction=estimate([_mean([s.reward is None for s in q.samples]) for q in questions]),
    )
    if score.num_grader_errors <= max_error_fraction * num_samples:
        return score
    return replace(score, figures=dict.fromkeys(score.figures), is_withheld=True)


def _means(questions: list[Question], ks: Sequence[int], n: int) -> dict[str, IntervalFigure | None]:
    """Each metric, averaged over the questions that have a value."""
    found = [question.figures(ks, n) for question in questions]
    return {
        name: estimate([value for values in found if (value := values[name]) is not None])
        for name in found[0]
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rewards(samples: Sequence[EvalSample]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]
