"""How many updates the optimizer's state in a run's newest checkpoint remembers.

Adam's moments are averages over past updates, and its state counts them. A state that is lost, by a rebuilt
optimizer or a resume without it, counts anew.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.diagnose.table import OptimizerState

_STATES = "engine/**/*.pt"


def optimizer_state(run_dir: Path) -> OptimizerState | None:
    """That of the newest intact checkpoint; None without one, or where its format shows no count."""
    import torch

    from rlctl.engine.checkpoint import verify
    from rlctl.track.open_run import RunRecord

    for path in reversed(RunRecord(run_dir).checkpoints):
        checkpoint = verify(path)[1]
        if checkpoint is None:
            continue
        counts: list[float] = []
        for file in sorted(one for one in path.glob(_STATES) if one.is_file()):
            try:
                counts += _counts(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
            except (pickle.UnpicklingError, RuntimeError, OSError, RecursionError):  # not plain data
                return None
        if not counts:
            return None
        state = checkpoint.state
        return OptimizerState(step=state.step, remembered=int(max(counts)), made=state.policy_version)
    return None


def _counts(content: Any) -> Iterator[float]:
    """Updates that each part of an optimizer's state has counted; 0 for one without moments."""
    if isinstance(content, list | tuple):
        for part in content:
            yield from _counts(part)
    if not isinstance(content, dict):
        return
    if "betas" in content or "exp_avg" in content:  # a group of parameters; some optimizers count here
        yield float(content.get("step", 0.0))
    else:
        for part in content.values():
            yield from _counts(part)
