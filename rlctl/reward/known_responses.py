"""Responses with known scores, derived from a ground truth: one that must score 1 and one that must score 0.

They show whether a grader can grade a ground truth. A grader whose ground truths are not responses, or whose
scores are not 0 and 1, registers its own function as `known_responses` (see `rlctl.registry.Part`).
"""

from __future__ import annotations

import re

from rlctl.registry import GRADERS
from rlctl.user_code import is_file_function

#: A response that must score 1 and one that must score 0; either is None if the ground truth gives none.
KnownResponses = tuple[str | None, str | None]

#: A number that is not a subscript; any number.
_NUMBERS = (re.compile(r"(?<![_\d])(?<!_\{)\d+"), re.compile(r"\d+"))


def known_responses(grader: str, ground_truth: str) -> KnownResponses | None:
    """The responses of the grader's own function, or `same_and_changed(ground_truth)` if it has none.

    A function of a user's file has none.

    None: scores of this grader are not comparable with 0 and 1, not even that of an empty response.

    Raises:
        ValueError: the grader cannot read the ground truth.
    """
    if is_file_function(grader):  # only its child processes import it
        return same_and_changed(ground_truth)
    derive = GRADERS.part(grader).known_responses or same_and_changed
    return derive(ground_truth)


def same_and_changed(response: str) -> KnownResponses:
    """The response, and the response with its first number increased by one; None if it has no number.

    A subscript is changed only if there is no other number.
    """
    number = next(filter(None, (pattern.search(response) for pattern in _NUMBERS)), None)
    if number is None:
        return response, None
    other = str(int(number[0]) + 1).zfill(len(number[0]))
    return response, response[: number.start()] + other + response[number.end() :]
