"""Registration of checks: a check is a generator of problems, registered with the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlctl.errors import Problem
from rlctl.spec.algorithm import CORRECTION
from rlctl.spec.keys import value_of
from rlctl.spec.run_spec import RunSpec

Problems = Iterator[Problem]
Check = Callable[[RunSpec], Problems]

#: Every check and the keys that it reads. A check is skipped if one of its keys has no valid value.
CHECKS: dict[Check, tuple[str, ...]] = {}

ESTIMATOR = "algorithm.adv_estimator"
LOSS = f"{CORRECTION}loss_type"
BATCH_KEYS = ("data.train_batch_size", "actor.ppo_mini_batch_size")
LEAVE_OUT = "leave it out"


def reads(*keys: str) -> Callable[[Check], Check]:
    """Register a check with the keys that it reads."""

    def register(check: Check) -> Check:
        CHECKS[check] = keys
        return check

    return register


def error(key: str, what: str, fix: str) -> Problem:
    """A problem that stops the run."""
    return Problem("error", key, what, fix)


def warning(key: str, what: str, fix: str) -> Problem:
    """A problem that is reported and does not stop the run."""
    return Problem("warning", key, what, fix)


def is_changed(spec: RunSpec, key: str) -> bool:
    """Whether the value at `key` differs from its default."""
    return bool(value_of(spec, key) != value_of(RunSpec(), key))


def fitting_batch(spec: RunSpec) -> tuple[int, int]:
    """Prompts per batch and per actor mini-batch that divide over the ranks, close to those of the spec."""
    batch, mini, world = spec.data.train_batch_size, spec.ppo_mini_batch_size, spec.world_size
    whole = -(-batch // world) * world
    if not spec.actor.ppo_mini_batch_size:
        return whole, whole
    fits = [size for size in range(world, batch + 1, world) if batch % size == 0]
    return (batch, min(fits, key=lambda size: abs(size - mini))) if fits else (whole, world)
