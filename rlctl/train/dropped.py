"""Entries of `dropped.jsonl`, see `rlctl.track.dropped`, for sampled episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.track.dropped import DroppedEpisode

if TYPE_CHECKING:
    from rlctl.episodes import Episodes
    from rlctl.reward.protocol import RewardResult


def as_dropped(
    episodes: Episodes, rewards: RewardResult, index: int, age: int, reason: str
) -> DroppedEpisode:
    """The entry of one of the episodes; `age` in optimizer updates, if anything was sampled."""
    task = episodes.tasks[index]
    length = int(episodes.num_sampled[index])
    is_known = bool(rewards.valid[index]) and not episodes.errors[index]
    return DroppedEpisode(
        group_id=task.group_id,
        member=int(episodes.tokens.members[index]),
        row=task.row,
        reason=reason,
        length=length,
        age=age if length else 0,
        reward=float(rewards.scores[index]) if is_known else None,
        prompt=task.text,
    )
