"""Dynamic sampling: rounds of prompts are sampled and graded until rewards differ within enough groups.

DAPO, Yu et al. 2025, arXiv 2503.14476. Prompts are drawn in the order of the data, over as many epochs as
needed. The groups that are used depend only on that order, not on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlctl.algos.estimators import has_spread
from rlctl.episodes import Episodes
from rlctl.errors import RunFailure
from rlctl.reward.protocol import RewardResult
from rlctl.rollout.seeds import step_seed
from rlctl.train.dropped import as_dropped
from rlctl.train.step_metrics import StepTimer, refuse_ungraded
from rlctl.train.stream import PromptDraws

if TYPE_CHECKING:
    from collections.abc import Collection

    from rlctl.track.dropped import DroppedEpisode
    from rlctl.train.run import Run

_KEY = "algorithm.filter_groups"
#: Minimum of the fraction by which a later round divides the number of missing groups.
_SMALLEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class _Summary:
    """What all ranks know of a group after a round."""

    place: int  # index of its prompt in the order of drawing, within the batch
    row: int  # of the data
    has_spread: bool
    mean: float  # of the graded scores
    graded: int  # number of episodes
    failed: int  # number of episodes that could not be graded
    tokens: int  # sampled


def filtered_groups(
    run: Run, step: int, draws: PromptDraws, timer: StepTimer
) -> tuple[Episodes, RewardResult, dict[str, float], list[DroppedEpisode]]:
    """The groups of a batch with spread that this rank sampled, their grades, `filter_groups/*` metrics, and
    the episodes of all other groups, whose `group_id` is −1.

    Their `group_id` is their place in the batch over all ranks, in the order of drawing; their `weight` is
    1 / P(prompt drawn).

    A group has spread if two of its graded scores differ, without the overlong penalty. After
    `max_num_gen_batches` rounds, the batch is completed with groups without spread in the order in which they
    were drawn.

    Raises:
        RunFailure: a whole epoch has too few groups with spread, or too many responses could not be graded.
    """
    spec = run.spec
    ranks = run.ranks
    start = draws.position
    most = spec.algorithm.filter_groups.max_num_gen_batches
    wanted = spec.data.train_batch_size
    n = spec.rollout.n
    known: list[_Summary] = []  # of all ranks
    rounds: list[Episodes] = []  # by this rank
    grades: list[RewardResult] = []  # of these, by round
    while (found := sum(group.has_spread for group in known)) < wanted and not 0 < most <= len(grades):
        if len(known) >= wanted and draws.position - start >= len(run.train_prompts):
            what = f"all prompts of one epoch gave {found} groups whose rewards differ"
            raise RunFailure(
                f"{what}; a batch takes {wanted}",
                where=_KEY,
                fix="use data of another difficulty, set max_num_gen_batches, or lower data.train_batch_size",
            )
        share = max(found / len(known), _SMALLEST_SHARE) if known else 1.0
        count = min(math.ceil((wanted - found) / share), wanted)
        episodes, graded = _sample(run, step, draw_next_prompts(run, draws, count), len(known), timer)
        rounds.append(episodes)
        grades.append(graded)
        known += ranks.exchange(_summaries(episodes, graded, n))
        errors = [error for result in grades for error in result.errors]
        refuse_ungraded(run, sum(group.failed for group in known), len(known) * n, errors)
    for group in sorted(known, key=lambda group: group.place):
        if group.graded:
            draws.note(group.row, group.mean, group.graded)
    # `known` lists the ranks' shares of each round in rank order, which is the order of drawing; the sort is
    # stable.
    used = sorted(known, key=lambda group: not group.has_spread)[:wanted]
    places = {drawn: place for place, drawn in enumerate(sorted(group.place for group in used))}
    sampled = Episodes.joined(rounds)
    all_grades = RewardResult.joined(grades)
    chosen = [index for index, task in enumerate(sampled.tasks) if task.group_id in places]
    failures = {name: getattr(all_grades, name) for name in ("errors", "errors_by_term", "timeouts")}
    cost = _metrics(known, used, len(grades), n, draws.position - start)
    own = sampled.pick(chosen).placed(places)
    unused = _unused(run, sampled, all_grades, places, {g.place for g in known if g.has_spread})
    return own, replace(all_grades.pick(chosen), **failures), cost, unused


def _unused(
    run: Run, sampled: Episodes, grades: RewardResult, used: Collection[int], with_spread: Collection[int]
) -> list[DroppedEpisode]:
    """The episodes of groups that are not among the used ones, for the ledger of dropped episodes."""
    ages = sampled.ages(run.policy_version).tolist()
    unused: list[DroppedEpisode] = []
    for index, task in enumerate(sampled.tasks):
        if task.group_id in used:
            continue
        reason = "the rewards of its group do not differ"
        if task.group_id in with_spread:
            reason = "the batch was full"
        dropped = as_dropped(sampled, grades, index, int(ages[index]), reason)
        unused.append(replace(dropped, group_id=-1))
    return unused


def _sample(
    run: Run, step: int, drawn: list[tuple[int, float]], first: int, timer: StepTimer
) -> tuple[Episodes, RewardResult]:
    """Samples and grades this rank's share of a round (all ranks call this).

    Args:
        drawn: see `draw_next_prompts`.
        first: place in the batch of the first one.
    """
    ranks = run.ranks
    count = len(drawn)
    mine = range(ranks.rank * count // ranks.world_size, (ranks.rank + 1) * count // ranks.world_size)
    tasks = run.train_prompts.tasks([drawn[i][0] for i in mine], [first + i for i in mine])
    tasks = [replace(task, weight=1.0 / drawn[i][1]) for task, i in zip(tasks, mine, strict=True)]
    seed = step_seed(run.spec.trainer.seed, step)
    with timer("gen"):  # in a small round some ranks have no prompts
        episodes = run.episodes.groups(run.rollout, tasks, run.spec.rollout.n, run.sampling, seed)
        run.rollout.finish()
    with timer("reward"):
        return episodes, run.reward.score(episodes)


def _summaries(episodes: Episodes, graded: RewardResult, n: int) -> list[_Summary]:
    """One per group of n episodes."""
    counted = graded.valid & ~episodes.aborted
    tokens = episodes.num_sampled
    failed = ~graded.valid & ~episodes.aborted
    summaries = []
    for start in range(0, len(episodes), n):
        group = slice(start, start + n)
        task = episodes.tasks[start]
        scores = graded.graded[group][counted[group]]
        summaries.append(
            _Summary(
                place=task.group_id,
                row=task.row,
                has_spread=bool(has_spread(scores, torch.zeros(len(scores), dtype=torch.int64)).any()),
                mean=float(scores.mean()) if len(scores) else 0.0,
                graded=len(scores),
                failed=int(failed[group].sum()),
                tokens=int(tokens[group].sum()),
            )
        )
    return summaries


def draw_next_prompts(run: Run, draws: PromptDraws, count: int) -> list[tuple[int, float]]:
    """Rows of the next prompts, and the probability with which each was drawn.

    A curriculum draws a prompt at its turn with the probability that its group has spread.
    """
    spec = run.spec
    options = run.spec.algorithm.filter_groups
    drawn: list[tuple[int, float]] = []
    while len(drawn) < count:
        row = run.train_prompts.row_at(draws.position, seed=spec.trainer.seed, shuffle=spec.data.shuffle)
        draws.position += 1
        chance = 1.0
        if options.curriculum:
            chance = draws.chance(row, spec.rollout.n, options.curriculum_floor)
            random = np.random.RandomState(
                np.random.MT19937(np.random.SeedSequence([spec.trainer.seed, draws.position, 1]))
            )
            if random.random_sample() >= chance:
                continue
        drawn.append((row, chance))
    return drawn


def _metrics(
    groups: list[_Summary], used: list[_Summary], rounds: int, n: int, drawn: int
) -> dict[str, float]:
    generated_tokens, used_tokens = (float(sum(group.tokens for group in some)) for some in (groups, used))
    without, used_without = (sum(not group.has_spread for group in some) for some in (groups, used))
    graded = sum(group.graded for group in groups)
    return {
        "filter_groups/rounds": float(rounds),
        "filter_groups/samples_generated": float(len(groups) * n),
        "filter_groups/samples_used": float(len(used) * n),
        "filter_groups/tokens_generated": generated_tokens,
        "filter_groups/tokens_used": used_tokens,
        "filter_groups/generated_per_used": generated_tokens / max(used_tokens, 1.0),
        "filter_groups/zero_spread_fraction": without / len(groups),
        "filter_groups/zero_spread_used": float(used_without),
        "filter_groups/unused_groups": float(len(groups) - without - (len(used) - used_without)),
        "filter_groups/prompts_skipped": float(drawn - len(groups)),
        "filter_groups/score_mean": sum(group.mean * group.graded for group in groups) / max(graded, 1),
    }
