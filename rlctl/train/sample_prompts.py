"""Prompts and responses of a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlctl.batch import Prompts, Rollouts
from rlctl.data.prompts import PromptDataset
from rlctl.engine.ranks import Ranks
from rlctl.reward.protocol import RewardResult
from rlctl.rollout.engines import sampling_of
from rlctl.rollout.protocol import RolloutEngine, Sampling, step_seed
from rlctl.spec.run_spec import RunSpec
from rlctl.train.sync import release_engine
from rlctl.train.timing import StepTimer

if TYPE_CHECKING:
    from rlctl.train.run import Run


def sample_batch(
    spec: RunSpec, ranks: Ranks, prompts: PromptDataset, rollout: RolloutEngine, step: int
) -> Rollouts:
    """Samples this rank's responses of one step, `rollout.n` per prompt."""
    return rollout.generate(
        step_prompts(spec, ranks, prompts, step),
        sampling_of(spec),
        n=spec.rollout.n,
        step_seed=step_seed(spec.trainer.seed, step),
        num_groups_total=spec.data.train_batch_size,
    )


def greedy_baseline(run: Run, step: int, rollouts: Rollouts, timer: StepTimer) -> RewardResult | None:
    """For every response (B,) of one step, the grade of the greedy response to its prompt.

    None unless the estimator is ReMax. `group_ids` match responses and prompts. This is the last sampling
    before the weight sync, so the engine releases its memory in either case.
    """
    spec = run.spec
    if not spec.algorithm.estimator_needs("baseline_scores"):
        release_engine(run, step)
        return None
    with timer("gen_max"):
        greedy = run.rollout.generate(
            step_prompts(spec, run.ranks, run.train_prompts, step),
            Sampling(max_response_length=spec.data.max_response_length, greedy=True),
            n=1,
            step_seed=step_seed(spec.trainer.seed, step, "greedy"),
            num_groups_total=spec.data.train_batch_size,
        )
    release_engine(run, step)
    with timer("reward"):
        graded = run.reward.score(greedy)
    places = {group: place for place, group in enumerate(greedy.group_ids.tolist())}
    own = torch.tensor([places[group] for group in rollouts.group_ids.tolist()])
    return RewardResult(graded.scores[own], graded.valid[own], errors=graded.errors)


def step_prompts(spec: RunSpec, ranks: Ranks, prompts: PromptDataset, step: int) -> Prompts:
    """This rank's prompts of one step; `group_ids` are their indices in the whole batch."""
    batch_size = spec.data.train_batch_size
    indices = prompts.batch_indices(step - 1, batch_size, seed=spec.trainer.seed, shuffle=spec.data.shuffle)
    mine = rank_positions(batch_size, spec.ppo_mini_batch_size, rank=ranks.rank, world_size=ranks.world_size)
    return prompts.prompts([indices[place] for place in mine], mine)


def rank_positions(
    train_batch_size: int, ppo_mini_batch_size: int, *, rank: int, world_size: int
) -> list[int]:
    """Indices in the whole batch of this rank's prompts, in its order.

    Every mini-batch is divided evenly among the ranks, so that mini-batch k contains the same
    prompts for any number of ranks.
    """
    share = ppo_mini_batch_size // world_size
    return [
        start + rank * share + i
        for start in range(0, train_batch_size, ppo_mini_batch_size)
        for i in range(share)
    ]
