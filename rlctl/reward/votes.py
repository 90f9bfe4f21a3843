"""Which responses to a question give the same answer, by the equality of their grader."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlctl.reward.protocol import Grade, Sample

#: Maximum different answers to one question that are compared with each other: the most frequent ones.
MAX_COMPARED = 64


def same_answers(
    samples: Sequence[Sample], answers: Sequence[str | None], grade: Callable[[list[Sample]], list[Grade]]
) -> list[str | None]:
    """The answers, with one text for all that are equal.

    Two answers are equal if the response with one is right where the other is the ground truth.

    Args:
        samples: one per response; those to one question have the same prompt and ground truth.
        answers: the answer of each response, as a text that can be a ground truth; None: no answer.
        grade: the grader of the responses.
    """
    by_question: dict[tuple[str, str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        if answers[index] is not None:
            question = sample.data_source, sample.prompt, sample.ground_truth
            by_question.setdefault(question, []).append(index)
    joined = list(answers)
    for places in by_question.values():
        counts = Counter(str(answers[place]) for place in places)
        if len(counts) > 1:
            example = {str(answers[place]): samples[place] for place in reversed(places)}
            same = _classes(
                [(answer, example[answer]) for answer, _ in counts.most_common(MAX_COMPARED)], grade
            )
            for index in places:
                joined[index] = same.get(str(answers[index]), answers[index])
    return joined


def _classes(
    answers: Sequence[tuple[str, Sample]], grade: Callable[[list[Sample]], list[Grade]]
) -> dict[str, str]:
    """Answer → the first answer that it equals.

    `answers`: with a response that gives each, the most frequent first.
    """
    pairs = list(itertools.combinations(range(len(answers)), 2))
    asked = [replace(answers[second][1], ground_truth=answers[first][0]) for first, second in pairs]
    asked += [replace(answers[first][1], ground_truth=answers[second][0]) for first, second in pairs]
    grades = grade(asked)
    equal = {
        pair
        for pair, one, other in zip(pairs, grades[: len(pairs)], grades[len(pairs) :], strict=True)
        if 1.0 in (one, other)
    }
    same: dict[str, str] = {}
    for second, (answer, _) in enumerate(answers):
        earlier = (answers[first][0] for first in range(second) if (first, second) in equal)
        same[answer] = next((other for other in earlier if same[other] == other), answer)
    return same
