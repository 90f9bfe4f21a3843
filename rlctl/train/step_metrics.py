"""What a step reports: metrics of its batch, seconds by phase, and warnings.

Sums of a batch are merged over ranks before any division.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from rlctl.algos.estimators import zero_spread_fraction
from rlctl.algos.metric_sums import Additive, Moments, V, moments_of, ratio
from rlctl.batch import ScoredBatch, TrainBatch
from rlctl.reward.protocol import FailureKind, RewardResult

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class TermSums(Additive, Generic[V]):
    """One term of the reward: moments of its scores, and how many responses it could not grade."""

    scores: Moments[V]
    errors: V


@dataclass(frozen=True, slots=True)
class BatchSums(Additive, Generic[V]):
    """Sums over the rows of a batch.

    Attributes:
        scores, rewards: of the graded responses; rewards include the KL penalty.
        response_length, prompt_length: tokens per response.
        staleness: optimizer updates between the policy that sampled a response and the trained one.
        advantages: of the response tokens.
        values, returns: of the response tokens; None without a critic.
        full_prompts, truncated, aborted, invalid, timeouts: numbers of responses.
        flat_groups, groups: groups with equal grades (without the overlong penalty), and all groups.
        terms: term of the reward → its sums.
    """

    scores: Moments[V]
    rewards: Moments[V]
    response_length: Moments[V]
    prompt_length: Moments[V]
    staleness: Moments[V]
    advantages: Moments[V]
    values: Moments[V] | None
    returns: Moments[V] | None
    full_prompts: V
    truncated: V
    aborted: V
    invalid: V
    timeouts: V
    flat_groups: V
    groups: V
    terms: dict[str, TermSums[V]]


@torch.no_grad()
def batch_sums(
    scored: ScoredBatch, batch: TrainBatch, graded: RewardResult, policy_version: int, max_prompt_length: int
) -> BatchSums[Tensor]:
    """Sums over this rank's rows; `policy_version` is the trainer's."""
    rollouts, valid, mask = scored.rollouts, scored.score_valid, batch.valid_mask
    everyone = torch.ones_like(rollouts.truncated)
    lengths, prompts = (tokens.sum(-1).double() for tokens in (rollouts.response_mask, rollouts.prompt_mask))
    rewards = scored.token_level_rewards.double().sum(-1)
    grades = graded.graded.to(valid.device)
    flat_groups, groups = zero_spread_fraction(grades, rollouts.group_ids, valid)

    def constant(number: int) -> Tensor:
        return torch.full_like(groups, number, dtype=torch.float64)

    def of_term(term: str, scores: Tensor) -> TermSums[Tensor]:
        applies = ~scores.isnan().to(valid.device)
        moments = moments_of(scores.nan_to_num().to(rewards), valid & applies)
        return TermSums(moments, constant(graded.errors_by_term.get(term, 0)))

    return BatchSums(
        scores=moments_of(scored.scores, valid),
        rewards=moments_of(rewards, valid),
        response_length=moments_of(lengths, everyone),
        prompt_length=moments_of(prompts, everyone),
        staleness=moments_of(policy_version - rollouts.policy_version, everyone),
        advantages=moments_of(batch.advantages, batch.response_mask),
        values=None if batch.values is None else moments_of(batch.values, mask),
        returns=None if batch.returns is None else moments_of(batch.returns, mask),
        full_prompts=(prompts >= max_prompt_length).double().sum(),
        truncated=rollouts.truncated.double().sum(),
        aborted=rollouts.aborted.double().sum(),
        invalid=(~valid & ~rollouts.aborted).double().sum(),
        timeouts=constant(sum(graded.timeouts.values())),
        flat_groups=flat_groups,
        groups=groups,
        terms={term: of_term(term, scores) for term, scores in graded.parts.items()},
    )


def batch_metrics(sums: BatchSums[float], *, compares_siblings: bool) -> dict[str, float]:
    """Metrics of the whole batch, under verl's names.

    `reward/zero_spread_groups` is included only if the estimator compares the responses of a group.
    """
    logged = {
        "critic/score": sums.scores,
        "critic/rewards": sums.rewards,
        "critic/advantages": sums.advantages,
        "critic/values": sums.values,
        "critic/returns": sums.returns,
        "response_length": sums.response_length,
        "prompt_length": sums.prompt_length,
    }
    metrics: dict[str, float] = {}
    for name, values in logged.items():
        if values:
            metrics |= {f"{name}/mean": values.mean, f"{name}/max": values.max, f"{name}/min": values.min}
    for name, term in sums.terms.items() if len(sums.terms) > 1 else ():  # one term equals `critic/score`
        metrics[f"reward/{name}/mean"] = term.scores.mean
        metrics[f"reward/{name}/num_errors"] = term.errors
    if compares_siblings:
        metrics["reward/zero_spread_groups"] = ratio(sums.flat_groups, sums.groups)
    num_rows = sums.response_length.count
    return metrics | {
        "response_length/clip_ratio": ratio(sums.truncated, num_rows),
        "prompt_length/clip_ratio": ratio(sums.full_prompts, num_rows),
        "response/num_aborted": sums.aborted,
        "reward/num_errors": sums.invalid,
        "reward/num_timeouts": sums.timeouts,
        "reward/error_fraction": ratio(sums.invalid, num_rows),
        "training/staleness_mean": sums.staleness.mean,
        "training/staleness_max": sums.staleness.max,
        "perf/total_num_tokens": sums.response_length.total + sums.prompt_length.total,
    }


class StepTimer:
    """Seconds by phase, as `timing_s/<phase>`; phases may nest.

    Args:
        show: called with the name of every phase that begins.
    """

    def __init__(self, device: torch.device, show: Callable[[str], None] = lambda _: None) -> None:
        self._is_cuda = device.type == "cuda"
        self._show = show
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block; on CUDA, waits for its kernels, which would otherwise count for the next phase."""
        self._show(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._is_cuda:
                torch.cuda.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/*` of every phase."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


class Notices:
    """Shows lines, limited per kind, and counts the kinds.

    Args:
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
        what = "within every group all grades are equal: group-relative advantages are zero"
        yield "flat", f"{what}, or come from the penalties alone"
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
