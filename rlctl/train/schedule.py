"""Learning rate as a function of the optimizer step, without state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

from rlctl.spec.run_spec import RunSpec


def planned_updates(spec: RunSpec, step: int) -> int:
    """Planned optimizer updates of the policy before a step, withheld ones included."""
    return max(step - 1 - spec.trainer.critic_warmup, 0) * spec.updates_per_batch


def actor_schedule(spec: RunSpec, total_steps: int) -> Callable[[int], float]:
    """Learning rate of the policy by number of the planned update (none while a critic warms up)."""
    batches = total_steps - spec.trainer.critic_warmup
    actor = spec.actor
    return partial(
        lr_at,
        total_updates=batches * spec.updates_per_batch,
        peak=actor.lr,
        warmup=actor.lr_warmup_steps,
        kind=actor.lr_scheduler_type,
    )


def critic_schedule(spec: RunSpec, total_steps: int) -> Callable[[int], float]:
    """Learning rate of the critic by number of its update, with the actor's type of schedule."""
    critic = spec.critic
    return partial(
        lr_at,
        total_updates=total_steps * spec.critic_updates_per_batch,
        peak=critic.lr,
        warmup=critic.lr_warmup_steps,
        kind=spec.actor.lr_scheduler_type,
    )


def lr_at(
    update: int,
    total_updates: int,
    *,
    peak: float,
    warmup: int,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Learning rate of optimizer update number `update` (from 0).

    Linear warm-up over the first `warmup` updates, reaching `peak` on the last of them; then constant,
    or decay to 0 at `total_updates`.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def is_sync_due(spec: RunSpec, step: int) -> bool:
    """Whether the rollout engine gets new weights after `step`."""
    # Also with every save, because a resumed run samples with the saved weights.
    return is_due(step, spec.rollout.sync_every) or is_due(step, spec.trainer.save_freq)


def is_due(step: int, frequency: int) -> bool:
    """Whether `step` is a multiple of `frequency`; never for 0 or -1."""
    return frequency > 0 and step % frequency == 0
