"""The critic's optimizer steps on one batch: clipped regression of values to returns, per mini-batch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Generic

import torch
from torch import Tensor

from rlctl.algos.losses import Denominators, aggregate, value_loss
from rlctl.algos.metric_sums import Additive, V, ratio
from rlctl.algos.token_advantages import explained_variance
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import CriticEngine, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.train.micro_batches import micro_batches
from rlctl.train.settings import CriticSettings


@dataclass(frozen=True, slots=True)
class CriticSums(Additive, Generic[V]):
    """Sums over micro-batches: loss, tokens, their predicted values, tokens where the clip is active."""

    vf_loss: V
    tokens: V
    values: V
    clipped: V


def update_critic(
    batch: TrainBatch,
    critic: CriticEngine,
    ranks: Ranks,
    settings: CriticSettings,
    lr_at: Callable[[int], float],
    first_update: int,
) -> dict[str, float]:
    """Takes all optimizer steps of the critic on one batch; returns `critic/*` metrics over all ranks.

    Args:
        batch: this rank's rows, mini-batches in order, with `values` and `returns`.
        lr_at: learning rate by the number of the critic's update.
        first_update: number of the first update of this batch.
    """
    assert batch.values is not None
    assert batch.returns is not None
    values, returns = batch.values, batch.returns
    explained = explained_variance(returns, values, batch.valid_mask, ranks.to_host)
    sums: list[CriticSums[float]] = []
    steps: list[StepResult] = []
    for _ in range(settings.ppo_epochs):
        for mini in batch.split(settings.mini_rows):
            lr = lr_at(first_update + len(steps))
            found = _backward(mini, critic, ranks, settings)
            skip = not math.isfinite(found.vf_loss) or found.tokens == 0
            steps.append(critic.step(lr=lr, skip=skip))
            sums.append(found)
    total = reduce(operator.add, sums)
    return {
        "critic/vf_loss": total.vf_loss / len(steps),
        "critic/vf_clipfrac": ratio(total.clipped, total.tokens),
        "critic/vpred_mean": ratio(total.values, total.tokens),
        "critic/vf_explained_var": explained,
        "critic/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "critic/lr": lr,
        "critic/skipped_updates": float(sum(not step.applied for step in steps)),
    }


def _backward(
    mini: TrainBatch, critic: CriticEngine, ranks: Ranks, settings: CriticSettings
) -> CriticSums[float]:
    """Accumulates the gradient of one mini-batch; returns its sums over all ranks."""
    counts = ranks.sum([float(mini.valid_mask.sum()), float(mini.valid_mask.any(-1).sum())])
    denominators = Denominators(*counts)
    parts = micro_batches(mini.inputs, settings.micro_rows, settings.micro_tokens, ranks)
    sums: list[CriticSums[Tensor]] = []
    for index, rows in enumerate(parts):
        micro = mini.pick(rows)
        mask, old_values, returns = micro.valid_mask, micro.values, micro.returns
        assert old_values is not None
        assert returns is not None
        values = critic.values(micro.inputs)
        per_token = value_loss(values, old_values, returns, mask, clip=settings.cliprange_value)
        loss = aggregate(per_token.values, mask, denominators, settings.agg_mode, horizon=settings.horizon)
        critic.backward(loss, last=index == len(parts) - 1)
        clipped = torch.zeros_like(mask) if per_token.clipped is None else per_token.clipped
        sums.append(
            CriticSums(
                vf_loss=loss.detach().double(),
                tokens=mask.sum().double(),
                values=torch.where(mask, values.detach(), 0.0).sum().double(),
                clipped=clipped.sum().double(),
            )
        )
    merged: CriticSums[float] = ranks.to_host(CriticSums.merged(sums))
    return merged
