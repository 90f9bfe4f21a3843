"""Computes metrics per data source from graded samples. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rlctl.errors import UsageError
from rlctl.evaluate.intervals import SHARE, IntervalFigure, Range, estimate
from rlctl.evaluate.samples import EvalSample, by_question
from rlctl.registry import GRADERS
from rlctl.reward.build import grader_for
from rlctl.run_spec.rollout import RewardSpec
from rlctl.user_code import is_file_function

#: Minimum reward of a right response, for pass@k.
RIGHT = 1.0
OVERALL = "overall"
#: Relative error of a float32 reward.
_ROUNDING = 1e-6


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


def score_range(
    reward: RewardSpec, samples: Sequence[EvalSample] = (), sources: Collection[str] = ()
) -> Range | None:
    """Least and greatest reward that is possible; None if it is not known.

    `reward.score_range` declares it, else the graders of all terms do (`score_range` of `register`). It is
    never taken from rewards, and not known if a reward of `samples` is outside, or an environment adds its
    own. `sources`: further data sources, by which `auto` chooses graders.
    """
    least = most = 0.0
    if reward.score_range is not None:
        least, most = reward.score_range
    elif any(sample.environment_reward is not None for sample in samples):
        return None
    else:
        sources = {*sources, *(sample.data_source for sample in samples)}
        for term in reward.all_terms:
            ends = _range_of_grader(term.name, sources)
            if ends is None:
                return None
            weighted = sorted(term.weight * end for end in ends)
            least = least + weighted[0]
            most = most + weighted[1]
    slack = _ROUNDING * max(1.0, abs(least), abs(most))
    is_inside = all(least - slack <= reward <= most + slack for reward in _rewards(samples))
    return (least, most) if is_inside and least < most else None


def _range_of_grader(name: str, sources: Collection[str]) -> Range | None:
    """The range of a grader's scores; of `auto` on rows of these sources."""
    if is_file_function(name):  # only grading processes import it
        return None
    names = {grader_for(source) for source in sources} if name == "auto" else {name}
    try:
        ranges = [GRADERS.part(one).score_range for one in names]
    except UsageError:  # of a package that is not installed here
        return None
    known = [ends for ends in ranges if ends is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(least for least, _ in known), max(most for _, most in known)


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
        count = len(rewards)
        right = sum(reward >= RIGHT for reward in rewards)
        values: dict[str, float | None] = {"avg": _mean(rewards) if rewards else None}
        values |= {f"pass@{k}": pass_at_k(count, right, k) if count >= k else None for k in ks}
        if n > 1:
            answers = [voter.answer for voter in self.graded[:n]]
            has_vote = bool(answers) and self.has_votes
            values[f"maj@{n}"] = majority_reward(answers, rewards[:n]) if has_vote else None
        return values


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
    samples: Sequence[EvalSample],
    ks: Sequence[int],
    n: int,
    max_error_fraction: float = 1.0,
    bounds: Range | None = SHARE,
) -> list[Score]:
    """One `Score` per data source, by name, and if there are several sources a last one over all questions.

    Args:
        samples: graded samples, n per question.
        ks: values of k for pass@k.
        n: requested responses per question.
        max_error_fraction: if the grader failed on a larger share of the samples of a score, it has no
            metrics.
        bounds: of the rewards, see `score_range`.
    """
    by_source: dict[str, list[Question]] = {}
    for question in questions_of(samples):
        by_source.setdefault(question.data_source, []).append(question)
    about = (ks, n, max_error_fraction, bounds)
    scores = [_score(source, by_source[source], *about) for source in sorted(by_source)]
    if len(scores) > 1:
        everything = [question for group in by_source.values() for question in group]
        scores.append(_score(OVERALL, everything, *about))
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
    name: str,
    questions: list[Question],
    ks: Sequence[int],
    n: int,
    max_error_fraction: float,
    bounds: Range | None,
) -> Score:
    num_samples = sum(len(question.samples) for question in questions)
    score = Score(
        data_source=name,
        num_questions=len(questions),
        num_samples=num_samples,
        num_grader_errors=num_samples - sum(len(question.graded) for question in questions),
        num_short=sum(len(question.graded) < n for question in questions),
        figures=_means(questions, ks, n, bounds),
        truncated_fraction=estimate([_mean([s.truncated for s in q.samples]) for q in questions]),
        mean_length=estimate(
            [_mean([s.num_tokens for s in q.samples]) for q in questions], bounds=None, least=0.0
        ),
        grader_error_fraction=estimate([_mean([s.reward is None for s in q.samples]) for q in questions]),
    )
    if score.num_grader_errors <= max_error_fraction * num_samples:
        return score
    return replace(score, figures=dict.fromkeys(score.figures), is_withheld=True)


def bounds_of(figure: str, rewards: Range | None) -> Range | None:
    """Bounds of a metric: pass@k is a share, the others are means of rewards."""
    return SHARE if figure.startswith("pass@") else rewards


def _means(
    questions: list[Question], ks: Sequence[int], n: int, bounds: Range | None
) -> dict[str, IntervalFigure | None]:
    """Each metric, averaged over the questions that have a value."""
    found = [question.figures(ks, n) for question in questions]
    means = {}
    for name in found[0]:
        values = [value for figures in found if (value := figures[name]) is not None]
        means[name] = estimate(values, bounds=bounds_of(name, bounds))
    return means


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rewards(samples: Sequence[EvalSample]) -> list[float]:
    return [sample.reward for sample in samples if sample.reward is not None]
