"""What a reward is: rollouts in, one score per response out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Rollouts


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Scores of one batch, and what could not be graded."""

    scores: Tensor  # (B,) float32, 0.0 where not `valid`
    valid: Tensor  # (B,) bool: False where the grader failed; such a sample is left out, not scored 0
    errors: list[str] = field(default_factory=list)  # the first few failures, as text
    metrics: dict[str, float] = field(default_factory=dict)  # reward/num_errors, reward/error_fraction


class Reward(Protocol):
    """Grades responses."""

    def score(self, rollouts: Rollouts) -> RewardResult:
        """One score per response, in order.

        Raises:
            RunFailure: too large a share of the batch could not be graded.
        """
        ...
