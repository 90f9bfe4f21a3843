"""The training loop.

    tasks ──▶ episodes ──▶ scores ──▶ TokenBatch ──▶ + columns ──▶ update ──▶ sync ──▶ log
    of the    of turns     of the     dealt to       old, ref      correction   weights
    data      (tokens,     graders    ranks by       log-probs,    loss, step   back to
              log-probs)              tokens         values,       (+ critic)   the engine
                                                     advantages

One batch per step. Every rank runs this loop on its episodes of each batch; sums are merged over ranks
before they are divided. All randomness derives from the seed and the step. Besides the state of the
models, a resumed run therefore needs only the last step, the number of updates, the KL coefficient, batches
sampled ahead, the draws of dynamic sampling, and the log, which guardrails read.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import torch

from rlctl.train.capability import StepRecord
from rlctl.train.guardrails import Guardrails
from rlctl.train.sample_and_grade import sample_and_grade
from rlctl.train.saving import Saver, save_rollouts
from rlctl.train.score_batch import score_batch, train_batch, with_advantages, with_penalties
from rlctl.train.settings import (
    UpdateSettings,
    actor_schedule,
    critic_schedule,
    is_validation_due,
    planned_updates,
)
from rlctl.train.step_metrics import (
    ENGINE,
    Notices,
    StepTimer,
    metrics_of_episodes,
    metrics_of_tokens,
    step_warnings,
)
from rlctl.train.sync import sync_weights
from rlctl.train.update import update
from rlctl.train.update_critic import update_critic
from rlctl.train.validate import validate

if TYPE_CHECKING:
    from rlctl.batch import TokenBatch
    from rlctl.engine.ranks import Ranks
    from rlctl.train.run import Run
    from rlctl.train.update import Updated


def train(run: Run) -> None:
    """Trains from `run.start_step` to `run.total_steps`, or until a stop is requested."""
    with Saver(run) as saver:
        _take_steps(run, saver)


def _take_steps(run: Run, saver: Saver) -> None:
    spec, algorithm = run.spec, run.spec.algorithm
    ranks = run.data_ranks
    guardrails = Guardrails(run, UpdateSettings.of(spec, run.capabilities))
    lr_at, critic_lr_at = actor_schedule(spec, run.total_steps), critic_schedule(spec, run.total_steps)
    phases = run.tracker.begin_phase
    layouts = Notices(run.tracker.note, "layout of the tokens")
    warnings, saving = Notices(run.tracker.note, "warning"), StepTimer(ranks.device, phases)
    if run.start_step == 0 and spec.trainer.test_freq > 0:
        log(run, 0, validate(run, 0))

    for step in range(run.start_step + 1, run.total_steps + 1):
        timer = StepTimer(ranks.device, phases)
        hold = step <= spec.trainer.critic_warmup
        with timer("step"):
            graded = sample_and_grade(run, step, timer)
            metrics = graded.sampling_cost | metrics_of_episodes(run, graded)
            batch = score_batch(run, train_batch(spec, run.ranks, graded, run.policy_version), timer)
            batch, steered, penalties = with_penalties(batch, algorithm, run.kl, ranks, run.capabilities)
            run.kl = run.kl if hold else steered  # an unchanged policy gives no KL to adapt to
            metrics |= penalties
            with timer("adv"):
                batch = with_advantages(batch, run.estimator, ranks)
            if run.critic:
                first = (step - 1) * spec.critic_updates_per_batch
                with timer("update_critic"):
                    metrics |= update_critic(batch, run.critic, ranks, spec, critic_lr_at, first)
            with timer("update_actor"):
                outcome = update(
                    batch,
                    run.actor,
                    ranks,
                    guardrails.settings,
                    lr_at,
                    planned_updates(spec, step),
                    guard=guardrails.spec,
                    lr_scale=guardrails.lr_scale,
                    hold=hold,
                )
            run.policy_version += outcome.num_updates
            layouts.once(outcome.layout.partition(";")[0], outcome.layout)
            metrics |= sync_weights(run, step, timer)
            seen = outcome.seen
            metrics |= metrics_of_tokens(run, batch, seen.training_log_probs, metrics.get(ENGINE))
            metrics |= metrics_of_capabilities(
                run,
                StepRecord(
                    step=step,
                    ranks=run.ranks,
                    data_ranks=ranks,
                    graded=graded,
                    batch=batch,
                    before_updates=seen.before_updates,
                    policy_version=run.policy_version - outcome.num_updates,
                    withheld=not hold and not outcome.num_updates,
                    metrics=metrics,
                ),
            )

        save_rollouts(run, step, graded, batch, seen)
        metrics |= outcome.metrics | {
            "training/global_step": float(step),
            "training/epoch": epoch_of(run, step),
        }
        for kind, text in step_warnings(
            spec, metrics, outcome.missed, names_of(batch, outcome), graded.rewards.timeouts
        ):
            warnings.doubling(kind, f"step {step}: {text}")
        if is_validation_due(spec, step, run.total_steps):
            with timer("testing"):
                metrics |= validate(run, step)
        metrics |= (
            performance(metrics, timer, run.ranks, run.rollout.report().sleeping_bytes) | saving.metrics()
        )
        num_planned = 0 if hold else spec.updates_per_batch
        metrics |= guardrails.observe(step, metrics, outcome.decisions, num_planned)
        # Log before saving, so that the log contains every step of a checkpoint. The seconds of saving
        # are therefore logged with the next step.
        log(run, step, metrics)
        saving = StepTimer(ranks.device, phases)
        stopping, is_saved = saver.after(step, metrics)
        if is_saved:
            with saving("save_checkpoint"):
                saver.save(step)
        if stopping:
            break


def metrics_of_capabilities(run: Run, record: StepRecord) -> dict[str, float]:
    """Metrics of all capabilities after the updates of a step."""
    own: dict[str, float] = {}
    for capability in run.capabilities:
        own |= capability.updated(record)
    return own


def names_of(batch: TokenBatch, outcome: Updated) -> list[str]:
    """Group and member of this rank's responses with NaN or infinite log-probs, as `3/0`."""
    responses = outcome.seen.nonfinite.nonzero().squeeze(1)
    episodes = responses if len(outcome.seen.nonfinite) == batch.num_episodes else batch.owners[responses]
    return [f"{batch.group_ids[place]}/{batch.members[place]}" for place in sorted(set(episodes.tolist()))]


def epoch_of(run: Run, step: int) -> float:
    """Complete passes over the data before this step's batch; with dynamic sampling, after it."""
    before = (step - 1) * run.spec.data.train_batch_size
    return float((before if run.draws is None else run.draws.position) // len(run.train_prompts))


def performance(
    metrics: dict[str, float], timer: StepTimer, ranks: Ranks, sleeping_bytes: int
) -> dict[str, float]:
    """Seconds of one step, tokens per second and rank, and peak memory of the run so far, without
    `sleeping_bytes` (GiB)."""
    seconds = timer.seconds["step"]
    if ranks.device.type == "cuda":
        gib = (torch.cuda.max_memory_allocated() - sleeping_bytes) / 2**30
    else:
        gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return timer.metrics() | {
        "perf/time_per_step": seconds,
        "perf/throughput": metrics["perf/total_num_tokens"] / (seconds * ranks.world_size),
        "perf/max_memory_allocated_gb": gib,
    }


def log(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Logs one step, appends it to the history for the summary, and calls the callbacks."""
    run.tracker.log(step, metrics)
    if run.ranks.is_main:
        run.history.append({"step": float(step)} | metrics)
    for callback in run.callbacks:
        callback(step, metrics)
