"""A grader with a parameter: full score up to a given length, less beyond it.

rlctl reward examples/custom_grader.py:brevity --data data/train.parquet
rlctl train --preset rloo-seq-is reward.name=examples/custom_grader.py:brevity reward.params.scale=20
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from rlctl.parts import GRADERS


class Brevity(BaseModel, extra="forbid"):
    """Parameters of `brevity`."""

    scale: float = Field(default=100.0, gt=0)
    """Characters that may be written at full score."""


@GRADERS.register(label="a short response", formula="min(1, scale / characters)", params=Brevity)
def brevity(response: str, params: Brevity) -> float:
    """A score in (0, 1]."""
    return min(1.0, params.scale / max(1, len(response)))
