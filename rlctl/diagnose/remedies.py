"""Spec changes that more than one rule proposes. Each is one or more `key=value`, space separated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlctl.diagnose.finding import Remedy
from rlctl.diagnose.table import RunLog

if TYPE_CHECKING:
    from rlctl.spec.run import RunSpec

RC = "algorithm.rollout_correction."


def change(arguments: str) -> Remedy:
    """Settings, space separated."""
    return Remedy(tuple(arguments.split()))


def on(run: RunLog, remedy: str, *, when: Callable[[RunSpec], bool]) -> tuple[Remedy, ...]:
    """The remedy, if the run's spec is known and calls for it."""
    return (change(remedy),) if run.spec is not None and when(run.spec) else ()


def gentler(run: RunLog) -> tuple[Remedy, ...]:
    """Let the policy move less between sampling and the last update on a batch."""
    if run.spec is None:
        return ()
    fewer = on(run, "actor.ppo_epochs=1", when=lambda spec: spec.actor.ppo_epochs > 1)
    fewer += on(
        run,
        "actor.ppo_mini_batch_size=null",
        when=lambda spec: spec.ppo_mini_batch_size < spec.data.train_batch_size,
    )
    return (*fewer, change(f"actor.lr={run.spec.actor.lr / 2:g}"))
