"""Small dumps as a run writes them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.track.rollouts import SCHEMA
from rlctl.what_if.dumps import Step
from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff


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
        token_ids=rng.integers(0, 1000, total),
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
            reward = step.rewards[row]
            rows.append(
                {
                    "step": step.number,
                    "policy_version": 0,
                    "group_id": int(step.group_ids[row]),
                    "data_source": "",
                    "prompt": "",
                    "response": "",
                    "ground_truth": "",
                    "reward": None if math.isnan(reward) else float(reward),
                    "truncated": False,
                    "response_ids": step.token_ids[place].tolist(),
                    "rollout_log_probs": step.rollout_log_probs[place].tolist(),
                    "training_log_probs": step.log_probs[place].tolist(),
                    "rollout_is_weights": [1.0] * int(length),
                    "keep_mask": [True] * int(length),
                }
            )
    (directory / "rollouts").mkdir(parents=True, exist_ok=True)
    path = directory / "rollouts" / f"rollouts-{steps[0].number:06d}-{steps[-1].number:06d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=7)
    return path


def same(one: Step, other: Step) -> bool:
    """Equal, the mask and advantages included."""
    names = ("group_ids", "rewards", "lengths", "token_ids", "rollout_log_probs", "log_probs")
    return one.number == other.number and all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name in names[1:])
        for name in names
    )


def outcome_of(found: Tradeoff, name: str) -> SettingOutcome:
    """The outcome with this name, among the names of settings with identical results."""
    return {name: one for one in found.outcomes for name in (one.setting.name, *one.same_as)}[name]
