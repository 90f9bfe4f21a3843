"""Checkpoints of a run: engine state, Hugging Face export, metrics flushed, all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.engine.checkpoint import ADAPTER, CHECKPOINTS, TrainerState, begin, partial_path, publish, writing

if TYPE_CHECKING:
    from rlctl.train.run import Run


def save_checkpoint(run: Run, step: int) -> None:
    """Save the state of `run` after `step` under `<run_dir>/checkpoints` (called on all ranks).

    Raises:
        RunFailure: it could not be written; earlier checkpoints are intact.
    """
    ranks = run.ranks
    root = run.run_dir / CHECKPOINTS
    run.stream.drain()
    if run.rollout_writer:  # what a resume will not repeat must be on disk
        run.rollout_writer.flush()
    if ranks.is_main:
        with writing(root, step):
            begin(root, step)
    ranks.barrier()
    partial = partial_path(root, step)
    with writing(root, step):
        run.actor.save(partial / "engine")
        run.actor.export(partial / "model")
        if run.spec.model.lora_rank:
            adapter = run.actor.adapter()
            if ranks.is_main:
                adapter.save(partial / ADAPTER)
        if run.critic:
            run.critic.save(partial / "critic")
        run.stream.save(partial / "waiting", ranks.rank)
    ranks.barrier()
    if ranks.is_main:
        with writing(root, step):
            run.tokenizer.save_pretrained(partial / "model")
        kl_coef = run.kl.kl_coef if run.spec.algorithm.use_kl_in_reward else None
        state = TrainerState(step, run.policy_version, ranks.world_size, run.actor.zero_stage, kl_coef)
        publish(root, partial, state, keep=run.spec.trainer.max_ckpt_to_keep)
    ranks.barrier()
