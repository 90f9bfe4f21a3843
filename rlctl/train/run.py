"""`Run`: the parts of a run in one record that the training loop and its helpers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlctl.reward.build import refuse_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rlctl.algos.kl import KLController
    from rlctl.data.prompts import PromptDataset
    from rlctl.engine.protocol import CriticEngine, ReferencePolicy, TrainEngine
    from rlctl.engine.ranks import Ranks
    from rlctl.engine.sequence_parallel import SequenceParallel
    from rlctl.reward.build import Reward
    from rlctl.rollout.engine_lock import LockedRollout
    from rlctl.spec.run_spec import RunSpec
    from rlctl.track.rollouts import RolloutWriter
    from rlctl.track.tracker import Tracker
    from rlctl.train.prompt_draws import PromptDraws
    from rlctl.train.stop import StopRequest
    from rlctl.train.stream import RolloutStream


@dataclass
class Run:
    """All parts of a run, built by `rlctl.train.setup`."""

    spec: RunSpec
    run_dir: Path
    ranks: Ranks
    data_ranks: Ranks  # sums over these count each row once
    sequence: SequenceParallel | None  # this rank's sequence-parallel group
    tokenizer: Any  # Hugging Face tokenizer of the policy
    train_prompts: PromptDataset
    val_prompts: PromptDataset | None
    rollout: LockedRollout
    reward: Reward
    actor: TrainEngine
    base: ReferencePolicy | None  # the policy without its adapters; None without LoRA
    ref: ReferencePolicy | None  # only if a KL penalty needs it
    critic: CriticEngine | None  # only if the estimator needs values (`gae`)
    stream: RolloutStream
    tracker: Tracker
    rollout_writer: RolloutWriter | None  # rank 0 only
    stop: StopRequest
    kl: KLController  # controls the KL penalty in the reward, for the next batch
    total_steps: int
    start_step: int = 0
    draws: PromptDraws | None = None  # with `algorithm.filter_groups`
    policy_version: int = 0  # optimizer updates so far, withheld ones excluded
    stopped_because: str = ""  # the guardrails' reason to end the run early
    history: list[dict[str, float]] = field(default_factory=list)
    callbacks: list[Callable[[int, Mapping[str, float]], None]] = field(default_factory=list)


def refuse_ungraded(run: Run, num_failed: float, num_total: float, errors: list[str]) -> None:
    """Ends the run if too many responses could not be graded (a collective).

    Args:
        num_failed, num_total: responses over all ranks.
        errors: this rank's failures.

    Raises:
        RunFailure: see `refuse_errors`.
    """
    limit = run.spec.reward.max_error_fraction
    refuse_errors(num_failed, num_total, lambda: run.ranks.first("".join(errors[:1])), limit)
