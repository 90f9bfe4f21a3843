"""Small dumps as a run writes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from rlctl.what_if.dumps import Step
from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff
from tests.dumps import dumped, write


def make_step(seed: int = 0, groups: int = 12, size: int = 4, longest: int = 9, scale: float = 0.4) -> Step:
    """Ragged groups, siblings not adjacent, with an empty response."""
    rng = np.random.default_rng(seed)
    count = groups * size
    lengths = rng.integers(1, longest + 1, count)
    lengths[1] = 0
    total = int(lengths.sum())
    log_probs = -rng.exponential(0.8, total) - 0.01
    rollout = np.minimum(log_probs + rng.normal(0, scale, total), -1e-3)
    return Step(
        number=1 + seed,
        group_ids=rng.permutation(np.arange(groups).repeat(size)),
        rewards=rng.integers(0, 2, count).astype(np.float64),
        lengths=lengths,
        rollout_log_probs=rollout.astype(np.float32),
        log_probs=log_probs.astype(np.float32),
    )


def write_part(directory: Path, steps: list[Step]) -> Path:
    """The steps as one part of a run's `rollouts/`."""
    rows = []
    for step in steps:
        ends = np.cumsum(step.lengths)
        for row, (length, end) in enumerate(zip(step.lengths, ends, strict=True)):
            place = slice(int(end - length), int(end))
            both = step.rollout_log_probs[place].tolist(), step.log_probs[place].tolist()
            reward = None if math.isnan(step.rewards[row]) else float(step.rewards[row])
            given = {"group_id": int(step.group_ids[row]), "member": row, "reward": reward}
            rows.append(dumped([7] * int(length), *both, prompt_ids=[1, 2], step=step.number, **given))
    path = directory / "rollouts" / f"rollouts-{steps[0].number:06d}-{steps[-1].number:06d}.parquet"
    return write(path, rows, row_group_size=7)


def same(one: Step, other: Step) -> bool:
    """Equal in all that a dump has."""
    names = ("group_ids", "rewards", "lengths", "rollout_log_probs", "log_probs")
    return one.number == other.number and all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name in names[1:])
        for name in names
    )


def outcome_of(found: Tradeoff, name: str) -> SettingOutcome:
    """The outcome with this name, among the names of settings with identical results."""
    return {name: one for one in found.outcomes for name in (one.setting.name, *one.same_as)}[name]
