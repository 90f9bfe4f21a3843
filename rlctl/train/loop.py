"""The training loop.

    prompts ──▶ rollouts ──▶ scores ──▶ ScoredBatch ──▶ TrainBatch ──▶ update ──▶ sync ──▶ log
    Prompts     Rollouts     (B,)       + old           + advantages   correction   weights
                + rollout_   + valid      log-probs                    loss, step   back to
                  log_probs                                                         the rollout

One batch per step. Every rank runs this loop on its share of each batch; sums are merged over ranks
where they are divided. All randomness comes from the seed and the step, so a resumed run needs
nothing but the step it stopped at.
"""

from __future__ import annotations

import resource
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlctl.rollout.protocol import Sampling, step_seed
from rlctl.train.batch_metrics import batch_metrics, batch_tally
from rlctl.train.prepare import rank_positions, score_batch, with_advantages
from rlctl.train.run import Run
from rlctl.train.schedule import lr_at
from rlctl.train.timing import StepTimer
from rlctl.train.update import UpdateSettings, update
from rlctl.train.validate import validate
from rlctl.train.warn import Warner

if TYPE_CHECKING:
    from rlctl.batch import Prompts
    from rlctl.engine.ranks import Ranks
    from rlctl.spec.run import RunSpec


def train(run: Run) -> None:
    """Train from `run.start_step` to `run.total_steps`, or until asked to stop."""
    spec, ranks = run.spec, run.ranks
    settings = UpdateSettings.of(spec)
    sampling = sampling_of(spec)
    updates_per_step = spec.data.train_batch_size // spec.ppo_mini_batch_size * spec.actor.ppo_epochs
    schedule = partial(
        lr_at,
        total_updates=run.total_steps * updates_per_step,
        peak=spec.actor.lr,
        warmup=spec.actor.lr_warmup_steps,
        kind=spec.actor.lr_scheduler_type,
    )
    warner, saving = Warner(run.tracker.note), StepTimer(ranks.device)
    if run.start_step == 0 and spec.trainer.test_freq > 0:
        log(run, 0, validate(run))

    for step in range(run.start_step + 1, run.total_steps + 1):
        timer = StepTimer(ranks.device)
        with timer("step"):
            with timer("gen"):
                rollouts = run.rollout.generate(
                    draw_prompts(run, step),
                    sampling,
                    n=spec.rollout.n,
                    step_seed=step_seed(spec.trainer.seed, step),
                    num_groups_total=spec.data.train_batch_size,
                )
            with timer("reward"):
                rewards = run.reward.score(rollouts)
            with timer("old_log_prob"):
                scored = score_batch(rollouts, rewards, run.actor, spec.algorithm, settings.micro_rows)
            with timer("adv"):
                batch = with_advantages(scored, spec.algorithm)
            with timer("update_actor"):
                outcome = update(batch, run.actor, ranks, settings, schedule, run.policy_version)
            described = batch_tally(scored, batch, run.policy_version)
            run.policy_version += outcome.num_updates
            with timer("sync_weights"):
                run.rollout.sync_weights(run.actor.weights(), policy_version=run.policy_version)

        if run.rollout_writer:
            run.rollout_writer.add(
                step,
                rollouts,
                scored.scores,
                scored.score_valid,
                outcome.training_log_probs,
                outcome.weights,
                outcome.keep_mask,
            )
        metrics = batch_metrics(ranks.to_host(described)) | outcome.metrics
        metrics |= {"training/global_step": float(step), "training/epoch": epoch_of(run, step)}
        warner.look(step, metrics, outcome.nonfinite)
        stopping = ranks.max(float(run.stop.signal_number is not None)) > 0
        is_last = stopping or step == run.total_steps
        if is_due(step, spec.trainer.test_freq) or (spec.trainer.test_freq > 0 and step == run.total_steps):
            with timer("testing"):
                metrics |= validate(run)
        # Logged before it is saved: a checkpoint never knows of a step the log has lost. So the
        # seconds of saving stand in the next line.
        log(run, step, metrics | performance(metrics, timer, ranks) | saving.metrics())
        saving = StepTimer(ranks.device)
        if is_last or is_due(step, spec.trainer.save_freq):
            with saving("save_checkpoint"):
                run.saver.save(run.actor, step, run.policy_version)
        if stopping:
            break


def draw_prompts(run: Run, step: int) -> Prompts:
    """This rank's prompts of one step; `group_ids` are their places in the whole batch."""
    spec = run.spec
    batch_size = spec.data.train_batch_size
    indices = run.train_prompts.batch_indices(
        step - 1, batch_size, seed=spec.trainer.seed, shuffle=spec.data.shuffle
    )
    mine = rank_positions(
        batch_size, spec.ppo_mini_batch_size, rank=run.ranks.rank, world_size=run.ranks.world_size
    )
    return run.train_prompts.prompts([indices[place] for place in mine], mine)


def sampling_of(spec: RunSpec) -> Sampling:
    """The distribution training responses are drawn from."""
    rollout = spec.rollout
    return Sampling(
        max_response_length=spec.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )


def epoch_of(run: Run, step: int) -> float:
    """Passes over the data completed before this step's batch."""
    return float((step - 1) // run.train_prompts.steps_per_epoch(run.spec.data.train_batch_size))


def is_due(step: int, frequency: int) -> bool:
    """Every `frequency` steps; never for 0 or -1."""
    return frequency > 0 and step % frequency == 0


def performance(metrics: dict[str, float], timer: StepTimer, ranks: Ranks) -> dict[str, float]:
    """Seconds, tokens per second and memory of one step."""
    seconds = timer.seconds["step"]
    if ranks.device.type == "cuda":
        gib = torch.cuda.max_memory_allocated() / 2**30
    else:
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return timer.metrics() | {
        "perf/time_per_step": seconds,
        "perf/throughput": metrics["perf/total_num_tokens"] / (seconds * ranks.world_size),
        "perf/max_memory_allocated_gb": gib,
    }


def log(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Track one step, and remember it for the summary."""
    run.tracker.log(step, metrics)
    run.history.append({"step": float(step)} | metrics)
