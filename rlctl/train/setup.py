"""From a spec to everything a run is made of: policy, engine, data, reward, tracker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.engine.checkpoint import CHECKPOINTS, latest
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.model import load_policy
from rlctl.engine.ranks import Ranks
from rlctl.errors import UsageError
from rlctl.reward.build import build_reward
from rlctl.rollout.hf import HFRollout
from rlctl.spec.run import RunSpec
from rlctl.tiny.embedded import ensure_embedded
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.tracker import Tracker, build_tracker
from rlctl.train.run import Run
from rlctl.train.saving import Saver
from rlctl.train.stop import StopRequest
from rlctl.train.summary import past_metrics

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextlib.contextmanager
def building(spec: RunSpec, run_dir: Path, ranks: Ranks, stop: StopRequest, *, resume: bool) -> Iterator[Run]:
    """Build the run on this rank; leaving closes what needs closing.

    Raises:
        UsageError, EnvironmentFailure, RunFailure: model, data or checkpoint cannot be used.
    """
    torch.manual_seed(spec.trainer.seed)
    model_path, train_files, val_files = _sources(spec, ranks)
    dtype = _DTYPES[spec.engine.dtype]
    model, tokenizer = load_policy(
        model_path,
        revision=spec.model.revision,
        trust_remote_code=spec.model.trust_remote_code,
        attn_implementation=spec.model.attn_implementation,
        dtype=dtype,
    )
    _check_context(model, spec)
    train_prompts = _prompts(train_files, tokenizer, spec)
    val_prompts = _prompts(val_files, tokenizer, spec) if val_files else None
    total_steps = _total_steps(spec, train_prompts)

    rollout = HFRollout(model, tokenizer, ranks.device, max_num_seqs=spec.rollout.max_num_seqs)
    actor = DeepSpeedEngine(
        model,
        ranks,
        zero_stage=spec.engine.zero_stage,
        dtype=dtype,
        temperature=spec.rollout.temperature,
        weight_decay=spec.actor.weight_decay,
        betas=spec.actor.betas,
        grad_clip=spec.actor.grad_clip,
    )
    reward = build_reward(spec.reward.name, spec.reward.max_error_fraction)
    start_step, policy_version, notes = _restore(actor, rollout, run_dir, ranks) if resume else (0, 0, [])

    writes_rollouts = ranks.is_main and spec.trainer.rollouts_per_step != 0
    writer = RolloutWriter(run_dir, spec.trainer.rollouts_per_step) if writes_rollouts else None
    if writer and resume:
        writer.discard_after(start_step)
    saver = Saver(run_dir, ranks, tokenizer, writer, actor.zero_stage, spec.trainer.max_ckpt_to_keep)
    with contextlib.ExitStack() as stack:
        stack.callback(getattr(reward, "close", lambda: None))
        tracker = stack.enter_context(_tracker(spec, run_dir, ranks, total_steps, start_step))
        if writer:
            stack.callback(writer.flush)
        for note in [*notes, *_dropped(train_prompts, spec)]:
            tracker.note(note)
        yield Run(
            spec=spec,
            ranks=ranks,
            train_prompts=train_prompts,
            val_prompts=val_prompts,
            rollout=rollout,
            reward=reward,
            actor=actor,
            tracker=tracker,
            rollout_writer=writer,
            saver=saver,
            stop=stop,
            total_steps=total_steps,
            start_step=start_step,
            policy_version=policy_version,
            history=past_metrics(run_dir) if resume else [],
        )


def _sources(spec: RunSpec, ranks: Ranks) -> tuple[str, list[str], list[str]]:
    """Model directory, training files, validation files; the embedded ones are built if need be."""
    if not spec.is_embedded:
        return spec.model.path, spec.data.train_files, spec.data.val_files
    if ranks.is_main:
        ensure_embedded(spec.trainer.seed)
    ranks.barrier()
    task = ensure_embedded(spec.trainer.seed)
    train_files = spec.data.train_files or [str(task.train_file)]
    return str(task.model_dir), train_files, spec.data.val_files or [str(task.val_file)]


def _prompts(files: list[str], tokenizer: Any, spec: RunSpec) -> PromptDataset:
    return PromptDataset(
        load_rows(files),
        tokenizer,
        max_prompt_length=spec.data.max_prompt_length,
        filter_overlong=spec.data.filter_overlong_prompts,
    )


def _dropped(prompts: PromptDataset, spec: RunSpec) -> list[str]:
    if not prompts.num_dropped:
        return []
    return [
        f"{prompts.num_dropped} training prompts have more than data.max_prompt_length = "
        f"{spec.data.max_prompt_length} tokens and are left out"
    ]


def _check_context(model: Any, spec: RunSpec) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    wanted = spec.data.max_prompt_length + spec.data.max_response_length
    if context is not None and wanted > context:
        raise UsageError(
            f"prompt and response may have {wanted} tokens together, the model's context is {context}",
            where="data.max_prompt_length, data.max_response_length",
            fix=f"make their sum {context} or less",
        )


def _total_steps(spec: RunSpec, prompts: PromptDataset) -> int:
    per_epoch = prompts.steps_per_epoch(spec.data.train_batch_size)
    return spec.trainer.total_training_steps or per_epoch * spec.trainer.total_epochs


def _restore(
    actor: DeepSpeedEngine, rollout: HFRollout, run_dir: Path, ranks: Ranks
) -> tuple[int, int, list[str]]:
    """Load the newest sound checkpoint; step, policy version, and what the user should know."""
    notes: list[str] = []
    if ranks.is_main:  # sets damaged ones aside, so that the others see what it saw
        _, notes = latest(run_dir / CHECKPOINTS)
    ranks.barrier()
    checkpoint, _ = latest(run_dir / CHECKPOINTS)
    if checkpoint is None:
        raise UsageError(
            "there is no complete checkpoint to resume from",
            where=str(run_dir / CHECKPOINTS),
            fix="start the run anew in another directory",
        )
    state = checkpoint.state
    if state.world_size != ranks.world_size and max(state.zero_stage, actor.zero_stage) > 0:
        raise UsageError(
            f"the checkpoint is cut up for {state.world_size} ranks, this run has {ranks.world_size}",
            where=str(checkpoint.path),
            fix=f"resume with trainer.n_gpus_per_node={state.world_size}",
        )
    actor.load(checkpoint.engine_dir)
    rollout.sync_weights(actor.weights(), policy_version=state.policy_version)
    return state.step, state.policy_version, [*notes, f"resuming after step {state.step}"]


def _tracker(spec: RunSpec, run_dir: Path, ranks: Ranks, total_steps: int, start_step: int) -> Tracker:
    if not ranks.is_main:
        return Tracker()
    return build_tracker(
        run_dir,
        spec.trainer.logger,
        spec.trainer.project_name,
        spec.trainer.experiment_name,
        spec.model_dump(mode="json"),
        total_steps,
        start_step,
    )
