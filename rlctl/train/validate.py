"""Greedy answers to the validation prompts, graded like the training ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.reward.build import refuse_errors
from rlctl.rollout.protocol import Sampling, step_seed

if TYPE_CHECKING:
    from rlctl.train.run import Run


def validate(run: Run) -> dict[str, float]:
    """`val/<data_source>/reward_mean` and `…/response_length_mean`, over all ranks.

    Samples whose grader failed are left out of both, and rewards are those without overlong penalty.

    Raises:
        RunFailure: too large a share could not be graded.
    """
    prompts = run.val_prompts
    if prompts is None:
        return {}
    spec, ranks = run.spec, run.ranks
    size = spec.data.train_batch_size * spec.rollout.n  # as many sequences at once as in training
    sampling = Sampling(max_response_length=spec.data.max_response_length, greedy=True)
    sources = sorted({row.data_source for row in prompts.rows})
    sums = dict.fromkeys(((source, what) for source in sources for what in ("n", "reward", "length")), 0.0)
    first_error = ""
    mine = range(ranks.rank, len(prompts), ranks.world_size)
    for start in range(0, len(mine), size):
        indices = mine[start : start + size]
        rollouts = run.rollout.generate(
            prompts.prompts(indices, range(len(indices))),
            sampling,
            n=1,
            step_seed=step_seed(spec.trainer.seed, 0, "validation"),
            num_groups_total=len(indices),
        )
        rewards = run.reward.score(rollouts)
        first_error = first_error or "".join(rewards.errors[:1])
        graded = rewards.graded
        lengths = rollouts.response_mask.sum(-1).tolist()
        for row, source in enumerate(rollouts.data_sources):
            if rewards.valid[row]:
                sums[source, "n"] += 1
                sums[source, "reward"] += float(graded[row])
                sums[source, "length"] += lengths[row]
    merged = dict(zip(sums, ranks.sum(list(sums.values())), strict=True))
    num_graded = sum(merged[source, "n"] for source in sources)
    refuse_errors(
        len(prompts) - num_graded,
        len(prompts),
        lambda: ranks.first(first_error),
        spec.reward.max_error_fraction,
    )
    metrics = {}
    for source in sources:
        if count := merged[source, "n"]:
            metrics[f"val/{source}/reward_mean"] = merged[source, "reward"] / count
            metrics[f"val/{source}/response_length_mean"] = merged[source, "length"] / count
    return metrics
