"""Responses of a step and their grades; with sequence parallelism, those of all ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rlctl.batch import Rollouts
from rlctl.reward.protocol import RewardResult
from rlctl.rollout.protocol import Sampling, step_seed
from rlctl.train.filter_groups import filtered_batch
from rlctl.train.settings import is_sync_due
from rlctl.train.step_metrics import StepTimer
from rlctl.train.stream import step_prompts

if TYPE_CHECKING:
    from rlctl.engine.sequence_parallel import SequenceParallel
    from rlctl.train.run import Run


@dataclass(frozen=True, slots=True)
class GradedRollouts:
    """Responses of one step and their grades.

    Attributes:
        baseline: for ReMax, for every response the grade of the greedy response to its prompt; else None.
        sampling_cost: `filter_groups/*` metrics; empty without dynamic sampling.
    """

    rollouts: Rollouts
    rewards: RewardResult
    baseline: RewardResult | None
    sampling_cost: dict[str, float]


def sample_and_grade(run: Run, step: int, timer: StepTimer) -> GradedRollouts:
    """The responses of a step that this rank trains on, and their grades.

    The ranks of a sequence-parallel group get the rows of all of them, and have the same rows from here on.
    """
    cost: dict[str, float] = {}
    if run.draws is not None:
        rollouts, rewards, cost = filtered_batch(run, step, run.draws, timer)
        baseline = greedy_baseline(run, step, rollouts, timer)
    else:
        with timer("gen"):
            rollouts = run.stream.take(step)
        baseline = greedy_baseline(run, step, rollouts, timer)
        with timer("reward"):
            rewards = run.reward.score(rollouts)
    sequence, minis = run.sequence, run.spec.data.train_batch_size // run.spec.ppo_mini_batch_size
    return GradedRollouts(
        shared_rollouts(sequence, rollouts, minis),
        shared_rewards(sequence, rewards, minis),
        baseline and shared_rewards(sequence, baseline, minis),
        cost,
    )


def greedy_baseline(run: Run, step: int, rollouts: Rollouts, timer: StepTimer) -> RewardResult | None:
    """For every response (B,) of one step, the grade of the greedy response to its prompt.

    None unless the estimator is ReMax. `group_ids` match responses and prompts. This is the last sampling
    before the weight sync, so the engine releases its memory in either case.
    """
    spec = run.spec
    weights_follow = is_sync_due(run, step)
    if not spec.algorithm.estimator_needs("baseline_scores"):
        run.rollout.release(weights_follow=weights_follow)
        return None
    with timer("gen_max"):
        greedy = run.rollout.generate(
            step_prompts(spec, run.ranks, run.train_prompts, step),
            Sampling(max_response_length=spec.data.max_response_length, greedy=True),
            n=1,
            step_seed=step_seed(spec.trainer.seed, step, "greedy"),
            num_groups_total=spec.data.train_batch_size,
        )
    run.rollout.release(weights_follow=weights_follow)
    with timer("reward"):
        graded = run.reward.score(greedy)
    places = {group: place for place, group in enumerate(greedy.group_ids.tolist())}
    own = torch.tensor([places[group] for group in rollouts.group_ids.tolist()])
    return RewardResult(graded.scores[own], graded.valid[own], errors=graded.errors)


def shared_rollouts(sequence: SequenceParallel | None, rollouts: Rollouts, mini_batches: int) -> Rollouts:
    """The group's rollouts, ordered by mini-batch, then by rank; unchanged without a group.

    Args:
        sequence: the group; None without sequence parallelism.
        rollouts: this rank's; every rank has the same number of rows.
        mini_batches: number of mini-batches in every rank's rows.
    """
    if sequence is None:
        return rollouts
    parts = sequence.exchange(rollouts.to("cpu"))
    share = len(rollouts.responses) // mini_batches
    starts = range(0, len(rollouts.responses), share)
    joined = Rollouts.joined([part.pick(slice(start, start + share)) for start in starts for part in parts])
    return joined.to(rollouts.responses.device)


def shared_rewards(
    sequence: SequenceParallel | None, rewards: RewardResult, mini_batches: int
) -> RewardResult:
    """The group's grades, in the order of `shared_rollouts`."""
    if sequence is None:
        return rewards
    parts = sequence.exchange(rewards)
    whole = RewardResult.joined(parts)
    rows = torch.arange(len(whole.scores))
    ordered = whole.pick(rows.view(len(parts), mini_batches, -1).transpose(0, 1).flatten())
    names = ("scores", "valid", "parts", "before_penalty")
    return replace(whole, **{name: getattr(ordered, name) for name in names})
