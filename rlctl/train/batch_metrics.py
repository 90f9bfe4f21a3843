"""Metrics of a batch: rewards, advantages, lengths. Sums are merged over ranks before any division."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.advantages import zero_spread_fraction
from rlctl.algos.metric_sums import MetricSums, ReducedSums, moments_of, ratio
from rlctl.batch import ScoredBatch, TrainBatch
from rlctl.reward.protocol import RewardResult

#: Moments whose mean, maximum and minimum are logged under their name.
_LOGGED = (
    "critic/score",
    "critic/rewards",
    "critic/advantages",
    "critic/values",
    "critic/returns",
    "response_length",
    "prompt_length",
)


@torch.no_grad()
def batch_sums(
    scored: ScoredBatch, batch: TrainBatch, graded: RewardResult, policy_version: int, max_prompt_length: int
) -> MetricSums[Tensor]:
    """Sums over this rank's rows. Staleness is the trainer's `policy_version` minus that of the rollout."""
    rollouts = scored.rollouts
    everyone = torch.ones_like(rollouts.truncated)
    lengths, prompts = (mask.sum(-1).double() for mask in (rollouts.response_mask, rollouts.prompt_mask))
    rewards = scored.token_level_rewards.double().sum(-1)
    moments = {
        "critic/score": moments_of(scored.scores, scored.score_valid),
        "critic/rewards": moments_of(rewards, scored.score_valid),
        "response_length": moments_of(lengths, everyone),
        "prompt_length": moments_of(prompts, everyone),
        "staleness": moments_of(policy_version - rollouts.policy_version, everyone),
        "critic/advantages": moments_of(batch.advantages, batch.response_mask),
    }
    if batch.values is not None and batch.returns is not None:
        moments["critic/values"] = moments_of(batch.values, batch.valid_mask)
        moments["critic/returns"] = moments_of(batch.returns, batch.valid_mask)
    sums = {
        "full_prompts": (prompts >= max_prompt_length).double().sum(),
        "truncated": rollouts.truncated.double().sum(),
        "aborted": rollouts.aborted.double().sum(),
        "invalid": (~scored.score_valid & ~rollouts.aborted).double().sum(),
        "timeouts": torch.full_like(rewards.sum(), sum(graded.timeouts.values())),
    }
    for term, scores in graded.parts.items():
        applies = ~scores.isnan().to(scored.score_valid.device)
        moments[f"term/{term}"] = moments_of(scores.nan_to_num().to(rewards), scored.score_valid & applies)
        sums[f"errors/{term}"] = torch.full_like(rewards.sum(), graded.errors_by_term.get(term, 0))
    sums["flat_groups"], sums["groups"] = zero_spread_fraction(
        scored.scores, rollouts.group_ids, scored.score_valid
    )
    return MetricSums(sums, moments)


def batch_metrics(reduced: ReducedSums, *, compares_siblings: bool) -> dict[str, float]:
    """Metrics of the whole batch, under verl's names.

    `reward/zero_spread_groups` is included only if the estimator compares the responses of a group.
    """
    metrics: dict[str, float] = {}
    for name in _LOGGED:
        if values := reduced.moments.get(name):
            metrics |= {f"{name}/mean": values.mean, f"{name}/max": values.max, f"{name}/min": values.min}
    terms = [name.removeprefix("errors/") for name in reduced.sums if name.startswith("errors/")]
    for term in terms if len(terms) > 1 else []:  # a single term equals `critic/score`
        metrics[f"reward/{term}/mean"] = reduced.moments[f"term/{term}"].mean
        metrics[f"reward/{term}/num_errors"] = reduced.sums[f"errors/{term}"]
    if compares_siblings:
        metrics["reward/zero_spread_groups"] = reduced.per("flat_groups", "groups")
    staleness = reduced.moments["staleness"]
    lengths = reduced.moments["response_length"]
    return metrics | {
        "response_length/clip_ratio": ratio(reduced.sums["truncated"], lengths.count),
        "prompt_length/clip_ratio": ratio(reduced.sums["full_prompts"], lengths.count),
        "response/num_aborted": reduced.sums["aborted"],
        "reward/num_errors": reduced.sums["invalid"],
        "reward/num_timeouts": reduced.sums["timeouts"],
        "reward/error_fraction": ratio(reduced.sums["invalid"], lengths.count),
        "training/staleness_mean": staleness.mean,
        "training/staleness_max": staleness.max,
        "perf/total_num_tokens": lengths.total + reduced.moments["prompt_length"].total,
    }
