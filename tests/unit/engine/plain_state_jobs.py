"""States that were changed to run code, loaded by an engine."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from tests.hooks import python_is
from tests.hostile_files import poison
from tests.unit.engine.engine_jobs import engine, take_step


def refused(ranks: Ranks, stage: int, dtype: str, root: str) -> dict[str, str]:
    """File of a saved state → the error when it is loaded with a payload in it; the intact state loads."""
    actor = engine(ranks, stage, dtype)
    take_step(actor, 1, 4)
    directory = Path(root) / f"{stage}-{dtype}" / "checkpoints" / "step_000001" / "engine"
    directory.mkdir(parents=True)
    actor.save(directory)
    actor.load(directory)
    errors = {}
    for file in sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".py"):
        intact, marker = file.read_bytes(), Path(root) / "executed"
        poison(file, marker)
        try:
            actor.load(directory)
        except RunFailure as error:
            errors[file.name] = error.what
        assert not marker.exists(), file
        file.write_bytes(intact)
    return errors


def converted(ranks: Ranks, root: str, python: str) -> str:
    """The error when a state of two ranks with a payload in it is converted for this one."""
    python_is(python)
    actor = engine(ranks, 2)
    take_step(actor, 1, 4)
    directory = Path(root) / "converted" / "checkpoints" / "step_000001" / "engine"
    directory.mkdir(parents=True)
    actor.save(directory)
    [own] = directory.glob("engine/*_optim_states.pt")
    second = own.with_name(own.name.replace("rank_0", "rank_1"))
    shutil.copy(own, second)
    marker = Path(root) / "executed"
    poison(second, marker)
    try:
        actor.load(directory)
    except RunFailure as error:
        assert not marker.exists()
        return error.what
    return ""


def kept(ranks: Ranks, stage: int, dtype: str, updates: int, forget_after: int, root: str) -> None:
    """A run directory with a checkpoint after so many updates, of which the optimizer forgets the first."""
    actor = engine(ranks, stage, dtype)
    for update in range(1, updates + 1):
        take_step(actor, update, 8)
        if update == forget_after:
            actor._optimizer.state.clear()
    checkpoints = Path(root) / CHECKPOINTS
    partial = begin(checkpoints, updates)
    actor.save(partial / "engine")
    publish(checkpoints, partial, TrainerState(updates, updates, 1), keep=None)
