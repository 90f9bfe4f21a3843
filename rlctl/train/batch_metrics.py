"""What a batch looks like: rewards, advantages, lengths. Merged over ranks before any division."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.advantages import zero_spread_fraction
from rlctl.algos.tally import HostTally, Tally, TallyBuilder
from rlctl.batch import ScoredBatch, TrainBatch


@torch.no_grad()
def batch_tally(scored: ScoredBatch, batch: TrainBatch, policy_version: int) -> Tally:
    """Sums of this rank's rows; `policy_version` is the trainer's, to tell staleness from."""
    rollouts, builder = scored.rollouts, TallyBuilder()
    everyone = torch.ones_like(rollouts.truncated)
    lengths = rollouts.response_mask.sum(-1).double()
    prompt_lengths = rollouts.attention_mask.sum(-1).double() - lengths
    staleness = (policy_version - rollouts.policy_version).double()
    builder.per_sequence("score", scored.scores.double(), scored.score_valid)
    builder.per_sequence("response_length", lengths, everyone)
    builder.per_sequence("prompt_length", prompt_lengths, everyone)
    builder.per_sequence("staleness", staleness, everyone)
    _per_token(builder, "advantage", batch.advantages.double(), batch.response_mask)
    builder.sums["truncated"] = rollouts.truncated.double().sum()
    flat, groups = zero_spread_fraction(scored.scores, rollouts.group_ids, scored.score_valid)
    builder.sums |= {"flat_groups": flat, "groups": groups, "invalid": (~scored.score_valid).double().sum()}
    return Tally(builder.sums, builder.maxima)


def _per_token(builder: TallyBuilder, name: str, values: Tensor, mask: Tensor) -> None:
    kept = torch.where(mask, values, 0.0)
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    builder.family(name, mask.sum(-1).double(), kept.sum(-1), kept.square().sum(-1), high, low, mask.any(-1))


def batch_metrics(tally: HostTally) -> dict[str, float]:
    """Metrics of the whole batch, under verl's names."""
    metrics: dict[str, float] = {}
    for key, family in {
        "critic/score": "score",
        "critic/rewards": "score",  # token-level rewards add up to the score: no KL or shaping here
        "critic/advantages": "advantage",
        "response_length": "response_length",
        "prompt_length": "prompt_length",
    }.items():
        values = tally.moments(family)
        metrics |= {f"{key}/mean": values.mean, f"{key}/max": values.max, f"{key}/min": values.min}
    staleness = tally.moments("staleness")
    count = tally.sums["response_length.n"]
    return metrics | {
        "response_length/clip_ratio": tally.per("truncated", "response_length.n"),
        "reward/zero_spread_groups": tally.per("flat_groups", "groups"),
        "reward/num_errors": tally.sums["invalid"],
        "reward/error_fraction": tally.sums["invalid"] / count if count else 0.0,
        "training/staleness_mean": staleness.mean,
        "training/staleness_max": staleness.max,
        "perf/total_num_tokens": tally.sums["response_length.s1"] + tally.sums["prompt_length.s1"],
    }
