"""Which sampled episodes were not trained on, why, and what this may hide of the mean reward.

Every such episode is a line of `dropped.jsonl`. If the reward of some is unknown, but its range is declared,
the mean reward of all that was sampled lies between two bounds, whatever they would have scored:

    (Σ known + U · least) / N ≤ mean ≤ (Σ known + U · most) / N,   U of N rewards unknown

(worst-case bounds of a partly observed mean: Manski 1989, "Anatomy of the Selection Problem"). Beside them
stands an estimate that assumes that episodes of about the same length are dropped whatever they score: the
known rewards, each over the share of its length that is known. It is an estimate, not a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.environment.protocol import PROMPT_OVERLONG
from rlctl.evaluate.scores import score_range
from rlctl.track.dropped import DroppedEpisode

if TYPE_CHECKING:
    from rlctl.episodes import Episodes
    from rlctl.reward.protocol import Graded, RewardResult
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.run import Run

#: Lengths are compared in classes of 1, 2–3, 4–7, … tokens, the last of 2²³ and more; 0 is one of its own.
_CLASSES = 25
#: Rounding of a score in float32 beyond the ends of its range.
_SLACK = 1e-5


def dropped_episodes(
    spec: RunSpec, graded: Graded, policy_version: int, *, withheld: bool
) -> list[DroppedEpisode]:
    """Those that this rank sampled for a step and that no update was made of, in order.

    Args:
        policy_version: the trainer's before the updates of the step.
        withheld: every update of the batch was withheld.
    """
    limit = spec.rollout.max_age_updates if spec.rollout.beyond_max_age == "drop" else None
    episodes = graded.episodes
    ages = episodes.ages(policy_version)
    is_old = ages > (math.inf if limit is None else limit)
    is_dropped = ~graded.valid | episodes.failed | is_old
    places = range(len(episodes)) if withheld else is_dropped.nonzero().squeeze(1).tolist()
    found = list(graded.dropped)
    for place in places:
        if episodes.stop_reasons[place] == PROMPT_OVERLONG:
            reason = "the prompt is too long"
        elif episodes.errors[place]:
            reason = f"the environment failed: {episodes.errors[place].strip().splitlines()[-1][:200]}"
        elif episodes.stop_reasons[place] == "aborted":
            reason = "the engine aborted it"
        elif not graded.valid[place]:
            reason = "it could not be graded"
        elif is_old[place]:
            reason = f"older than rollout.max_age_updates: {limit}"
        else:
            reason = "every update of its batch was withheld"
        found.append(as_dropped(episodes, graded.rewards, place, int(ages[place]), reason))
    return found


def as_dropped(
    episodes: Episodes, rewards: RewardResult, place: int, age: int, reason: str
) -> DroppedEpisode:
    """The entry of an episode in the ledger; `age` in optimizer updates."""
    task, length = episodes.tasks[place], int(episodes.num_sampled[place])
    is_known = bool(rewards.valid[place]) and not episodes.errors[place]
    return DroppedEpisode(
        group_id=task.group_id,
        member=int(episodes.tokens.members[place]),
        row=task.row,
        reason=reason,
        length=length,
        age=age if length else 0,
        reward=float(rewards.scores[place]) if is_known else None,
        prompt=task.text,
    )


@dataclass(frozen=True, slots=True)
class _Tally:
    """Sums over all that was sampled, by class of length: number, number of known rewards, their sum."""

    sums: list[float]

    @classmethod
    def of(cls, lengths: Sequence[int], rewards: Sequence[float | None]) -> _Tally:
        sums = [0.0] * (3 * _CLASSES)
        for length, reward in zip(lengths, rewards, strict=True):
            at = 3 * min(length.bit_length(), _CLASSES - 1)
            sums[at] += 1.0
            if reward is not None:
                sums[at + 1] += 1.0
                sums[at + 2] += reward
        return cls(sums)

    def metrics(self, ends: tuple[float, float] | None) -> dict[str, float]:
        """`dropped/reward_*`, from the sums of all ranks; `ends`: least and greatest reward."""
        classes = [self.sums[at : at + 3] for at in range(0, len(self.sums), 3)]
        total, known, score = (sum(column) for column in zip(*classes, strict=True))
        if not known or known == total:
            return {}
        metrics = {}
        if ends is not None:
            low, high = ((score + (total - known) * end) / total for end in ends)
            metrics = {"dropped/reward_low": low, "dropped/reward_high": high}
        if all(count for number, count, _ in classes if number):  # else a class has no known reward
            means = (number * own / count for number, count, own in classes if number)
            metrics["dropped/reward_by_length"] = sum(means) / total
        return metrics


def account_for_dropped(
    run: Run, step: int, graded: Graded, policy_version: int, *, withheld: bool
) -> dict[str, float]:
    """Writes the dropped episodes of a step of all ranks; returns `dropped/*` (all ranks call this).

    Nothing is logged of a step without any.
    """
    own = dropped_episodes(run.spec, graded, policy_version, withheld=withheld)
    [count] = run.ranks.sum([float(len(own))])
    if not count:
        return {}
    every = [one for of_rank in run.ranks.exchange([own]) for one in of_rank]
    if run.dropped:
        run.dropped.add(step, sorted(every, key=lambda one: (one.group_id, one.member)))
    lengths, rewards = all_sampled(graded)
    totals = run.ranks.sum([float(len(lengths)), *_Tally.of(lengths, rewards).sums])
    ends = _ends(run, graded)
    return {
        "dropped/episodes": count,
        "dropped/fraction": count / totals[0],
        **_Tally(totals[1:]).metrics(ends),
    }


def all_sampled(graded: Graded) -> tuple[list[int], list[float | None]]:
    """Length in sampled tokens, and reward, of every episode that this rank sampled; None: not graded."""
    lengths = [int(length) for length in graded.episodes.num_sampled]
    is_known = graded.rewards.valid & ~graded.episodes.failed & ~graded.episodes.aborted
    pairs = zip(graded.rewards.scores.tolist(), is_known.tolist(), strict=True)
    rewards: list[float | None] = [score if known else None for score, known in pairs]
    return (
        [*lengths, *(one.length for one in graded.dropped)],
        [*rewards, *(one.reward for one in graded.dropped)],
    )


def _ends(run: Run, graded: Graded) -> tuple[float, float] | None:
    """Least and greatest reward, if a declaration gives them on every rank."""
    reward, episodes = run.spec.reward, graded.episodes
    changes = bool(reward.overlong.buffer_length) or any(own is not None for own in episodes.rewards)
    ends = None
    if reward.score_range is not None or not changes:  # else other parts are added to the graders' scores
        ends = score_range(reward, sources={task.data_source for task in episodes.tasks})
    scores = [score for score in all_sampled(graded)[1] if score is not None]
    is_outside = ends is not None and any(not ends[0] - _SLACK <= x <= ends[1] + _SLACK for x in scores)
    [unknown] = run.ranks.sum([float(ends is None or is_outside)])
    return None if unknown else ends
