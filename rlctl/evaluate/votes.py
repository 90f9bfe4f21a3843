"""maj@n: the reward of the answer that most of the n responses give (Wang et al. 2022, arXiv 2203.11171)."""

from __future__ import annotations

from collections.abc import Sequence


def majority_reward(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Mean reward of the responses with the most frequent answer; the mean over answers that tie.

    Responses without an answer (None) vote together for "no answer", which may win like any other.

    Args:
        answers: of each response, as text that is equal for equal answers.
        rewards: of each response; siblings with one answer usually have one reward.

    Raises:
        ValueError: there are no responses, or not as many rewards.
    """
    if not answers:
        raise ValueError("no response has a vote")
    by_answer: dict[str | None, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        by_answer.setdefault(answer, []).append(reward)
    most = max(map(len, by_answer.values()))
    tied = [sum(votes) / most for votes in by_answer.values() if len(votes) == most]
    return sum(tied) / len(tied)
