"""How many updates the optimizer's state in a run's newest checkpoint remembers.

Adam's moments are averages over past updates, and its state counts them. A state that is lost, by a rebuilt
optimizer or a resume without it, counts anew.
"""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.diagnose.table import OptimizerState

#: Of DeepSpeed; those of FSDP are files `.distcp`.
_STATES = "engine/**/*.pt"
#: What a damaged file, and a state of another form, raise.
_UNREADABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError, RuntimeError, AssertionError),
    *(AttributeError, LookupError, OverflowError, TypeError, ValueError),
)


def optimizer_state(run_dir: Path) -> OptimizerState | None:
    """That of the newest intact checkpoint; None without one, or where it shows no count that can be read."""
    from rlctl.engine.checkpoint import verify
    from rlctl.engine.plain_state import load_plain
    from rlctl.track.open_run import RunRecord

    for path in reversed(RunRecord(run_dir).checkpoints):
        checkpoint = verify(path)[1]
        if checkpoint is None:
            continue
        counts: list[float] = []
        for file in sorted(one for one in path.glob(_STATES) if one.is_file()):
            try:
                counts += _counts(load_plain(file))
            except _UNREADABLE:
                return None
        if not counts:
            return None
        state = checkpoint.state
        return OptimizerState(step=state.step, remembered=int(max(counts)), made=state.policy_version)
    return None


def _counts(content: Any) -> Iterator[float]:
    """Updates that each group of parameters has counted, in the states of optimizers with averages.

    Raises:
        ValueError: a group with a state has no count; besides other errors of `_UNREADABLE`.
    """
    if isinstance(content, list | tuple):
        for part in content:
            yield from _counts(part)
    elif isinstance(content, dict) and "param_groups" in content:
        for group in content["param_groups"]:
            if "betas" in group:
                yield _count(group, [content["state"].get(parameter) for parameter in group["params"]])
    elif isinstance(content, dict):
        for part in content.values():
            yield from _counts(part)


def _count(group: dict[str, Any], states: list[dict[str, Any] | None]) -> float:
    """The count of a group, by itself or by its parameters; 0 without any state, whatever the group says."""
    holders = [group, *(state for state in states if state)]
    if len(holders) == 1:
        return 0.0
    kept = [holder["step"] for holder in holders if "step" in holder]
    counts = [math.nan if isinstance(count, str | bytes) else float(count) for count in kept]
    if not counts or not all(0.0 <= count < math.inf for count in counts):
        raise ValueError("no count of updates")
    return max(counts)
