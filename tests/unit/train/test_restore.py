"""A checkpoint cut up for other ranks is refused with the command that fits it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, publish
from rlctl.engine.ranks import Ranks
from rlctl.errors import UsageError
from rlctl.run_spec.load import load_spec
from rlctl.train.saving import restore as restore_run
from rlctl.train.stream import RolloutStream

ALONE = Ranks(0, 1, torch.device("cpu"))


class Actor(SimpleNamespace):
    def load(self, directory: Path) -> None:
        self.loaded = directory

    def weights(self):
        return iter(())


def restore(root: Path, *, staleness: int = 0):
    checkpoints = root / CHECKPOINTS
    partial = begin(checkpoints, 3)
    (partial / "engine" / "states").write_text("of two ranks")
    publish(checkpoints, partial, TrainerState(3, 6, 2), keep=None)
    rollout = SimpleNamespace(sync_weights=lambda _weights, policy_version: None)
    run = SimpleNamespace(
        actor=Actor(), rollout=rollout, critic=None, draws=None, capabilities=(), run_dir=root
    )
    run.stream, run.ranks = RolloutStream(None, ahead=staleness, last_step=9), ALONE
    run.spec = load_spec([], [], [f"rollout.staleness={staleness}"]).spec
    restore_run(run)
    return run


def test_a_state_of_other_ranks_is_loaded(tmp_path: Path) -> None:
    restored = restore(tmp_path)
    assert (restored.start_step, restored.policy_version) == (3, 6)


def test_batches_sampled_ahead_belong_to_their_ranks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 ranks"):
        restore(tmp_path, staleness=1)
