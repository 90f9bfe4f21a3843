"""Dynamic sampling: a batch of groups whose grades differ, and its sampling cost.

Rounds of prompts are sampled and graded until rewards differ within `data.train_batch_size` groups (DAPO,
Yu et al. 2025, arXiv 2503.14476). Prompts are drawn in the order of the data, over as many
epochs as needed. The groups that are used depend only on that order, not on the number of ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlctl.algos.estimators import has_spread
from rlctl.batch import Rollouts
from rlctl.errors import RunFailure
from rlctl.reward.protocol import FailureKind, RewardResult
from rlctl.rollout.protocol import sampling_of, step_seed
from rlctl.train.run import refuse_ungraded
from rlctl.train.step_metrics import StepTimer
from rlctl.train.stream import PromptDraws, rank_positions

if TYPE_CHECKING:
    from rlctl.train.run import Run

_KEY = "algorithm.filter_groups"
#: Minimum of the fraction by which a later round divides the number of missing groups.
_SMALLEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A drawn prompt.

    Attributes:
        place: index in the order of drawing, within one batch.
        row: row of the data.
        chance: probability with which it was drawn.
    """

    place: int
    row: int
    chance: float


@dataclass(frozen=True, slots=True)
class _Group:
    """Summary of a group, shared by all ranks after a round."""

    prompt: DrawnPrompt
    has_spread: bool
    mean: float
    graded: int
    tokens: int


def filtered_batch(
    run: Run, step: int, draws: PromptDraws, timer: StepTimer
) -> tuple[Rollouts, RewardResult, dict[str, float]]:
    """This rank's share of a batch of groups with spread, their grades, and `filter_groups/*` metrics.

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
    for group in sorted(rounds.groups, key=lambda group: group.prompt.place):
        if group.graded:
            draws.note(group.prompt.row, group.mean, group.graded)
    # `groups` lists the ranks' shares of each round in rank order, which is the order of drawing; the sort is
    # stable.
    used = sorted(rounds.groups, key=lambda group: not group.has_spread)[: rounds.wanted]
    prompts = sorted((group.prompt for group in used), key=lambda prompt: prompt.place)
    rollouts, rewards = _shared_out(run, rounds.own, prompts)
    rewards = replace(
        rewards, errors=rounds.errors, timeouts=rounds.timeouts, errors_by_term=rounds.errors_by_term
    )
    drawn = draws.position - start
    return rollouts, rewards, _metrics(rounds.groups, used, rounds.count, run.spec.rollout.n, drawn)


class _Rounds:
    """The rounds of one batch.

    Attributes:
        count: number of rounds so far.
        groups: of all ranks.
        own: place → responses and grades of a group that this rank sampled.
        errors, timeouts, errors_by_term: of this rank's responses, as in `RewardResult`.
    """

    def __init__(self, run: Run, step: int, draws: PromptDraws) -> None:
        self._run, self._step, self._draws = run, step, draws
        self.wanted = run.spec.data.train_batch_size
        self.count, self._ungraded = 0, 0.0
        self.groups: list[_Group] = []
        self.own: dict[int, tuple[Rollouts, RewardResult]] = {}
        self.errors: list[str] = []
        self.timeouts: Counter[FailureKind] = Counter()
        self.errors_by_term: Counter[str] = Counter()

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
        drawn = draw_next_prompts(run, self._draws, count, first=first)
        mine = drawn[ranks.rank * count // ranks.world_size : (ranks.rank + 1) * count // ranks.world_size]
        with timer("gen"):  # in a small round some ranks have no prompts
            rollouts = self._generate(mine, first, count) if mine else None
            run.rollout.finish()
        num_ungraded = 0.0
        if rollouts:
            with timer("reward"):
                graded = run.reward.score(rollouts)
            num_ungraded = float((~graded.valid & ~rollouts.aborted.cpu()).sum())
            n = run.spec.rollout.n
            for index, prompt in enumerate(mine):
                rows = slice(index * n, (index + 1) * n)
                self.own[prompt.place] = rollouts.pick(rows), graded.pick(rows)
            self.errors += graded.errors
            self.timeouts.update(graded.timeouts)
            self.errors_by_term.update(graded.errors_by_term)
        self._ungraded += ranks.sum([num_ungraded])[0]
        self.groups += ranks.exchange([_group(prompt, *self.own[prompt.place]) for prompt in mine])
        self.count += 1
        refuse_ungraded(run, self._ungraded, len(self.groups) * run.spec.rollout.n, self.errors)

    def _generate(self, mine: list[DrawnPrompt], first: int, count: int) -> Rollouts:
        run, spec = self._run, self._run.spec
        prompts = run.train_prompts.prompts(
            [prompt.row for prompt in mine], [prompt.place - first for prompt in mine]
        )
        purpose = f"train/{self.count}" if self.count else "train"
        seed = step_seed(spec.trainer.seed, self._step, purpose)
        return run.rollout.generate(
            prompts, sampling_of(spec), n=spec.rollout.n, step_seed=seed, num_groups_total=count
        )


def _group(drawn: DrawnPrompt, rollouts: Rollouts, graded: RewardResult) -> _Group:
    scores, valid = graded.graded, graded.valid & ~rollouts.aborted.cpu()
    differs = bool(has_spread(scores, torch.zeros(len(scores), dtype=torch.int64), valid).any())
    mean = float(scores[valid].mean()) if valid.any() else 0.0
    tokens = int(rollouts.response_mask.sum())
    return _Group(drawn, differs, mean, int(valid.sum()), tokens)


def draw_next_prompts(run: Run, draws: PromptDraws, count: int, first: int) -> list[DrawnPrompt]:
    """Draws the next prompts; a curriculum accepts each with the probability that its group has spread."""
    spec, options = run.spec, run.spec.algorithm.filter_groups
    drawn: list[DrawnPrompt] = []
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
        drawn.append(DrawnPrompt(first + len(drawn), row, chance))
    return drawn


def _shared_out(
    run: Run, own: Mapping[int, tuple[Rollouts, RewardResult]], used: list[DrawnPrompt]
) -> tuple[Rollouts, RewardResult]:
    """The groups that this rank trains on; groups sampled on other ranks are transferred."""
    spec, ranks = run.spec, run.ranks
    sizes = (spec.data.train_batch_size, spec.ppo_mini_batch_size)
    takes = {
        place: rank
        for rank in range(ranks.world_size)
        for place in rank_positions(*sizes, rank=rank, world_size=ranks.world_size)
    }
    leaving = {
        place: (own[prompt.place][0].to("cpu"), own[prompt.place][1])
        for place, prompt in enumerate(used)
        if takes[place] != ranks.rank and prompt.place in own
    }
    arrived = dict(ranks.exchange(list(leaving.items())))
    parts, grades = [], []
    for place in rank_positions(*sizes, rank=ranks.rank, world_size=ranks.world_size):
        prompt = used[place]
        part, graded = own[prompt.place] if prompt.place in own else arrived[place]
        weight = None
        if spec.algorithm.filter_groups.curriculum:
            weight = torch.full((len(part.group_ids),), 1.0 / prompt.chance, device=ranks.device)
        ids = torch.full_like(part.group_ids, place)
        parts.append(replace(part.to(ranks.device), group_ids=ids.to(ranks.device), prompt_weights=weight))
        grades.append(graded)
    return Rollouts.joined(parts), RewardResult.joined(grades)


def _metrics(groups: list[_Group], used: list[_Group], rounds: int, n: int, drawn: int) -> dict[str, float]:
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
