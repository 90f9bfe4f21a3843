"""Everything a run is made of, in one record that the loop and its helpers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.protocol import TrainEngine
    from rlctl.engine.ranks import Ranks
    from rlctl.reward.protocol import Reward
    from rlctl.rollout.protocol import RolloutEngine
    from rlctl.spec.run import RunSpec
    from rlctl.track.rollouts import RolloutWriter
    from rlctl.track.tracker import Tracker
    from rlctl.train.saving import Saver
    from rlctl.train.stop import StopRequest


@dataclass
class Run:
    """Everything a run is made of, as `rlctl.train.setup` builds it."""

    spec: RunSpec
    ranks: Ranks
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    rollout: RolloutEngine
    reward: Reward
    actor: TrainEngine
    tracker: Tracker
    rollout_writer: RolloutWriter | None  # rank 0 only
    saver: Saver
    stop: StopRequest
    total_steps: int
    start_step: int = 0
    policy_version: int = 0  # optimizer updates so far
    history: list[dict[str, float]] = field(default_factory=list)
