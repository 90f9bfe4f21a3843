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
from rlctl.track.dropped import DroppedLedger
from rlctl.train.capability import Capability
from rlctl.train.dropped import as_dropped

if TYPE_CHECKING:
    from pathlib import Path

    from rlctl.engine.ranks import Ranks
    from rlctl.reward.protocol import Graded
    from rlctl.run_spec.rollout import RewardSpec
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.track.dropped import DroppedEpisode
    from rlctl.train.capability import StepRecord

#: Lengths are compared in classes of 1, 2–3, 4–7, … tokens, the last of 2²³ and more; 0 is one of its own.
_CLASSES = 25
#: Rounding of a score in float32 beyond the ends of its range.
_SLACK = 1e-5


class DroppedEpisodes(Capability):
    """See the module."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._ledger: DroppedLedger | None = None

    def open_records(self, run_dir: Path, last_step: int) -> None:
        """Opens `dropped.jsonl`."""
        self._ledger = DroppedLedger(run_dir, keep_until=last_step)

    def updated(self, record: StepRecord) -> dict[str, float]:
        """Writes the dropped episodes of a step of all ranks; returns `dropped/*`.

        Nothing is logged of a step without any.
        """
        ranks = record.ranks
        graded = record.graded
        own = dropped_episodes(self._spec, graded, record.policy_version, withheld=record.withheld)
        [num_dropped] = ranks.sum([float(len(own))])
        if not num_dropped:
            return {}
        dropped = [episode for of_rank in ranks.exchange([own]) for episode in of_rank]
        if self._ledger:
            dropped.sort(key=lambda episode: (episode.group_id, episode.member))
            self._ledger.add(record.step, dropped)
        lengths, rewards = all_sampled(graded)
        num_sampled, *sums = ranks.sum([float(len(lengths)), *_Tally.of(lengths, rewards).sums])
        metrics = {"dropped/episodes": num_dropped, "dropped/fraction": num_dropped / num_sampled}
        return metrics | _Tally(sums).metrics(_ends(self._spec.reward, graded, ranks))


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
    dropped: list[DroppedEpisode] = list(graded.dropped)
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
        dropped.append(as_dropped(episodes, graded.rewards, place, int(ages[place]), reason))
    return dropped


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
        total, known, score = (sum(self.sums[offset::3]) for offset in range(3))
        if not known or known == total:
            return {}
        metrics = {}
        num_unknown = total - known
        if ends is not None:
            least, greatest = ends
            metrics["dropped/reward_low"] = (score + num_unknown * least) / total
            metrics["dropped/reward_high"] = (score + num_unknown * greatest) / total
        estimate = 0.0
        for at in range(0, len(self.sums), 3):
            number_of_class, known_of_class, score_of_class = self.sums[at : at + 3]
            if number_of_class and not known_of_class:  # the estimate needs a known reward in each class
                return metrics
            if known_of_class:
                estimate += number_of_class * score_of_class / known_of_class
        return metrics | {"dropped/reward_by_length": estimate / total}


def all_sampled(graded: Graded) -> tuple[list[int], list[float | None]]:
    """Length in sampled tokens, and reward, of every episode that this rank sampled; None: not graded."""
    lengths: list[int] = graded.episodes.num_sampled.tolist()
    is_known = graded.rewards.valid & ~graded.episodes.failed & ~graded.episodes.aborted
    rewards: list[float | None] = []
    for score, known in zip(graded.rewards.scores.tolist(), is_known.tolist(), strict=True):
        rewards.append(score if known else None)
    for episode in graded.dropped:
        lengths.append(episode.length)
        rewards.append(episode.reward)
    return lengths, rewards


def _ends(reward: RewardSpec, graded: Graded, ranks: Ranks) -> tuple[float, float] | None:
    """Least and greatest reward, if a declaration gives them on every rank (all ranks call this)."""
    own = _own_ends(reward, graded)
    [num_unknown] = ranks.sum([float(own is None)])
    return None if num_unknown else own


def _own_ends(reward: RewardSpec, graded: Graded) -> tuple[float, float] | None:
    """Least and greatest reward; None: not declared, or a reward of this rank is outside."""
    episodes = graded.episodes
    has_own_rewards = any(own is not None for own in episodes.rewards)
    if reward.score_range is None and (reward.overlong.buffer_length or has_own_rewards):
        return None  # other parts are added to the graders' scores
    ends = score_range(reward, sources={task.data_source for task in episodes.tasks})
    if ends is None:
        return None
    least, greatest = ends
    _, rewards = all_sampled(graded)
    for score in rewards:
        if score is not None and not least - _SLACK <= score <= greatest + _SLACK:
            return None
    return ends


def capability(spec: RunSpec) -> Capability:
    """The account of a run."""
    return DroppedEpisodes(spec)
