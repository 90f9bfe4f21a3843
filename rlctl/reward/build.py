"""From `reward.name` to something that scores rollouts."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from rlctl.errors import RunFailure
from rlctl.reward.graders import GRADERS, GraderName, grader_for
from rlctl.reward.pool import Failure, GradingPool, Verdict
from rlctl.reward.protocol import Reward, RewardResult

if TYPE_CHECKING:
    from rlctl.batch import Rollouts

#: Graders that run other people's arithmetic on model output: in child processes, with a deadline.
NEEDS_DEADLINE = frozenset[GraderName]({"maths"})
MAX_ERRORS_KEPT = 5


def build_reward(name: Literal["auto", "maths", "exact"], max_error_fraction: float) -> Reward:
    """The reward named in the spec; `auto` chooses the grader by each row's `data_source`."""
    return GradedReward(None if name == "auto" else name, max_error_fraction)


class GradedReward:
    """Scores are what a grader says of (response text, ground truth).

    Args:
        grader: who grades; None: by `data_source`.
        max_error_fraction: share of a batch that may fail before the run stops.
    """

    def __init__(self, grader: GraderName | None, max_error_fraction: float) -> None:
        self._grader = grader
        self._max_error_fraction = max_error_fraction
        self._pools: dict[GraderName, GradingPool] = {}

    def score(self, rollouts: Rollouts) -> RewardResult:
        """Scores (B,); see `Reward.score`."""
        verdicts = self._verdicts(rollouts)
        failures = [verdict.text for verdict in verdicts if isinstance(verdict, Failure)]
        fraction = len(failures) / max(1, len(verdicts))
        if fraction > self._max_error_fraction:
            raise RunFailure(
                f"the grader failed on {len(failures)} of {len(verdicts)} responses; "
                f"the first failure:\n{failures[0].rstrip()}",
                where="reward",
                fix="mend the ground truths or the grader, or raise reward.max_error_fraction "
                f"(now {self._max_error_fraction:g})",
            )
        scores = [0.0 if isinstance(verdict, Failure) else verdict for verdict in verdicts]
        return RewardResult(
            scores=torch.tensor(scores, dtype=torch.float32),
            valid=torch.tensor([not isinstance(verdict, Failure) for verdict in verdicts], dtype=torch.bool),
            errors=failures[:MAX_ERRORS_KEPT],
            metrics={"reward/num_errors": float(len(failures)), "reward/error_fraction": fraction},
        )

    def close(self) -> None:
        """End the grading processes."""
        for pool in self._pools.values():
            pool.close()

    def _verdicts(self, rollouts: Rollouts) -> list[Verdict]:
        verdicts: list[Verdict] = [0.0] * len(rollouts.response_texts)
        for grader, positions in self._positions_by_grader(rollouts.data_sources).items():
            pairs = [(rollouts.response_texts[i], rollouts.ground_truths[i]) for i in positions]
            for position, verdict in zip(positions, self._grade(grader, pairs), strict=True):
                verdicts[position] = verdict
        return verdicts

    def _positions_by_grader(self, data_sources: Sequence[str]) -> dict[GraderName, list[int]]:
        positions: dict[GraderName, list[int]] = {}
        for position, source in enumerate(data_sources):
            positions.setdefault(self._grader or grader_for(source), []).append(position)
        return positions

    def _grade(self, grader: GraderName, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        if grader in NEEDS_DEADLINE:
            return self._pools.setdefault(grader, GradingPool(grader)).grade_all(pairs)
        return [_grade_here(grader, response, ground_truth) for response, ground_truth in pairs]


def _grade_here(grader: GraderName, response: str, ground_truth: str) -> Verdict:
    try:
        score = GRADERS[grader](response, ground_truth)
    except Exception:
        return Failure(traceback.format_exc())
    return score if math.isfinite(score) else Failure(f"the grader returned {score}")
