"""Builds a run from its spec: models, data, reward, tracker."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.engine.ranks import Ranks, network_notes
from rlctl.environment.build import EpisodeSource
from rlctl.model_files import model_directory
from rlctl.prepare.findings import placeholder_notes
from rlctl.prepare.hub import local_files
from rlctl.reward.build import build_reward
from rlctl.spec.run_spec import RunSpec
from rlctl.tiny.game import embedded_task
from rlctl.track.console import Startup
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.run_dir import note_in_environment
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import Tracker, build_tracker
from rlctl.train.models import Models, build_models
from rlctl.train.preflight import check_rows, num_batches
from rlctl.train.run import Run, is_sync_due
from rlctl.train.saving import Restored, past_metrics, restore
from rlctl.train.score_batch import kl_controller
from rlctl.train.stop import StopRequest, Watchdog
from rlctl.train.stream import PromptDraws, RolloutStream, places_of, sample_groups
from rlctl.train.sync import check_first_sync


def build(
    spec: RunSpec,
    run_dir: Path,
    ranks: Ranks,
    stop: StopRequest,
    startup: Startup,
    watchdog: Watchdog,
    stack: contextlib.ExitStack,
    *,
    resume: bool,
) -> Run:
    """Builds the run on this rank and shows the progress; closing `stack` closes its resources.

    Raises:
        UsageError, EnvironmentFailure, RunFailure: model, data or checkpoint cannot be used.
    """
    torch.manual_seed(spec.trainer.seed)
    model_path, train_files, val_files = _sources(spec, ranks)
    startup.phase(f"loading {spec.model.path} and starting the engines")
    models = build_models(spec, model_path, ranks, run_dir, stack)
    tokenizer = models.tokenizer
    startup.phase("reading the prompts")
    train_prompts = _prompts(train_files, tokenizer, spec)
    val_prompts = _prompts(val_files, tokenizer, spec) if val_files else None
    prompts = {"data.train_files": train_prompts, "data.val_files": val_prompts}
    changes = check_rows(spec, prompts, run_dir, ranks)
    train_prompts.check_batch_size(spec.data.train_batch_size)
    total_steps = num_batches(spec, len(train_prompts))
    episodes = stack.enter_context(contextlib.closing(EpisodeSource.of(spec, tokenizer)))
    episodes.check(task for each in filter(None, prompts.values()) for task in each.all_tasks())
    stream = _stream(spec, ranks, train_prompts, models, episodes, total_steps, stack)
    if resume:
        restored = restore(spec, models, stream, run_dir, ranks)
    else:
        draws = PromptDraws() if spec.algorithm.filter_groups.enable else None
        restored = Restored(0, 0, None, [], draws)
        if spec.model.lora_adapter_path or not spec.rollout_engine.starts_with_policy:
            models.rollout.sync_weights(models.actor, policy_version=0)
    if ranks.is_main:
        note_in_environment(run_dir, rollout_engine=models.rollout.description, total_steps=total_steps)

    writer = None
    if ranks.is_main and (per_step := spec.trainer.rollouts_per_step):
        writer = RolloutWriter(run_dir, per_step, exact_sampling=spec.rollout.exact_sampling)
        if resume:
            restored.notes.extend(writer.discard_after(restored.step))
    kl = kl_controller(spec.algorithm)
    startup.phase("starting the graders")
    reward = build_reward(
        spec.reward,
        max_response_length=spec.data.max_response_length,
        device=ranks.device,
        tokenizer=tokenizer,
    )
    stack.callback(reward.close)
    startup.stop()  # the live display follows
    tracker = stack.enter_context(_tracker(spec, run_dir, ranks, stop, watchdog, total_steps, restored.step))
    if writer:
        stack.callback(writer.flush)
    notes = [*restored.notes, *changes, *network_notes()]
    if count := train_prompts.num_dropped:
        limit = f"data.max_prompt_length = {spec.data.max_prompt_length}"
        notes.append(f"training prompts of more than {limit} tokens are excluded: {count:,}")
    if {term.name for term in spec.reward.all_terms} & {"auto", "maths"}:
        notes += placeholder_notes({key: each.rows for key, each in prompts.items() if each})
    for note in [*notes, *models.notes, *models.rollout.notes]:
        tracker.note(note)
    run = Run(
        **vars(models),
        spec=spec,
        run_dir=run_dir,
        ranks=ranks,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        episodes=episodes,
        reward=reward,
        stream=stream,
        tracker=tracker,
        rollout_writer=writer,
        stop=stop,
        kl=kl if restored.kl_coef is None else replace(kl, kl_coef=restored.kl_coef),
        total_steps=total_steps,
        start_step=restored.step,
        draws=restored.draws,
        policy_version=restored.policy_version,
        history=past_metrics(run_dir) if resume else [],
    )
    if resume and not is_sync_due(run, run.start_step):
        note = "the run stopped between two weight syncs: the next responses are sampled with newer weights"
        tracker.note(f"warning: {note} than without the interruption")
    check_first_sync(run)
    return run


def _stream(
    spec: RunSpec,
    ranks: Ranks,
    prompts: PromptDataset,
    models: Models,
    episodes: EpisodeSource,
    total_steps: int,
    stack: contextlib.ExitStack,
) -> RolloutStream:
    """Groups sampled in this thread or, with `rollout.max_staleness`, in others during training."""
    rollout = spec.rollout
    source = models.sampling_ahead if rollout.max_staleness else models.rollout
    sample = partial(sample_groups, spec, ranks, prompts, source, episodes)
    ahead, executor = spec.batches_ahead, None
    places = places_of(spec, ranks) if rollout.in_flight else None

    def enter() -> None:
        if ranks.device.type == "cuda":  # a new thread starts on GPU 0, not on the GPU of this rank
            torch.cuda.set_device(ranks.device)

    if rollout.max_staleness:
        threads = (1 + ahead) * len(places) if places else 1
        executor = ThreadPoolExecutor(threads, thread_name_prefix="rollouts", initializer=enter)
        stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        if rollout.in_flight:  # before that: open groups end, and are sampled again in a resumed run
            stack.callback(models.sampling_ahead.close)
    in_order = not rollout.in_flight or rollout.paces
    return RolloutStream(
        sample, ahead=ahead, last_step=total_steps, executor=executor, places=places, in_order=in_order
    )


def _sources(spec: RunSpec, ranks: Ranks) -> tuple[str, list[str], list[str]]:
    """Model directory, training files, validation files; downloads or builds what is missing."""
    if not spec.is_embedded:
        if ranks.is_main:
            model_directory(spec.model.path)
            _files(spec)
        ranks.barrier()
        return model_directory(spec.model.path), *_files(spec)
    if ranks.is_main:
        embedded_task(spec)
    ranks.barrier()
    task = embedded_task(spec)
    train_files = spec.data.train_files or [str(task.train_file)]
    return str(task.model_dir), train_files, spec.data.val_files or [str(task.val_file)]


def _files(spec: RunSpec) -> tuple[list[str], list[str]]:
    """Training and validation files, those of the hub's data sets included."""
    return local_files(spec.data.train_files, split="train"), local_files(spec.data.val_files, split="test")


def _prompts(files: list[str], tokenizer: Any, spec: RunSpec) -> PromptDataset:
    return PromptDataset(
        load_rows(files, continue_final_message=spec.data.continue_final_message),
        tokenizer,
        max_prompt_length=spec.data.max_prompt_length,
        filter_overlong=spec.data.filter_overlong_prompts,
        chat_template_kwargs=spec.data.chat_template_kwargs,
    )


def _tracker(
    spec: RunSpec,
    run_dir: Path,
    ranks: Ranks,
    stop: StopRequest,
    watchdog: Watchdog,
    total_steps: int,
    start_step: int,
) -> Tracker:
    watchdog.log(start_step, {})
    if not ranks.is_main:
        return Tracker(extras=[watchdog])
    inputs = SinkInputs(
        run_dir,
        spec.trainer.project_name,
        spec.trainer.experiment_name,
        spec.model_dump(mode="json"),
        total_steps,
        start_step,
        is_stopping=lambda: stop.signal_number is not None,
    )
    tracker = build_tracker(spec.trainer.logger, inputs)
    tracker.add(watchdog)
    watchdog.show = tracker.note
    stop.is_shown = tracker.has_panel
    return tracker
