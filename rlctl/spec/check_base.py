"""The form of a check: a generator of problems, registered with the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlctl.errors import Problem
from rlctl.spec.keys import value_of
from rlctl.spec.run_spec import RunSpec

Problems = Iterator[Problem]
Check = Callable[[RunSpec], Problems]

#: Every check and the keys that it reads. A check is skipped where one of its keys could not be read.
CHECKS: dict[Check, tuple[str, ...]] = {}

CORRECTION = "algorithm.rollout_correction."
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
    """A problem that is shown; the run goes on."""
    return Problem("warning", key, what, fix)


def is_changed(spec: RunSpec, key: str) -> bool:
    """Whether the value at `key` differs from its default."""
    return bool(value_of(spec, key) != value_of(RunSpec(), key))
