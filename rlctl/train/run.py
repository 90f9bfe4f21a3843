"""`Run`: the parts of a run in one record that the loop and its helpers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.train.history import History
from rlctl.train.models import Models

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rlctl.algos.kl import KLController
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.ranks import Ranks
    from rlctl.environment.build import EpisodeSource
    from rlctl.reward.build import Reward
    from rlctl.rollout.protocol import Sampling
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.track.rollouts import RolloutWriter
    from rlctl.track.tracker import Tracker
    from rlctl.train.settings import EstimatorSettings
    from rlctl.train.stop import StopRequest
    from rlctl.train.stream import PromptDraws, RolloutStream


@dataclass
class Run(Models):
    """All parts of a run, built by `rlctl.train.setup`."""

    spec: RunSpec
    run_dir: Path
    ranks: Ranks
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    episodes: EpisodeSource  # makes episodes with the engine
    stop: StopRequest
    sampling: Sampling  # of the training responses
    estimator: EstimatorSettings
    kl: KLController  # controls the KL penalty in the reward, for the next batch
    total_steps: int
    stream: RolloutStream = field(init=False)
    reward: Reward = field(init=False)
    tracker: Tracker = field(init=False)
    rollout_writer: RolloutWriter | None = None  # rank 0 only
    start_step: int = 0
    draws: PromptDraws | None = None  # with `algorithm.filter_groups`
    policy_version: int = 0  # optimizer updates so far, withheld ones excluded
    stopped_because: str = ""  # the guardrails' reason to end the run early
    ended_early: str = ""  # why `trainer.early_stop` ended the run; on the main rank
    history: History = field(default_factory=History)  # of logged steps; rank 0 only
    callbacks: list[Callable[[int, Mapping[str, float]], None]] = field(default_factory=list)
