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

import math
import resource
from typing import TYPE_CHECKING

import torch

from rlctl.algos.segments import Moments
from rlctl.errors import RunFailure
from rlctl.train.guardrails import Guardrails
from rlctl.train.ratio_parts import ENGINE, ratio_metrics, ratio_sums
from rlctl.train.run import is_validation_due
from rlctl.train.sample_and_grade import refuse_ungraded, sample_and_grade
from rlctl.train.saving import Saver
from rlctl.train.score_batch import score_batch, train_batch, with_advantages, with_penalties
from rlctl.train.settings import (
    CriticSettings,
    UpdateSettings,
    actor_schedule,
    critic_schedule,
    planned_updates,
)
from rlctl.train.step_metrics import (
    Notices,
    StepTimer,
    age_metrics,
    age_sums,
    batch_metrics,
    environment_metrics,
    environment_sums,
    episode_sums,
    step_warnings,
    token_sums,
    turn_metrics,
    turn_sums,
)
from rlctl.train.sync import sync_weights
from rlctl.train.update import update
from rlctl.train.update_critic import update_critic
from rlctl.train.validate import validate

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Episode, TokenBatch
    from rlctl.engine.ranks import Ranks
    from rlctl.reward.protocol import Graded
    from rlctl.train.run import Run
    from rlctl.train.update import Updated


def train(run: Run) -> None:
    """Trains from `run.start_step` to `run.total_steps`, or until a stop is requested."""
    spec, algorithm, of_critic = run.spec, run.spec.algorithm, CriticSettings.of(run.spec)
    ranks = run.data_ranks
    guardrails, saver = Guardrails(run, UpdateSettings.of(spec)), Saver(run)
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
            metrics = dict(graded.sampling_cost)
            batch = score_batch(run, train_batch(spec, run.ranks, graded, run.policy_version), timer)
            batch, steered, penalties = with_penalties(batch, algorithm, run.kl, ranks)
            run.kl = run.kl if hold else steered  # an unchanged policy gives no KL to adapt to
            metrics |= penalties
            with timer("adv"):
                batch = with_advantages(batch, algorithm, ranks)
            metrics |= describe_batch(run, batch, graded)
            if run.critic:
                first = (step - 1) * spec.critic_updates_per_batch
                with timer("update_critic"):
                    metrics |= update_critic(batch, run.critic, ranks, of_critic, critic_lr_at, first)
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
            metrics |= describe_turns(run, batch, outcome) | sync_weights(run, step, timer)
            metrics |= describe_ratio(run, batch, outcome, metrics.get(ENGINE))

        dump(run, step, graded, batch, outcome)
        metrics |= outcome.metrics
        metrics |= {"training/global_step": float(step), "training/epoch": epoch_of(run, step)}
        for kind, text in step_warnings(metrics, names_of(batch, outcome), graded.rewards.timeouts):
            warnings.doubling(kind, f"step {step}: {text}")
        if is_validation_due(run, step):
            with timer("testing"):
                metrics |= validate(run, step)
        metrics |= performance(metrics, timer, run.ranks, run.rollout.sleeping_bytes) | saving.metrics()
        metrics |= guardrails.observe(
            step,
            metrics,
            num_planned=0 if hold else spec.updates_per_batch,
            decisions=outcome.decisions,
            lr_scale=outcome.lr_scale,
        )
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


def describe_batch(run: Run, batch: TokenBatch, graded: Graded) -> dict[str, float]:
    """Metrics of the batch over all ranks.

    Raises:
        RunFailure: too many responses could not be graded.
    """
    spec = run.spec
    sampled = episode_sums(graded, run.policy_version, spec.data.max_prompt_length)
    has_ages = spec.rollout.in_flight or spec.rollout.max_age_updates is not None
    if has_ages:
        sampled |= age_sums(graded, run.policy_version, spec.rollout.max_age_updates)
    sums = run.ranks.all_reduce({name: value.to(run.ranks.device) for name, value in sampled.items()})
    sums |= run.data_ranks.all_reduce(token_sums(batch))
    metrics = batch_metrics(sums, compares_siblings=spec.algorithm.estimator_needs("group_ids"))
    errors = graded.rewards.errors + (graded.baseline.errors if graded.baseline else [])
    refuse_ungraded(run, metrics["reward/num_errors"], spec.data.train_batch_size * spec.rollout.n, errors)
    if has_ages:
        metrics |= age_metrics(sums, Moments.read(sums, "score").count)
    return metrics | (describe_episodes(run, graded) if spec.environment.has_episodes else {})


