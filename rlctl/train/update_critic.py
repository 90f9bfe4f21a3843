"""The critic's optimizer steps on one batch: clipped regression of values to returns, per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from rlctl.algos.estimators import explained_variance
from rlctl.algos.losses import coefficients, value_loss
from rlctl.algos.segments import HostSums, Sums, added, ratio
from rlctl.batch import TokenBatch
from rlctl.engine.layout import idle_inputs
from rlctl.engine.protocol import CriticEngine, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.train.deal import in_step, micro_batches, mini_batches
from rlctl.train.settings import CriticSettings


def update_critic(
    batch: TokenBatch,
    critic: CriticEngine,
    ranks: Ranks,
    settings: CriticSettings,
    lr_at: Callable[[int], float],
    first_update: int,
) -> dict[str, float]:
    """Takes all optimizer steps of the critic on one batch; returns `critic/*` metrics over all ranks.

    Args:
        batch: this rank's episodes, with `values` and `returns`.
        lr_at: learning rate by the number of the critic's update.
        first_update: number of the first update of this batch.
    """
    batch = replace(batch, experts=None)  # those of the policy
    assert batch.values is not None
    assert batch.returns is not None
    explained = explained_variance(ranks.all_gather(batch.returns), ranks.all_gather(batch.values))
    sums: list[HostSums] = []
    steps: list[StepResult] = []
    for _ in range(settings.ppo_epochs):
        for episodes in mini_batches(batch, settings.mini_groups, settings.num_minis):
            lr = lr_at(first_update + len(steps))
            found = _backward(batch.pick(episodes), critic, ranks, settings)
            skip = not math.isfinite(found["vf_loss"]) or found["tokens"] == 0
            steps.append(critic.step(lr=lr, skip=skip))
            sums.append(found)
    total = added(sums)
    return {
        "critic/vf_loss": total["vf_loss"] / len(steps),
        "critic/vf_clipfrac": ratio(total["clipped"], total["tokens"]),
        "critic/vpred_mean": ratio(total["values"], total["tokens"]),
        "critic/vf_explained_var": explained,
        "critic/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "critic/lr": lr,
        "critic/skipped_updates": float(sum(not step.applied for step in steps)),
    }


def _backward(mini: TokenBatch, critic: CriticEngine, ranks: Ranks, settings: CriticSettings) -> HostSums:
    """Accumulates the gradient of one mini-batch; returns its sums over all ranks."""
    lengths, idle = mini.units.of(settings.unit).lengths, idle_inputs(mini.token_ids.device)
    counts = ranks.sum([float(lengths.sum()), float((lengths > 0).sum())])
    parts = [
        mini.pick(episodes)
        for episodes in micro_batches(mini, settings.micro_sequences, settings.micro_tokens)
    ]
    critic.plan([part.inputs for part in parts] or [idle])
    passes = in_step(parts, ranks)
    zero = torch.zeros((), dtype=torch.float64, device=mini.token_ids.device)
    sums: list[Sums] = [dict.fromkeys(("vf_loss", "tokens", "values", "clipped"), zero)]
    for done, part in enumerate(passes, start=1):
        if part is None:
            loss = 0.0 * critic.values(idle).sum()
        else:
            values = critic.values(part.inputs)
            assert part.values is not None
            assert part.returns is not None
            per_token = value_loss(values, part.values, part.returns, clip=settings.cliprange_value)
            all_of_them = torch.ones_like(part.turns, dtype=torch.bool)
            unit = part.units.of(settings.unit)
            c = coefficients(
                settings.agg_mode, all_of_them, all_of_them, unit, *counts, horizon=settings.horizon
            )
            loss = (c * per_token.values).sum()
            clipped = zero if per_token.clipped is None else per_token.clipped.sum()
            figures = {
                "vf_loss": loss.detach(),
                "tokens": zero + len(values),
                "values": values.detach().sum(),
            }
            sums.append({name: value.double() for name, value in (figures | {"clipped": clipped}).items()})
        critic.backward(loss, last=done == len(passes))
    return ranks.all_reduce(added(sums))
