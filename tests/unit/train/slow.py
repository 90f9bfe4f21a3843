"""The slow way: the actor's loss by plain autograd, token by token in float64; batches record by record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlctl.algos.rules import LossRule
from rlctl.batch import Episode, TokenBatch
from rlctl.train.settings import UpdateSettings
from tests.models import naive_log_probs
from tests.reference.correction import reference


@dataclass(frozen=True)
class Loss:
    """All three of one mini-batch."""

    policy: Tensor
    kl: Tensor | None
    total: Tensor


def slow_loss(model, batch: TokenBatch, settings: UpdateSettings) -> Loss:
    """rollout-correction.md §4: weights and mask from the oracle, everything else from the papers."""
    rows_of = batch.units.episode.padded
    log_probs, entropy = map(rows_of, naive_log_probs(model, batch))
    columns = (batch.old_log_probs, batch.advantages, batch.column("ref_log_probs"), batch.rollout_log_probs)
    olds, advantages, refs, rollouts = map(rows_of, columns)
    mask = rows_of(torch.ones_like(batch.turns, dtype=torch.bool), False)
    against = log_probs.detach() if settings.bypass else olds
    known = reference(against.tolist(), rollouts.tolist(), mask.tolist(), settings.rules, advantages.tolist())
    after = settings.rules.loss_denominator == "after_rejection"
    applied = known.weights is not None and not (settings.bypass and settings.loss.name != "reinforce")
    sums: dict[str, list[Tensor]] = {"policy": [], "entropy": [], "kl": []}  # one per sequence
    counts = []
    for row in range(batch.num_episodes):
        places = [t for t in range(mask.shape[1]) if mask[row, t]]
        kept = [t for t in places if known.keep[row][t]]
        old = olds[row].double()
        policy = policy_losses(settings.loss, log_probs[row], old, advantages[row].tolist(), kept)
        weights = [known.weights[row][t] / known.factor if applied else 1.0 for t in kept]
        values = {
            "policy": [w * x for w, x in zip(weights, policy, strict=True)],
            "entropy": [entropy[row, t] for t in kept],
            "kl": kl_losses(
                settings.actor.kl_loss_type if settings.actor.use_kl_loss else None,
                log_probs[row],
                refs[row],
                rollouts[row],
                kept,
            ),
        }
        counts.append(len(kept) if after else len(places))
        share = max(counts[-1], 1) if settings.actor.loss_agg_mode == "seq-mean-token-mean" else 1
        for name, tokens in values.items():
            sums[name].append(sum(tokens, torch.zeros((), dtype=torch.float64)) / share)
    divisor = _divisor(settings, counts)
    found = {name: torch.stack(rows).sum() / divisor for name, rows in sums.items()}
    total = found["policy"] - settings.actor.entropy_coeff * found["entropy"]
    if not settings.actor.use_kl_loss:
        return Loss(found["policy"], None, total)
    return Loss(found["policy"], found["kl"], total + settings.actor.kl_loss_coef * found["kl"])


def _divisor(settings: UpdateSettings, counts: list[int]) -> int:
    num_sequences = sum(count > 0 for count in counts)
    return {
        "token-mean": sum(counts),
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-mean": num_sequences,
        "seq-mean-token-sum-norm": num_sequences * settings.spec.data.max_response_length,
    }[settings.actor.loss_agg_mode]


def policy_losses(
    rule: LossRule, log_probs: Tensor, old: Tensor, advantages: list[float], kept: list[int]
) -> list[Tensor]:
    """−objective of the kept tokens of one sequence, without importance weights."""
    found = []
    for t in kept:
        a, new, ratio = advantages[t], log_probs[t], (log_probs[t] - old[t]).exp()
        if rule.name == "gspo":
            mean_gap = torch.stack([log_probs[j] - old[j] for j in kept]).mean().detach()
            ratio = mean_gap.exp() * (new - new.detach()).exp()
        held = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
        if rule.name == "reinforce":
            value = new * a
        elif rule.name in {"ppo_clip", "gspo"}:
            value = torch.minimum(ratio * a, held * a)
            if rule.clip_c is not None and a < 0:
                value = torch.maximum(value, torch.full_like(value, rule.clip_c * a))
        elif rule.name == "cispo":
            value = held.detach() * a * new
        elif rule.name == "sapo":
            tau = rule.tau_pos if a > 0 else rule.tau_neg
            value = 4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a
        else:
            value = dppo_factor(rule, float(new.detach()), float(old[t]), a) * a * new
        found.append(-value)
    return found


def dppo_factor(rule: LossRule, new: float, old: float, advantage: float) -> float:
    """The bounded ratio, or 0 where the update leads further out of the trust region."""
    p, q = math.exp(new), math.exp(old)
    distance = abs(p - q)
    if rule.divergence == "kl":
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    limit = rule.clip_high if advantage > 0 else rule.clip_low
    if (p > q) == (advantage > 0) and distance > limit:
        return 0.0
    return min(p / q, rule.clip_c or math.inf)


def kl_losses(
    kind: str | None, log_probs: Tensor, ref: Tensor, rollout: Tensor, kept: list[int]
) -> list[Tensor]:
    """The penalty of the kept tokens of one sequence; `unbiased` and `sequence` for a sampler π_rollout."""
    found = []
    before = torch.zeros(())
    for t in kept if kind else []:
        gap = log_probs[t] - ref[t]
        k3 = (-gap).exp() - 1 + gap
        before = before + log_probs[t] - rollout[t]
        value = {"k1": gap, "k2": gap**2 / 2, "k3": k3, "unbiased": (log_probs[t] - rollout[t]).exp() * k3}
        value["sequence"] = before.exp() * k3
        found.append(value[kind])
    return found


def slow_columns(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """The columns of a batch, token by token from the records of its episodes."""
    columns: dict[str, list[Any]] = {name: [] for name in SLOW_COLUMNS}
    for place, episode in enumerate(episodes):
        columns["group_ids"].append(episode.task.group_id)
        columns["members"].append(episode.member)
        columns["prompt_weights"].append(episode.task.weight)
        for sequence in episode.sequences:
            columns["lengths"].append(len(sequence.token_ids))
            columns["owners"].append(place)
            columns["token_ids"] += sequence.token_ids.tolist()
            columns["sampled"] += sequence.sampled.tolist()
            columns["rollout_log_probs"] += sequence.log_probs.tolist()
            columns["versions"] += sequence.versions.tolist()
            columns["turns"] += sequence.turns.tolist()
            zeros = [0.0] * len(sequence.log_probs)
            columns["rewards"] += zeros if sequence.rewards is None else sequence.rewards.tolist()
            assert sequence.kept is not None
            assert sequence.experts is not None
            ids = iter(sequence.kept.ids.tolist())
            columns["kept"] += [[next(ids) for _ in range(n)] for n in sequence.kept.counts.tolist()]
            columns["experts"] += sequence.experts.tolist()
    return columns


#: What `slow_columns` returns.
SLOW_COLUMNS = (
    *("group_ids", "members", "prompt_weights", "lengths", "owners", "token_ids", "sampled"),
    *("rollout_log_probs", "versions", "turns", "rewards", "kept", "experts"),
)


def slow_sums(episodes: Sequence[Episode], version: int, limit: int) -> dict[str, float]:
    """Figures of the episodes without an error, one after the other; `limit`: of prompts, in tokens."""
    whole = [episode for episode in episodes if not episode.error]
    observed = 0
    for sequence in (sequence for episode in whole for sequence in episode.sequences):
        has_spoken = False
        for is_sampled in sequence.sampled.tolist():
            has_spoken |= is_sampled
            observed += has_spoken and not is_sampled
    ages = [max((version - int(v) for s in e.sequences for v in s.versions), default=0) for e in whole]
    return {
        "response_length.x": sum(e.num_sampled for e in whole),
        "response_length.n": len(whole),
        "prompt_length.x": sum(e.num_prompt for e in whole),
        "staleness.x": sum(max(age, 0) for age in ages),
        "full_prompts": sum(e.num_prompt >= limit for e in whole),
        "truncated": sum(e.truncated for e in whole),
        "response/num_aborted": sum(e.aborted for e in whole),
        "groups": len({e.task.group_id for e in whole}),
        "observed": observed,
    }
