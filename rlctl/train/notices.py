"""Notices above the live display during training, limited in number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from rlctl.reward.protocol import FailureKind

_MAX_NAMED = 8


class Notices:
    """Shows lines, limited per kind, and counts the kinds.

    Args:
        show: shows one line.
        label: prefix of every line.
    """

    def __init__(self, show: Callable[[str], None], label: str) -> None:
        self._show, self._label = show, label
        self._times: Counter[str] = Counter()

    def once(self, kind: str, text: str) -> None:
        """Shows the line if it is the first of its kind."""
        self._times[kind] += 1
        if self._times[kind] == 1:
            self._show(f"{self._label}: {text}")

    def doubling(self, kind: str, text: str) -> None:
        """Shows the line if it is the 1st, 2nd, 4th, 8th … of its kind."""
        self._times[kind] += 1
        times = self._times[kind]
        if times & (times - 1) == 0:  # a power of two
            self._show(f"{self._label}: {text}" + (f" ({times} times so far)" if times > 1 else ""))


def step_warnings(
    metrics: Mapping[str, float], nonfinite: Tensor, timeouts: Mapping[FailureKind, int]
) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) for every problem in one step.

    Args:
        metrics: of the step.
        nonfinite: (B,) bool, this rank's sequences with non-finite log-probs.
        timeouts: of this rank, see `RewardResult.timeouts`.
    """
    if skipped := metrics["rollout_corr/skipped_updates"]:
        why = "everything was rejected, or loss or gradient was not finite"
        if metrics["rollout_corr/rollout_rs_masked_fraction"] >= 1.0:
            why = "every response was rejected; widen rollout_rs_threshold or fix the mismatch"
        yield "skipped", f"{skipped:.0f} updates withheld: {why}"
    if count := metrics["rollout_corr/nonfinite_sequences"]:
        rows = nonfinite.nonzero().flatten().tolist()
        named = ", ".join(map(str, rows[:_MAX_NAMED])) + (", …" if len(rows) > _MAX_NAMED else "")
        where = f" (on this rank rows {named})" if rows else ""
        yield "nonfinite", f"{count:.0f} sequences with NaN or infinite log-probs{where}"
    if missed := metrics.get("critic/skipped_updates", 0.0):
        why = "loss or gradient was not finite; lower critic.lr"
        yield "critic", f"{missed:.0f} updates of the critic withheld: {why}"
    if metrics.get("reward/zero_spread_groups") == 1.0:
        yield "flat", "within every group all rewards are equal, so group-relative advantages are zero"
    if metrics.get("response_length/clip_ratio") == 1.0:
        yield (
            "endless",
            "every response reached data.max_response_length; check the model's end-of-sequence token",
        )
    if errors := metrics["reward/num_errors"]:
        yield "grader", f"the grader failed on {errors:.0f} responses; they are excluded"
    if count := metrics["reward/num_timeouts"]:
        kinds = ", ".join(f"{kind}: {number}" for kind, number in sorted(timeouts.items()))
        where = f" (on this rank {kinds})" if kinds else ""
        yield "timeouts", f"{count:.0f} responses made their grading fail{where} and are scored as wrong"
