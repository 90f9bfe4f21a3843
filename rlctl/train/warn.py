"""Things worth a line above the display while training goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch import Tensor

from rlctl.reward.protocol import FailureKind

_MAX_NAMED = 8


class Warner:
    """Says each kind of warning the 1st, 2nd, 4th, 8th … time it occurs, so that none floods the screen.

    Args:
        show: shows one line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._times: Counter[str] = Counter()

    def observe(
        self, step: int, metrics: dict[str, float], nonfinite: Tensor, timeouts: Mapping[FailureKind, int]
    ) -> None:
        """Look at one step.

        Args:
            step: number of the step.
            metrics: its metrics.
            nonfinite: (B,) bool, this rank's sequences with non-finite log-probs.
            timeouts: of this rank, see `RewardResult.timeouts`.
        """
        if skipped := metrics["rollout_corr/skipped_updates"]:
            self._say("skipped", f"step {step}: {skipped:.0f} updates withheld: {_why(metrics)}")
        if count := metrics["rollout_corr/nonfinite_sequences"]:
            rows = nonfinite.nonzero().flatten().tolist()
            named = ", ".join(map(str, rows[:_MAX_NAMED])) + (", …" if len(rows) > _MAX_NAMED else "")
            where = f" (on this rank rows {named})" if rows else ""
            self._say(
                "nonfinite", f"step {step}: {count:.0f} sequences with NaN or infinite log-probs{where}"
            )
        if missed := metrics.get("critic/skipped_updates", 0.0):
            what = "loss or gradient was not finite; lower critic.lr"
            self._say("critic", f"step {step}: {missed:.0f} updates of the critic withheld: {what}")
        if metrics.get("reward/zero_spread_groups") == 1.0:
            what = "every prompt's responses got equal rewards, so there is nothing to learn from"
            self._say("flat", f"step {step}: {what}")
        if errors := metrics["reward/num_errors"]:
            self._say(
                "grader", f"step {step}: the grader failed on {errors:.0f} responses; they are left out"
            )

        if count := metrics["reward/num_timeouts"]:
            kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(timeouts.items()))
            where = f" (on this rank {kinds})" if kinds else ""
            self._say("timeouts", f"step {step}: {count:.0f} responses ended their own grading{where}; wrong")

    def _say(self, kind: str, text: str) -> None:
        self._times[kind] += 1
        times = self._times[kind]
        if times & (times - 1) == 0:  # a power of two
            self._show(f"warning: {text}" + (f" ({times} times so far)" if times > 1 else ""))


def _why(metrics: dict[str, float]) -> str:
    if metrics["rollout_corr/rollout_rs_masked_fraction"] >= 1.0:
        return "every response was rejected; widen rollout_rs_threshold or fix the mismatch"
    return "nothing was left after rejection, or loss or gradient was not finite"
