"""Builds a run from its spec: models, data, reward, tracker."""

from __future__ import annotations

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.engine.ranks import Ranks, network_notes
from rlctl.environment.build import EpisodeSource
from rlctl.prepare.findings import placeholder_notes
from rlctl.reward.build import build_reward
from rlctl.spec.run_spec import RunSpec
from rlctl.track.console import Startup
from rlctl.track.open_run import RunRecord
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.run_dir import note_in_environment
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import Tracker, build_tracker
from rlctl.train.models import build_models
from rlctl.train.preflight import local_sources, num_batches
from rlctl.train.resume import check_rows
from rlctl.train.run import Run, is_sync_due
from rlctl.train.sample_and_grade import sample_groups
from rlctl.train.saving import restore
from rlctl.train.score_batch import kl_controller
from rlctl.train.stop import StopRequest, Watchdog
from rlctl.train.stream import PromptDraws, RolloutStream, places_of
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
    model_path, train_files, val_files = local_sources(spec)
    startup.phase(f"loading {spec.model.path} and starting the engines")
    models = build_models(spec, model_path, ranks, run_dir, stack)
    startup.phase("reading the prompts")
    train_prompts = _prompts(train_files, models.tokenizer, spec)
    val_prompts = _prompts(val_files, models.tokenizer, spec) if val_files else None
    prompts = {"data.train_files": train_prompts, "data.val_files": val_prompts}
    changes = check_rows(spec, prompts, run_dir, ranks)
    train_prompts.check_batch_size(spec.data.train_batch_size)
    episodes = stack.enter_context(contextlib.closing(EpisodeSource.of(spec, models.tokenizer)))
    run = Run(
        **vars(models),
        spec=spec,
        run_dir=run_dir,
        ranks=ranks,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        episodes=episodes,
        stop=stop,
        kl=kl_controller(spec.algorithm),
        total_steps=num_batches(spec, len(train_prompts)),
        draws=PromptDraws() if spec.algorithm.filter_groups.enable else None,
    )
    episodes.check(task for each in filter(None, prompts.values()) for task in each.all_tasks())
    run.stream = _stream(run, stack)
    notes = restore(run) if resume else []
    if not resume and (spec.model.lora_adapter_path or not spec.rollout_engine.starts_with_policy):
        run.rollout.sync_weights(run.actor, policy_version=0)
    if ranks.is_main:
        note_in_environment(run_dir, rollout_engine=run.rollout.description, total_steps=run.total_steps)
    if ranks.is_main and (per_step := spec.trainer.rollouts_per_step):
        writer = RolloutWriter(run_dir, per_step, exact_sampling=spec.rollout.exact_sampling)
        notes += writer.discard_after(run.start_step) if resume else []
        run.rollout_writer = writer
    startup.phase("starting the graders")
    run.reward = build_reward(
        spec.reward,
        max_response_length=spec.data.max_response_length,
        device=ranks.device,
        tokenizer=run.tokenizer,
    )
    stack.callback(run.reward.close)
    startup.stop()  # the live display follows
    run.tracker = stack.enter_context(_tracker(run, watchdog))
    if resume and ranks.is_main:  # without steps that the tracker has removed
        rows = RunRecord(run_dir).rows()
        run.history = [
            {key: float(value) for key, value in row.items() if key != "timestamp"} for row in rows
        ]
    if run.rollout_writer:
        stack.callback(run.rollout_writer.flush)
    notes += [*changes, *network_notes()]
    if count := train_prompts.num_dropped:
        limit = f"data.max_prompt_length = {spec.data.max_prompt_length}"
        notes.append(f"training prompts of more than {limit} tokens are excluded: {count:,}")
    if {term.name for term in spec.reward.all_terms} & {"auto", "maths"}:
        notes += placeholder_notes({key: each.rows for key, each in prompts.items() if each})
    for note in [*notes, *run.notes, *run.rollout.notes]:
        run.tracker.note(note)
    if resume and not is_sync_due(run, run.start_step):
        note = "the run stopped between two weight syncs: the next responses are sampled with newer weights"
        run.tracker.note(f"warning: {note} than without the interruption")
    check_first_sync(run)
    gc.collect()
    gc.freeze()  # else every search for cycles visits a million objects of libraries, 60 ms
    stack.callback(gc.unfreeze)
    return run


def _stream(run: Run, stack: contextlib.ExitStack) -> RolloutStream:
    """Groups sampled in this thread or, with `rollout.max_staleness`, in others during training."""
    spec, rollout, ranks = run.spec, run.spec.rollout, run.ranks
    places = places_of(spec, ranks) if rollout.in_flight else None
    executor = None
    if rollout.max_staleness:
        threads = (1 + spec.batches_ahead) * len(places) if places else 1
        # A new thread starts on GPU 0, not on the GPU of this rank.
        enter = partial(torch.cuda.set_device, ranks.device) if ranks.device.type == "cuda" else None
        executor = ThreadPoolExecutor(threads, thread_name_prefix="rollouts", initializer=enter)
        stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        if rollout.in_flight:  # before that: open groups end, and are sampled again in a resumed run
            stack.callback(run.sampling_ahead.close)
    return RolloutStream(
        partial(sample_groups, run),
        ahead=spec.batches_ahead,
        last_step=run.total_steps,
        executor=executor,
        places=places,
        in_order=not rollout.in_flight or rollout.paces,
    )


def _prompts(files: list[str], tokenizer: Any, spec: RunSpec) -> PromptDataset:
    return PromptDataset(
        load_rows(files, continue_final_message=spec.data.continue_final_message),
        tokenizer,
        max_prompt_length=spec.data.max_prompt_length,
        filter_overlong=spec.data.filter_overlong_prompts,
        chat_template_kwargs=spec.data.chat_template_kwargs,
    )


def _tracker(run: Run, watchdog: Watchdog) -> Tracker:
    trainer, stop = run.spec.trainer, run.stop
    watchdog.log(run.start_step, {})
    if not run.ranks.is_main:
        return Tracker(extras=[watchdog])
    inputs = SinkInputs(
        run.run_dir,
        trainer.project_name,
        trainer.experiment_name,
        run.spec.model_dump(mode="json"),
        run.total_steps,
        run.start_step,
        is_stopping=lambda: stop.signal_number > 0,
    )
    tracker = build_tracker(trainer.logger, inputs)
    tracker.add(watchdog)
    watchdog.show = tracker.note
    stop.is_shown = tracker.has_panel
    return tracker