def describe_episodes(run: Run, graded: Graded) -> dict[str, float]:
    """Metrics of the episodes of environments over all ranks.

    Raises:
        RunFailure: too many failed by faults of the environment.
    """
    ranks, limit = run.ranks, run.spec.environment.max_failed_fraction
    names = sorted(set(ranks.exchange([name for episode in graded.episodes for name in episode.metrics])))
    sums = ranks.all_reduce(
        {name: value.to(ranks.device) for name, value in environment_sums(graded, names).items()}
    )
    failed, total = sums["failed"], sums["failed"] + sums["episodes"]
    if failed > limit * total:
        first = ranks.first(next((e.error for e in graded.episodes if e.error), ""))
        raise RunFailure(
            f"{failed:.0f} of {total:.0f} episodes failed by faults of the environment; the first: {first}",
            where="environment",
            fix=f"correct the environment, or raise environment.max_failed_fraction (now {limit:g})",
        )
    return environment_metrics(sums)


def describe_turns(run: Run, batch: TokenBatch, outcome: Updated) -> dict[str, float]:
    """Mismatch by turn over all ranks."""
    if not run.spec.environment.has_episodes:
        return {}
    return turn_metrics(run.data_ranks.all_reduce(turn_sums(batch, outcome.seen.training_log_probs)))


def describe_ratio(run: Run, batch: TokenBatch, outcome: Updated, probed: float | None) -> dict[str, float]:
    """What the log-ratio consists of, over all ranks; `probed`: the engine's part, if it was measured."""
    sums = ratio_sums(batch, outcome.seen.training_log_probs, run.spec)
    return ratio_metrics(run.data_ranks.all_reduce(sums), run.spec, probed)


def names_of(batch: TokenBatch, outcome: Updated) -> list[str]:
    """Group and member of this rank's responses with NaN or infinite log-probs, as `3/0`."""
    responses = outcome.seen.nonfinite.nonzero().squeeze(1)
    episodes = responses if len(outcome.seen.nonfinite) == batch.num_episodes else batch.owners[responses]
    return [f"{batch.group_ids[place]}/{batch.members[place]}" for place in sorted(set(episodes.tolist()))]


def dump(run: Run, step: int, graded: Graded, batch: TokenBatch, outcome: Updated) -> None:
    """Stores the first whole groups of the batch with what the update used, if rollouts are kept.

    Episodes are on the rank that sampled them, log-probs and weights on the rank that trained on them: both
    go to the main rank. An episode that was not trained on has log-probs of NaN.
    """
    limit, n = run.spec.trainer.rollouts_per_step, run.spec.rollout.n
    if not limit:
        return
    count = run.spec.data.train_batch_size if limit < 0 else max(limit // n, 1)
    scores, valid = graded.rewards.scores.tolist(), graded.rewards.valid.tolist()
    mine = [
        (episode, score if ok else None)
        for episode, score, ok in zip(graded.episodes, scores, valid, strict=True)
        if episode.task.group_id < count
    ]
    seen = outcome.seen
    found: dict[tuple[int, int], Tensor] = {}
    columns = torch.stack([seen.training_log_probs, seen.weights, seen.keep.float()]).cpu()
    keys = zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)
    tokens = torch.split(columns, batch.units.episode.lengths.tolist(), 1)
    for key, part in zip(keys, tokens, strict=True):
        if key[0] < count:
            found[key] = part
    episodes = run.ranks.exchange(mine)
    trained: dict[tuple[int, int], Tensor] = dict(run.data_ranks.exchange(list(found.items())))
    if run.rollout_writer:
        episodes.sort(key=lambda pair: (pair[0].task.group_id, pair[0].member))

        def of(episode: Episode) -> Tensor:
            unknown = torch.tensor([[math.nan], [0.0], [0.0]]).expand(3, episode.num_sampled)
            return trained.get((episode.task.group_id, episode.member), unknown)

        joined = torch.cat([of(episode) for episode, _ in episodes], 1)
        names = ("training_log_probs", "rollout_is_weights", "keep_mask")
        values = dict(zip(names, (*joined[:2], joined[2] > 0), strict=True))
        run.rollout_writer.add(step, [one for one, _ in episodes], [score for _, score in episodes], values)


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
    run.history.append({"step": float(step)} | metrics)
    for callback in run.callbacks:
        callback(step, metrics)
