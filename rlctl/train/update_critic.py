"""The critic's optimizer steps on one batch: clipped regression of values to returns, per mini-batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rlctl.algos.estimators import explained_variance
from rlctl.algos.losses import coefficients, value_loss
from rlctl.algos.segments import HostSums, Sums, added, ratio
from rlctl.batch import TokenBatch
from rlctl.engine.protocol import CriticEngine, StepResult
from rlctl.engine.ranks import Ranks
from rlctl.errors import known
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.deal import in_step, inputs_of, mini_batches, output_of


def update_critic(
    batch: TokenBatch,
    critic: CriticEngine,
    ranks: Ranks,
    spec: RunSpec,
    lr_at: Callable[[int], float],
    first_update: int,
) -> dict[str, float]:
    """Takes all optimizer steps of the critic on one batch; returns `critic/*` metrics over all ranks.

    Args:
        batch: this rank's episodes, with `values` and `returns`.
        lr_at: learning rate by the number of the critic's update.
        first_update: number of the first update of this batch.
    """
    batch = batch.with_columns(experts=None)  # those of the policy
    explained = explained_variance(*(ranks.all_gather(batch.column(name)) for name in ("returns", "values")))
    sums: list[HostSums] = []
    steps: list[StepResult] = []
    groups = spec.critic_mini_batch_size
    of_minis = mini_batches(batch, groups, spec.data.train_batch_size // groups)
    for _ in range(spec.critic_epochs):
        for episodes in of_minis:
            lr = lr_at(first_update + len(steps))
            found = _backward(batch.pick(episodes), critic, ranks, spec)
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


def _backward(mini: TokenBatch, critic: CriticEngine, ranks: Ranks, spec: RunSpec) -> HostSums:
    """Accumulates the gradient of one mini-batch; returns its sums over all ranks."""
    mode = spec.critic.loss_agg_mode
    horizon = spec.data.max_response_length
    unit = spec.algorithm.unit
    lengths = mini.units.of(unit).lengths
    counts = ranks.sum([float(lengths.sum()), float((lengths > 0).sum())])
    passes = in_step(mini, spec.critic_micro_batch_size, spec.critic_max_token_len, ranks)
    critic.plan([inputs_of(part) for part in passes])
    sums: list[Sums] = []
    for done, micro in enumerate(passes, start=1):
        values = output_of(critic.values, micro)
        found = value_loss(
            values, micro.column("values"), micro.column("returns"), clip=spec.critic.cliprange_value
        )
        clipped = known(found.clipped)
        every = torch.ones_like(clipped)
        c = coefficients(mode, every, every, micro.units.of(unit), *counts, horizon=horizon)
        loss = (c * found.values).sum()
        critic.backward(loss, last=done == len(passes))
        figures = {
            "vf_loss": loss.detach(),
            "tokens": every.sum(),
            "values": values.detach().sum(),
            "clipped": clipped.sum(),
        }
        sums.append({name: value.double() for name, value in figures.items()})
    return ranks.all_reduce(added(sums))
