"""Splits the log-ratio of the trained policy to the sampling one, as far as a step knows its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlctl.algos.segments import HostSums, Moments, Sums, moments, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import TokenBatch
    from rlctl.spec.run_spec import RunSpec

#: Mean square of the log-ratio of a few tokens sampled right after a weight sync.
ENGINE = "rollout_corr/split/engine"


def ratio_sums(batch: TokenBatch, training_log_probs: Tensor, spec: RunSpec) -> Sums:
    """Moments of log π_train − log π_rollout of what this rank trains on: of all tokens, `fresh` and `mixed`.

    Both are sampled by the weights under which π_train is computed. The keys and values that `mixed` ones
    attend to may be of older weights, because these sampled earlier tokens of their sequence.
    """
    assert batch.age is not None
    gaps, sequence = training_log_probs - batch.rollout_log_probs, batch.units.sequence
    current = (batch.age == 0) & gaps.isfinite()
    if spec.algorithm.rollout_correction.bypass_mode:  # π_train moves with every update after the first
        current &= batch.units.episode.spread(batch.group_ids < spec.ppo_mini_batch_size)
    there = sequence.lengths > 0
    first = torch.zeros_like(sequence.lengths)
    first[there] = batch.versions[sequence.starts[there]]
    mixed = batch.versions != sequence.spread(first)
    sums = moments("all", gaps[gaps.isfinite()])
    sums |= moments("fresh", gaps[current & ~mixed]) | moments("mixed", gaps[current & mixed])
    return sums | {"num_mixed": mixed.sum().double()}


def ratio_metrics(sums: HostSums, spec: RunSpec, probed: float | None) -> dict[str, float]:
    """`rollout_corr/split/*`: parts of the mean square of the log-ratio, nats², whose sum it is.

    Independent parts add up in the mean square. A part that the step does not tell is left out; then so are
    those that follow from it. `probed`: the mean square right after a weight sync, without truncation.
    """

    def square(name: str) -> float | None:
        values = Moments.read(sums, name)
        return values.squares / values.count if values.count else None

    total, fresh, mixed = map(square, ("all", "fresh", "mixed"))
    rollout = spec.rollout
    truncates = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    is_apart = not truncates or rollout.exact_sampling  # then fresh tokens show the engine alone
    engine = fresh if is_apart and fresh is not None else probed
    found = {} if engine is None else {ENGINE: engine}
    if not is_apart and engine is not None and fresh is not None:
        found["rollout_corr/split/kept_set"] = max(fresh - engine, 0.0)
    known = fresh if fresh is not None else engine if is_apart else None
    if known is None or total is None:
        return found
    share = ratio(sums["num_mixed"], Moments.read(sums, "all").count)
    cache = share * max(mixed - known, 0.0) if mixed is not None else 0.0
    if mixed is not None:
        found["rollout_corr/split/cache"] = cache
    return found | {"rollout_corr/split/staleness": max(total - known - cache, 0.0)}
