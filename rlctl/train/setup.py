"""Builds a run from its spec: models, data, reward, tracker."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.data.mixture import MixedSource
from rlctl.data.prompts import PromptDataset
from rlctl.data.read import load_rows
from rlctl.data.schema import Row
from rlctl.engine.ranks import Ranks, group_notes, network_notes
from rlctl.environment.build import EpisodeSource
from rlctl.prepare.findings import placeholder_notes
from rlctl.prepare.needs import check_needs
from rlctl.reward.build import build_reward
from rlctl.rollout.closed_ports import close_group_ports
from rlctl.rollout.protocol import sampling_of
from rlctl.run_spec.run_spec import RunSpec
from rlctl.track.console import Startup
from rlctl.track.open_run import RunRecord
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.run_dir import note_in_environment
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import Tracker, build_tracker
from rlctl.train.history import History
from rlctl.train.models import build_models, policy_tokenizer
from rlctl.train.preflight import LocalSources, local_sources, num_batches, record_files
from rlctl.train.resume import check_files, check_rows
from rlctl.train.run import Run
from rlctl.train.sample_and_grade import sample_groups
from rlctl.train.saving import restore
from rlctl.train.score_batch import kl_controller
from rlctl.train.settings import EstimatorSettings, is_sync_due
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
    sources = local_sources(spec, run_dir=run_dir)
    startup.phase("reading the prompts")  # before the engines start: a problem of a row is found in seconds
    tokenizer = policy_tokenizer(spec, sources.model_path)
    episodes = stack.enter_context(contextlib.closing(EpisodeSource.of(spec, tokenizer)))
    train_prompts, val_prompts = _prompts(spec, sources, tokenizer, episodes)
    prompts = {"data.train_files": train_prompts, "data.val_files": val_prompts}
    changes = [*check_rows(spec, prompts, run_dir, ranks), *check_files(spec, run_dir, ranks)]
    train_prompts.check_batch_size(spec.data.train_batch_size)
    if ranks.is_main and not resume:
        record_files(run_dir, sources)
    startup.phase(f"loading {spec.model.path} and starting the engines")
    models = build_models(spec, sources.model_path, ranks, run_dir, stack)
    run = Run(
        **vars(models),
        spec=spec,
        run_dir=run_dir,
        ranks=ranks,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        episodes=episodes,
        stop=stop,
        sampling=sampling_of(spec),
        estimator=EstimatorSettings.of(spec.algorithm),
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
        note_in_environment(
            run_dir, rollout_engine=run.rollout.report().description, total_steps=run.total_steps
        )
    if ranks.is_main and (per_step := spec.trainer.rollouts_per_step):
        writer = RolloutWriter(
            run_dir,
            per_step,
            exact_sampling=spec.rollout.exact_sampling,
            columns=[name for capability in run.capabilities for name in capability.dumped],
            decode=run.tokenizer.decode,
        )
        notes += writer.discard_after(run.start_step) if resume else []
        run.rollout_writer = writer
    if ranks.is_main:
        for capability in run.capabilities:
            capability.open_records(run_dir, run.start_step)
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
        run.history = History(
            [{key: float(value) for key, value in row.items() if key != "timestamp"} for row in rows]
        )
    if run.rollout_writer:
        stack.callback(run.rollout_writer.flush)
    notes += [*changes, *network_notes(), *group_notes(spec)]
    count = train_prompts.num_dropped
    if count:
        limit = f"data.max_prompt_length = {spec.data.max_prompt_length}"
        notes.append(f"training prompts of more than {limit} tokens are excluded: {count:,}")
    if {term.name for term in spec.reward.all_terms} & {"auto", "maths"}:
        notes += placeholder_notes({key: each.rows for key, each in prompts.items() if each})
    for note in [*notes, *run.notes, *run.rollout.report().notes]:
        run.tracker.note(note)
    if resume and not is_sync_due(run.spec, run.start_step, run.total_steps):
        note = "the run stopped between two weight syncs: the next responses are sampled with newer weights"
        run.tracker.note(f"warning: {note} than without the interruption")
    _make_ready(run, stack)
    return run


def _make_ready(run: Run, stack: contextlib.ExitStack) -> None:
    """The last steps of the start, when all groups of ranks and all long-lived objects exist."""
    check_first_sync(run)
    if run.spec.is_on_one_machine:
        close_group_ports()
    gc.collect()
    gc.freeze()  # else every search for cycles visits a million objects of libraries, 60 ms
    stack.callback(gc.unfreeze)


def _stream(run: Run, stack: contextlib.ExitStack) -> RolloutStream:
    """Groups sampled in this thread or, with `rollout.max_staleness`, in others during training."""
    spec = run.spec
    rollout = run.spec.rollout
    ranks = run.ranks
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


def _prompts(
    spec: RunSpec, sources: LocalSources, tokenizer: Any, episodes: EpisodeSource
) -> tuple[PromptDataset, PromptDataset | None]:
    """Prompts of training and validation, with all that the reward and the environment read of their rows."""
    data = spec.data
    mix = []
    train: list[Row] = []
    val: list[Row] = []
    for name, files in sources.train_files.items():
        rows = load_rows(files, continue_final_message=data.continue_final_message)
        train += rows
        if isinstance(data.train_files, dict):
            mix.append(MixedSource(name, len(rows), data.train_files[name]))
    for files in sources.val_files.values():
        val += load_rows(files, continue_final_message=data.continue_final_message)
    check_needs([*train, *val], spec.reward, spec.environment)

    def prompts(rows: list[Row], mix: Sequence[MixedSource] = ()) -> PromptDataset:
        return PromptDataset(
            rows,
            tokenizer,
            max_prompt_length=data.max_prompt_length,
            filter_overlong=data.filter_overlong_prompts,
            chat_template_kwargs=data.chat_template_kwargs,
            mix=mix,
            first_length=episodes.first_length if spec.environment.is_multi_turn else None,
        )

    return prompts(train, mix), prompts(val) if val else None


def _tracker(run: Run, watchdog: Watchdog) -> Tracker:
    trainer = run.spec.trainer
    stop = run.stop
    watchdog.log(run.start_step, {})
    if not run.ranks.is_main:
        return Tracker(extras=[watchdog])
    inputs = SinkInputs(
        run_dir=run.run_dir,
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        config=run.spec.model_dump(mode="json"),
        total_steps=run.total_steps,
        start_step=run.start_step,
        is_stopping=lambda: stop.signal_number > 0,
    )
    tracker = build_tracker(trainer.logger, inputs)
    tracker.add(watchdog)
    watchdog.show = tracker.note
    stop.is_shown = tracker.has_panel
    return tracker
