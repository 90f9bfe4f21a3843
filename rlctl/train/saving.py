"""When a checkpoint is due: engine state, Hugging Face export, metrics flushed, all or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.engine.checkpoint import ADAPTER, CHECKPOINTS, TrainerState, begin, partial_path, publish, writing

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks
    from rlctl.track.rollouts import RolloutWriter
    from rlctl.train.run import Run


@dataclass(frozen=True, slots=True)
class Saver:
    """Writes checkpoints of one run under `<run_dir>/checkpoints`."""

    run_dir: Path
    ranks: Ranks
    tokenizer: Any
    rollout_writer: RolloutWriter | None
    zero_stage: int
    keep: int | None

    def save(self, run: Run, step: int) -> None:
        """Save the state of `run` after `step` (called on all ranks).

        Raises:
            RunFailure: it could not be written; earlier checkpoints are intact.
        """
        root = self.run_dir / CHECKPOINTS
        run.stream.drain()
        if self.rollout_writer:  # what a resume will not repeat must be on disk
            self.rollout_writer.flush()
        if self.ranks.is_main:
            with writing(root, step):
                begin(root, step)
        self.ranks.barrier()
        partial = partial_path(root, step)
        with writing(root, step):
            run.actor.save(partial / "engine")
            run.actor.export(partial / "model")
            if run.spec.model.lora_rank:
                adapter = run.actor.adapter()
                if self.ranks.is_main:
                    adapter.save(partial / ADAPTER)
            if run.critic:
                run.critic.save(partial / "critic")
            run.stream.save(partial / "waiting", self.ranks.rank)
        self.ranks.barrier()
        if self.ranks.is_main:
            with writing(root, step):
                self.tokenizer.save_pretrained(partial / "model")
            kl_coef = run.kl.kl_coef if run.spec.algorithm.use_kl_in_reward else None
            state = TrainerState(step, run.policy_version, self.ranks.world_size, self.zero_stage, kl_coef)
            publish(root, partial, state, keep=self.keep)
        self.ranks.barrier()
