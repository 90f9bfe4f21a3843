"""The groups of a step that this rank samples, and their grades."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlctl.reward.protocol import Graded, RewardResult
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.seeds import step_seed
from rlctl.train.filter_groups import filtered_groups
from rlctl.train.settings import is_sync_due
from rlctl.train.step_metrics import StepTimer
from rlctl.train.stream import places_of

if TYPE_CHECKING:
    from rlctl.episodes import Episodes
    from rlctl.train.run import Run


def sample_and_grade(run: Run, step: int, timer: StepTimer) -> Graded:
    """The groups of a step that this rank samples, and their grades.

    With dynamic sampling, ranks may have different numbers of groups.
    """
    if run.draws is not None:
        episodes, rewards, cost, unused = filtered_groups(run, step, run.draws, timer)
        cost |= source_shares(run, episodes)
        return Graded(
            episodes=episodes,
            rewards=rewards,
            baseline=greedy_baseline(run, step, episodes, timer),
            sampling_cost=cost,
            dropped=unused,
        )
    with timer("gen"):
        episodes = run.stream.take(step)
    counts = {}
    if run.spec.rollout.max_staleness:
        counts["rollout/restarted_episodes"] = float(run.stream.num_restarted)
    if run.spec.rollout.in_flight:
        counts["rollout/open_groups"] = float(run.stream.num_open)
        counts["rollout/repeated_requests"] = float(run.rollout.report().num_repeated)
    baseline = greedy_baseline(run, step, episodes, timer)
    with timer("reward"):
        rewards = run.reward.score(episodes)
    if counts:
        counts = dict(zip(counts, run.ranks.sum([*counts.values()]), strict=True))
    return Graded(episodes, rewards, baseline, counts | source_shares(run, episodes))


def source_shares(run: Run, episodes: Episodes) -> dict[str, float]:
    """`data/share/<source>`: fraction of the prompts from each source of a mixture, over all ranks."""
    mixture = run.train_prompts.mixture
    if mixture is None:
        return {}
    counts = [0.0] * len(mixture.sources)
    for task in {task.group_id: task for task in episodes.tasks}.values():
        counts[mixture.source_of(task.row)] += 1.0
    sums = run.ranks.sum(counts)
    return {
        f"data/share/{source.label}": count / max(sum(sums), 1.0)
        for source, count in zip(mixture.sources, sums, strict=True)
    }


def sample_groups(run: Run, step: int, index: int) -> Episodes:
    """Samples this rank's groups of a step, of `rollout.n` episodes each; in flight only that at `index`.

    The `group_id` of a task is its index in the whole batch.
    """
    spec = run.spec
    prompts = run.train_prompts
    places = places_of(run.spec, run.ranks)
    seed = spec.trainer.seed
    size = spec.data.train_batch_size
    rows = prompts.batch_indices(step - 1, size, seed=seed, shuffle=spec.data.shuffle)
    places = places[index : index + 1] if spec.rollout.in_flight else places
    tasks = prompts.tasks([rows[place] for place in places], places)
    rollout = run.sampling_ahead if spec.rollout.max_staleness else run.rollout
    episodes = run.episodes.groups(rollout, tasks, spec.rollout.n, run.sampling, step_seed(seed, step))
    if run.episodes.is_multi_turn:  # ranks make different numbers of requests
        rollout.finish()
    return episodes


def greedy_baseline(run: Run, step: int, episodes: Episodes, timer: StepTimer) -> RewardResult | None:
    """For every one of these episodes, the grade of the greedy episode of its task.

    None unless the estimator is ReMax. This is the last sampling before the weight sync, so the engine
    releases its memory in either case.
    """
    spec = run.spec
    weights_follow = is_sync_due(run.spec, step, run.total_steps)
    if "baseline_scores" not in run.estimator.needs:
        run.rollout.release(weights_follow=weights_follow)
        return None
    tasks = {task.group_id: task for task in episodes.tasks}
    with timer("gen_max"):
        greedy = run.episodes.sample(
            run.rollout,
            [(task, 0) for task in tasks.values()],
            Sampling(max_response_length=spec.data.max_response_length, greedy=True),
            step_seed(spec.trainer.seed, step, "greedy"),
        )
        run.rollout.finish()
    run.rollout.release(weights_follow=weights_follow)
    with timer("reward"):
        graded = run.reward.score(greedy)
    places = {group: place for place, group in enumerate(tasks)}
    own = [places[task.group_id] for task in episodes.tasks]
    return replace(graded.pick(own), errors=graded.errors)
