"""Records what an episode's turns read and sampled, as the sequences that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rlctl.batch import TokenLists, TokenSequence, Turn, joined_experts


@dataclass(slots=True)
class _Stream:
    """One sequence while it grows: all of its tokens, and where they were sampled."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: list[tuple[int, Turn]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # number of tokens up to the end of each turn


class Recorder:
    """The sequences of one episode.

    A turn that reads all tokens of a sequence continues it; any other context begins a new one. What was
    sampled in an earlier sequence is context in a later one, so every sampled token is trained on once.
    """

    def __init__(self) -> None:
        self._streams: list[_Stream] = []
        self.num_turns = 0
        self.num_sampled = 0

    def add(self, token_ids: Sequence[int], turn: Turn) -> None:
        """A turn, and the tokens that it read."""
        given = list(token_ids)
        sampled = turn.token_ids.tolist()
        known = [one for one in self._streams if given[: len(one.token_ids)] == one.token_ids]
        stream = max(known, key=lambda one: len(one.token_ids), default=None)
        if stream is None:
            stream = _Stream()
            self._streams.append(stream)
        new = given[len(stream.token_ids) :]
        stream.token_ids += new + sampled
        stream.sampled += [False] * len(new) + [True] * len(sampled)
        stream.turns.append((self.num_turns, turn))
        stream.ends.append(len(stream.token_ids))
        self.num_turns += 1
        self.num_sampled += len(sampled)

    def sequences(self, turn_rewards: Sequence[float] = ()) -> tuple[TokenSequence, ...]:
        """The sequences, with the rewards of turns at their last tokens.

        Raises:
            ValueError: there are rewards, but not one per turn.
        """
        if turn_rewards and len(turn_rewards) != self.num_turns:
            raise ValueError(f"{len(turn_rewards)} rewards of {self.num_turns} turns")
        return tuple(_sequence(stream, turn_rewards) for stream in self._streams)


def _sequence(stream: _Stream, turn_rewards: Sequence[float]) -> TokenSequence:
    numbers, turns = zip(*stream.turns, strict=True)
    lengths = [len(turn.token_ids) for turn in turns]
    rewards = None
    if turn_rewards:
        rewards = torch.zeros(sum(lengths), dtype=torch.float64)
        for number, length, end in zip(numbers, lengths, accumulate(lengths), strict=True):
            if length:
                rewards[end - 1] = turn_rewards[number]
    kept = [turn.kept for turn in turns if turn.kept is not None]
    most_likely = [turn.most_likely for turn in turns if turn.most_likely is not None]
    return TokenSequence(
        token_ids=torch.tensor(stream.token_ids, dtype=torch.int64),
        sampled=torch.tensor(stream.sampled, dtype=torch.bool),
        log_probs=torch.cat([turn.log_probs for turn in turns]),
        versions=torch.cat([turn.versions for turn in turns]),
        turns=torch.tensor(numbers).repeat_interleave(torch.tensor(lengths)),
        rewards=rewards,
        kept=TokenLists.joined(kept) if kept else None,
        most_likely=TokenLists.joined(most_likely) if most_likely else None,
        experts=joined_experts(len(stream.token_ids), list(zip(stream.ends, turns, strict=True))),
    )
