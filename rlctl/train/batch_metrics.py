"""What a batch looks like: rewards, advantages, lengths. Merged over ranks before any division."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.advantages import zero_spread_fraction
from rlctl.algos.tally import HostTally, Tally, TallyBuilder
from rlctl.batch import ScoredBatch, TrainBatch
from rlctl.reward.protocol import RewardResult

#: Logged prefix → family of the tally.
_FAMILIES = {
    "critic/score": "score",
    "critic/rewards": "reward",
    "critic/advantages": "advantage",
    "critic/values": "value",
    "critic/returns": "return",
    "response_length": "response_length",
    "prompt_length": "prompt_length",
}


@torch.no_grad()
def batch_tally(scored: ScoredBatch, batch: TrainBatch, graded: RewardResult, policy_version: int) -> Tally:
    """Sums of this rank's rows; `policy_version` is the trainer's, to tell staleness from."""
    rollouts, builder = scored.rollouts, TallyBuilder()
    everyone = torch.ones_like(rollouts.truncated)
    lengths = rollouts.response_mask.sum(-1).double()
    prompt_lengths = rollouts.attention_mask.sum(-1).double() - lengths
    staleness = (policy_version - rollouts.policy_version).double()
    builder.per_sequence("score", scored.scores.double(), scored.score_valid)
    rewards = scored.token_level_rewards.double().sum(-1)
    builder.per_sequence("reward", rewards, scored.score_valid)
    for term, scores in graded.parts.items():
        builder.per_sequence(f"term/{term}", scores.to(rewards), scored.score_valid)
        builder.sums[f"errors/{term}"] = torch.full_like(rewards.sum(), graded.errors_by_term.get(term, 0))
    builder.per_sequence("response_length", lengths, everyone)
    builder.per_sequence("prompt_length", prompt_lengths, everyone)
    builder.per_sequence("staleness", staleness, everyone)
    _per_token(builder, "advantage", batch.advantages, batch.response_mask)
    if batch.values is not None and batch.returns is not None:
        _per_token(builder, "value", batch.values, batch.counted)
        _per_token(builder, "return", batch.returns, batch.counted)
    builder.sums["timeouts"] = torch.full_like(rewards.sum(), sum(graded.timeouts.values()))
    builder.sums["truncated"] = rollouts.truncated.double().sum()
    builder.sums["aborted"] = rollouts.aborted.double().sum()
    failed = ~scored.score_valid & ~rollouts.aborted
    flat, groups = zero_spread_fraction(scored.scores, rollouts.group_ids, scored.score_valid)
    builder.sums |= {"flat_groups": flat, "groups": groups, "invalid": failed.double().sum()}
    return Tally(builder.sums, builder.maxima)


def _per_token(builder: TallyBuilder, name: str, values: Tensor, mask: Tensor) -> None:
    values = values.double()
    kept = torch.where(mask, values, 0.0)
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    builder.family(name, mask.sum(-1).double(), kept.sum(-1), kept.square().sum(-1), high, low, mask.any(-1))


def batch_metrics(tally: HostTally, *, compares_siblings: bool) -> dict[str, float]:
    """Metrics of the whole batch, under verl's names.

    Groups without spread are only worth a word where the estimator compares siblings.
    """
    metrics: dict[str, float] = {}
    for key, family in _FAMILIES.items():
        if f"{family}.n" not in tally.sums:
            continue
        values = tally.moments(family)
        metrics |= {f"{key}/mean": values.mean, f"{key}/max": values.max, f"{key}/min": values.min}
    terms = [name.removeprefix("errors/") for name in tally.sums if name.startswith("errors/")]
    for term in terms if len(terms) > 1 else []:  # the only one is `critic/score`
        metrics[f"reward/{term}/mean"] = tally.moments(f"term/{term}").mean
        metrics[f"reward/{term}/num_errors"] = tally.sums[f"errors/{term}"]
    if compares_siblings:
        metrics["reward/zero_spread_groups"] = tally.per("flat_groups", "groups")
    staleness = tally.moments("staleness")
    count = tally.sums["response_length.n"]
    return metrics | {
        "response_length/clip_ratio": tally.per("truncated", "response_length.n"),
        "response/num_aborted": tally.sums["aborted"],
        "reward/num_errors": tally.sums["invalid"],
        "reward/num_timeouts": tally.sums["timeouts"],
        "reward/error_fraction": tally.sums["invalid"] / count if count else 0.0,
        "training/staleness_mean": staleness.mean,
        "training/staleness_max": staleness.max,
        "perf/total_num_tokens": tally.sums["response_length.s1"] + tally.sums["prompt_length.s1"],
    }
