"""The response is right when it is the ground truth, to the letter."""

from __future__ import annotations


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the texts are equal but for white space around them, else 0.0."""
    return float(response.strip() == ground_truth.strip())


def answer_of(response: str) -> str | None:
    """The response without white space around it; None when nothing is left."""
    return response.strip() or None
