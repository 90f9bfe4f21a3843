"""A reward in one file: the share of characters that agree with the ground truth.

rlctl reward examples/custom_reward.py:agreement --data data/train.parquet
rlctl train --preset rloo-seq-is reward.name=examples/custom_reward.py:agreement
"""

from __future__ import annotations


def agreement(response: str, ground_truth: str) -> float:
    """A score in [0, 1]; arguments are passed by parameter name, see docs/how-to/rewards.md."""
    same = sum(a == b for a, b in zip(response, ground_truth, strict=False))
    return same / max(len(response), len(ground_truth), 1)
