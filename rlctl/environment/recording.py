"""Records what an episode's turns read and sampled, as the sequences that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rlctl.batch import TokenLists, TokenSequence, Turn, joined_experts


@dataclass(slots=True)
class _GrowingSequence:
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
        self._growing: list[_GrowingSequence] = []
        self.num_turns = 0
        self.num_sampled = 0

    def add(self, token_ids: Sequence[int], turn: Turn) -> None:
        """A turn, and the tokens that it read."""
        context = list(token_ids)
        sampled = turn.token_ids.tolist()
        continued = [each for each in self._growing if context[: len(each.token_ids)] == each.token_ids]
        sequence = max(continued, key=lambda each: len(each.token_ids), default=None)
        if sequence is None:
            sequence = _GrowingSequence()
            self._growing.append(sequence)
        new = context[len(sequence.token_ids) :]
        sequence.token_ids += new + sampled
        sequence.sampled += [False] * len(new) + [True] * len(sampled)
        sequence.turns.append((self.num_turns, turn))
        sequence.ends.append(len(sequence.token_ids))
        self.num_turns += 1
        self.num_sampled += len(sampled)

    def sequences(self, turn_rewards: Sequence[float] = ()) -> tuple[TokenSequence, ...]:
        """The sequences, with the rewards of turns at their last tokens.

        Raises:
            ValueError: there are rewards, but not one per turn.
        """
        if turn_rewards and len(turn_rewards) != self.num_turns:
            raise ValueError(f"{len(turn_rewards)} rewards of {self.num_turns} turns")
        return tuple(_sequence(growing, turn_rewards) for growing in self._growing)


def _sequence(growing: _GrowingSequence, turn_rewards: Sequence[float]) -> TokenSequence:
    numbers, turns = zip(*growing.turns, strict=True)
    lengths = [len(turn.token_ids) for turn in turns]
    rewards = None
    if turn_rewards:
        rewards = torch.zeros(sum(lengths), dtype=torch.float64)
        for number, length, end in zip(numbers, lengths, accumulate(lengths), strict=True):
            if length:
                rewards[end - 1] = turn_rewards[number]
    return TokenSequence(
        token_ids=torch.tensor(growing.token_ids, dtype=torch.int64),
        sampled=torch.tensor(growing.sampled, dtype=torch.bool),
        log_probs=torch.cat([turn.log_probs for turn in turns]),
        versions=torch.cat([turn.versions for turn in turns]),
        turns=torch.tensor(numbers).repeat_interleave(torch.tensor(lengths)),
        rewards=rewards,
        kept=TokenLists.of_each([turn.kept for turn in turns], lengths),
        most_likely=TokenLists.of_each([turn.most_likely for turn in turns], lengths),
        experts=joined_experts(len(growing.token_ids), list(zip(growing.ends, turns, strict=True))),
    )
