"""Groups of a step that this rank samples, and their grades.

With dynamic sampling, rounds of prompts are sampled and graded until rewards differ within
`data.train_batch_size` groups (DAPO, Yu et al. 2025, arXiv 2503.14476). Prompts are drawn in the order of the
data, over as many epochs as needed. The groups that are used depend only on that order, not on the number of
ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlctl.algos.estimators import has_spread
from rlctl.errors import RunFailure
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.rollout.protocol import Sampling, sampling_of, step_seed
from rlctl.train.run import is_sync_due
from rlctl.train.step_metrics import StepTimer, refuse_ungraded
from rlctl.train.stream import PromptDraws, placed, places_of

if TYPE_CHECKING:
    from rlctl.batch import Group
    from rlctl.train.run import Run

_KEY = "algorithm.filter_groups"
#: Minimum of the fraction by which a later round divides the number of missing groups.
_SMALLEST_SHARE = 0.1


def sample_and_grade(run: Run, step: int, timer: StepTimer) -> Graded:
    """The groups of a step that this rank samples, and their grades.

    With dynamic sampling, ranks may have different numbers of groups.
    """
    if run.draws is not None:
        groups, rewards, cost = filtered_groups(run, step, run.draws, timer)
        return Graded(groups, rewards, greedy_baseline(run, step, groups, timer), cost)
    with timer("gen"):
        groups = run.stream.take(step)
    counts = {}
    if run.spec.rollout.max_staleness:
        counts["rollout/restarted_episodes"] = float(run.stream.num_restarted)
    if run.spec.rollout.in_flight:
        counts["rollout/open_groups"] = float(run.stream.num_open)
        counts["rollout/repeated_requests"] = float(run.rollout.num_repeated)
    baseline = greedy_baseline(run, step, groups, timer)
    with timer("reward"):
        rewards = run.reward.score([episode for group in groups for episode in group])
    if counts:
        counts = dict(zip(counts, run.ranks.sum([*counts.values()]), strict=True))
    return Graded(groups, rewards, baseline, counts)


def sample_groups(run: Run, step: int, index: int) -> list[Group]:
    """Samples this rank's groups of a step, of `rollout.n` episodes each; in flight only that at `index`.

    The `group_id` of a task is its index in the whole batch.
    """
    spec, prompts, places = run.spec, run.train_prompts, places_of(run.spec, run.ranks)
    seed, size = spec.trainer.seed, spec.data.train_batch_size
    rows = prompts.batch_indices(step - 1, size, seed=seed, shuffle=spec.data.shuffle)
    places = places[index : index + 1] if spec.rollout.in_flight else places
    tasks = prompts.tasks([rows[place] for place in places], places)
    rollout = run.sampling_ahead if spec.rollout.max_staleness else run.rollout
    sampling = sampling_of(spec)
    groups = run.episodes.groups(rollout, tasks, spec.rollout.n, sampling, step_seed(seed, step))
    if spec.environment.has_episodes:  # ranks make different numbers of requests
        rollout.finish()
    return groups


def greedy_baseline(run: Run, step: int, groups: list[Group], timer: StepTimer) -> RewardResult | None:
    """For every episode of these groups, the grade of the greedy episode of its task.

    None unless the estimator is ReMax. This is the last sampling before the weight sync, so the engine
    releases its memory in either case.
    """
    spec = run.spec
    weights_follow = is_sync_due(run, step)
    if not spec.algorithm.estimator_needs("baseline_scores"):
        run.rollout.release(weights_follow=weights_follow)
        return None
    with timer("gen_max"):
        greedy = run.episodes.sample(
            run.rollout,
            [(group[0].task, 0) for group in groups],
            Sampling(max_response_length=spec.data.max_response_length, greedy=True),
            step_seed(spec.trainer.seed, step, "greedy"),
        )
        run.rollout.finish()
    run.rollout.release(weights_follow=weights_follow)
    with timer("reward"):
        graded = run.reward.score(greedy)
    own = [place for place, group in enumerate(groups) for _ in group]
    return replace(graded.pick(own), errors=graded.errors)


# --- dynamic sampling -------------------------------------------------------------------------------


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
) -> tuple[list[Group], RewardResult, dict[str, float]]:
    """The groups of a batch with spread that this rank sampled, their grades, and `filter_groups/*` metrics.

    Their `group_id` is their place in the batch over all ranks, in the order of drawing; their `weight` is
    1 / P(prompt drawn).

    A group has spread if two of its graded scores differ, without the overlong penalty. After
    `max_num_gen_batches` rounds, the batch is completed with groups without spread in the order in which they
    were drawn.

    Raises:
        RunFailure: a whole epoch has too few groups with spread, or too many responses could not be graded.
    """
    start, options = draws.position, run.spec.algorithm.filter_groups
    rounds = _Rounds(run, step, draws)
    while rounds.num_missing and not 0 < options.max_num_gen_batches <= rounds.count:
        if len(rounds.groups) >= rounds.wanted and draws.position - start >= len(run.train_prompts):
            found = rounds.wanted - rounds.num_missing
            what = f"all prompts of one epoch gave {found} groups whose rewards differ"
            raise RunFailure(
                f"{what}; a batch takes {rounds.wanted}",
                where=_KEY,
                fix="use data of another difficulty, set max_num_gen_batches, or lower data.train_batch_size",
            )
        rounds.sample(timer)
    for group in sorted(rounds.groups, key=lambda group: group.place):
        if group.graded:
            draws.note(group.row, group.mean, group.graded)
    # `groups` lists the ranks' shares of each round in rank order, which is the order of drawing; the sort is
    # stable.
    used = sorted(rounds.groups, key=lambda group: not group.has_spread)[: rounds.wanted]
    places = {drawn: place for place, drawn in enumerate(sorted(group.place for group in used))}
    groups: list[Group] = []
    chosen: list[int] = []
    first = 0
    for sampled in rounds.own:
        if (drawn := sampled[0].task.group_id) in places:
            groups.append(placed(sampled, places[drawn]))
            chosen += range(first, first + len(sampled))
        first += len(sampled)
    graded = RewardResult.joined(rounds.graded)
    failures = {name: getattr(graded, name) for name in ("errors", "errors_by_term", "timeouts")}
    cost = _metrics(rounds.groups, used, rounds.count, run.spec.rollout.n, draws.position - start)
    return groups, replace(graded.pick(chosen), **failures), cost


class _Rounds:
    """The rounds of one batch.

    Attributes:
        groups: of all ranks.
        own: those that this rank sampled.
        graded: per round, the grades of this rank's episodes.
    """

    def __init__(self, run: Run, step: int, draws: PromptDraws) -> None:
        self._run, self._step, self._draws = run, step, draws
        self.wanted = run.spec.data.train_batch_size
        self.groups: list[_Summary] = []
        self.own: list[Group] = []
        self.graded: list[RewardResult] = []

    @property
    def count(self) -> int:
        """Number of rounds so far."""
        return len(self.graded)

    @property
    def num_missing(self) -> int:
        """Number of groups with spread that the batch still lacks."""
        return max(self.wanted - sum(group.has_spread for group in self.groups), 0)

    def sample(self, timer: StepTimer) -> None:
        """Samples and grades one round (all ranks call this).

        Raises:
            RunFailure: too many responses could not be graded.
        """
        run, ranks = self._run, self._run.ranks
        first = len(self.groups)
        found = self.wanted - self.num_missing
        share = max(found / first, _SMALLEST_SHARE) if first else 1.0
        count = min(math.ceil(self.num_missing / share), self.wanted)
        drawn = draw_next_prompts(run, self._draws, count)
        mine = range(ranks.rank * count // ranks.world_size, (ranks.rank + 1) * count // ranks.world_size)
        tasks = run.train_prompts.tasks([drawn[i][0] for i in mine], [first + i for i in mine])
        tasks = [replace(task, weight=1.0 / drawn[i][1]) for task, i in zip(tasks, mine, strict=True)]
        seed, n = step_seed(run.spec.trainer.seed, self._step), run.spec.rollout.n
        with timer("gen"):  # in a small round some ranks have no prompts
            groups = run.episodes.groups(run.rollout, tasks, n, sampling_of(run.spec), seed)
            run.rollout.finish()
        with timer("reward"):
            graded = run.reward.score([episode for group in groups for episode in group])
        summaries = [
            _summary(group, graded.pick(range(index * n, (index + 1) * n)))
            for index, group in enumerate(groups)
        ]
        self.own += groups
        self.graded.append(graded)
        self.groups += ranks.exchange(summaries)
        errors = [error for result in self.graded for error in result.errors]
        refuse_ungraded(run, sum(group.failed for group in self.groups), len(self.groups) * n, errors)


def _summary(group: Group, graded: RewardResult) -> _Summary:
    aborted = torch.tensor([episode.aborted for episode in group])
    scores = graded.graded[graded.valid & ~aborted]
    differs = bool(has_spread(scores, torch.zeros(len(scores), dtype=torch.int64)).any())
    return _Summary(
        place=group[0].task.group_id,
        row=group[0].task.row,
        has_spread=differs,
        mean=float(scores.mean()) if len(scores) else 0.0,
        graded=len(scores),
        failed=int((~graded.valid & ~aborted).sum()),
        tokens=sum(episode.num_sampled for episode in group),
    )


def draw_next_prompts(run: Run, draws: PromptDraws, count: int) -> list[tuple[int, float]]:
    """Rows of the next prompts, and the probability with which each was drawn.

    A curriculum draws a prompt at its turn with the probability that its group has spread.
    """
    spec, options = run.spec, run.spec.algorithm.filter_groups
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
