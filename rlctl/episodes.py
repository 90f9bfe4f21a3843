"""What was sampled, as columns: the `Turns` of an engine, the `Episodes` of environments.

Both are lists of records, of which each is made when something asks for it: an environment, a dump, a user's
code. Training reads the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlctl.algos.segments import Segments
from rlctl.batch import Episode, Task, TokenBatch, TokenLists, TokenSequence, Turn
from rlctl.lazy import numpy as np
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Finish reason of a turn → stop reason of an episode that ends with it.
STOP_REASONS = {"stop": "completed", "length": "max_tokens", "abort": "aborted"}


@dataclass(frozen=True)
class Turns(Sequence[Turn]):
    """What one call of an engine sampled: T turns of M tokens, see `Turn`."""

    token_ids: Tensor  # (M,) int64
    log_probs: Tensor  # (M,) float32
    versions: Tensor  # (M,) int64
    lengths: Tensor  # (T,) int64
    finish_reasons: Sequence[str]  # (T,)
    kept: TokenLists | None = None  # (M)
    most_likely: TokenLists | None = None  # (M)
    experts: Sequence[Tensor | None] = ()  # (T,) or empty: none were reported

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Turns:
        """The columns of these turns."""
        if isinstance(turns, Turns):
            return turns
        if not turns:
            none = torch.empty(0, dtype=torch.int64)
            return cls(none, none.float(), none, none, [])
        experts = [turn.experts for turn in turns]
        lengths = [turn.token_ids.numel() for turn in turns]
        return cls(
            token_ids=torch.cat([turn.token_ids for turn in turns]),
            log_probs=torch.cat([turn.log_probs for turn in turns]),
            versions=torch.cat([turn.versions for turn in turns]),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            finish_reasons=[turn.finish_reason for turn in turns],
            kept=TokenLists.of_each([turn.kept for turn in turns], lengths),
            most_likely=TokenLists.of_each([turn.most_likely for turn in turns], lengths),
            experts=[] if all(each is None for each in experts) else experts,
        )

    def __len__(self) -> int:
        return len(self.finish_reasons)

    def __getitem__(self, index: Any) -> Any:
        """The turn at this place, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._ends[index] - self._sizes[index]
        end = self._ends[index]
        return Turn(
            token_ids=self.token_ids[start:end],
            log_probs=self.log_probs[start:end],
            versions=self.versions[start:end],
            finish_reason=self.finish_reasons[index],
            kept=None if self.kept is None else self.kept.between(start, end),
            most_likely=None if self.most_likely is None else self.most_likely.between(start, end),
            experts=self.experts[index] if self.experts else None,
        )

    @cached_property
    def _sizes(self) -> list[int]:
        return self.lengths.tolist()

    @cached_property
    def _ends(self) -> list[int]:
        return self.lengths.cumsum(0).tolist()


def joined_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    """(N,) int64: the tokens of all rows, one row after the other; a fifth of the time of `torch.tensor`."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), np.int64))


def joined_turns(calls: Sequence[Turns]) -> Turns:
    """The turns of several calls with the same sampling, one call after the other."""
    if len(calls) == 1:
        return calls[0]
    if not calls:
        return Turns.of([])
    lists = {
        name: [getattr(call, name) for call in calls if getattr(call, name) is not None]
        for name in ("kept", "most_likely")
    }
    return Turns(
        token_ids=torch.cat([call.token_ids for call in calls]),
        log_probs=torch.cat([call.log_probs for call in calls]),
        versions=torch.cat([call.versions for call in calls]),
        lengths=torch.cat([call.lengths for call in calls]),
        finish_reasons=[reason for call in calls for reason in call.finish_reasons],
        **{name: TokenLists.joined(each) if each else None for name, each in lists.items()},
        experts=[each for call in calls for each in call.experts],
    )


@dataclass(frozen=True)
class Episodes(Sequence[Episode]):
    """E episodes, see `Episode`: their tokens as one batch on the CPU, everything else as lists (E,)."""

    tokens: TokenBatch
    tasks: Sequence[Task]
    responses: Sequence[str]
    stop_reasons: Sequence[str]
    rewards: Sequence[float | None]
    errors: Sequence[str]
    metrics: Sequence[Mapping[str, float]]
    messages: Sequence[tuple[Mapping[str, Any], ...]]

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> Episodes:
        """The columns of these episodes."""
        if isinstance(episodes, Episodes):
            return episodes
        return cls(
            tokens=TokenBatch.of(episodes),
            tasks=[episode.task for episode in episodes],
            responses=[episode.response for episode in episodes],
            stop_reasons=[episode.stop_reason for episode in episodes],
            rewards=[episode.reward for episode in episodes],
            errors=[episode.error for episode in episodes],
            metrics=[episode.metrics for episode in episodes],
            messages=[episode.messages for episode in episodes],
        )

    @classmethod
    def of_turns(
        cls, members: Sequence[tuple[Task, int]], turns: Turns, responses: Sequence[str]
    ) -> Episodes:
        """Episodes of one turn each, which reads the prompt of its task."""
        tasks = [task for task, _ in members]
        count = len(members)
        prompts = [task.prompt_ids for task in tasks]
        read = torch.tensor([*map(len, prompts)], dtype=torch.int64)
        sequences = Segments(read + turns.lengths)
        sampled = sequences.places >= sequences.spread(read)
        token_ids = torch.empty(len(sampled), dtype=torch.int64)
        token_ids[sampled] = turns.token_ids
        token_ids[~sampled] = joined_ids(prompts)
        tokens = TokenBatch(
            token_ids=token_ids,
            sampled=sampled,
            lengths=sequences.lengths,
            owners=torch.arange(count),
            group_ids=torch.tensor([task.group_id for task in tasks], dtype=torch.int64),
            members=torch.tensor([member for _, member in members], dtype=torch.int64),
            prompt_weights=torch.tensor([task.weight for task in tasks], dtype=torch.float32),
            rollout_log_probs=turns.log_probs,
            versions=turns.versions,
            turns=torch.zeros_like(turns.token_ids),
            rewards=torch.zeros(len(turns.token_ids), dtype=torch.float64),
        )
        columns = {
            "kept": turns.kept,
            "most_likely": turns.most_likely,
            "experts": _experts(turns, sequences),
        }
        return cls(
            tokens=tokens.with_columns(**columns),
            tasks=tasks,
            responses=responses,
            stop_reasons=[STOP_REASONS[reason] for reason in turns.finish_reasons],
            rewards=[None] * count,
            errors=[""] * count,
            metrics=[{}] * count,
            messages=[()] * count,
        )

    @classmethod
    def joined(cls, parts: Sequence[Episodes]) -> Episodes:
        """The episodes of all parts, one part after the other."""
        parts = [episodes for episodes in parts if len(episodes)]
        if not parts:
            return cls.of([])
        if len(parts) == 1:
            return parts[0]
        lists = {}
        for name in _LISTS:
            lists[name] = [*chain.from_iterable(getattr(episodes, name) for episodes in parts)]
        return cls(tokens=TokenBatch.joined([episodes.tokens for episodes in parts]), **lists)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        """The episode at this place, or those of a slice."""
        if isinstance(index, slice):
            return self.pick(range(*index.indices(len(self))))
        start = self._first_sequences[index]
        end = self._first_sequences[index] + self._num_sequences[index]
        return Episode(
            task=self.tasks[index],
            member=int(self.tokens.members[index]),
            sequences=tuple(self._sequence(number) for number in range(start, end)),
            response=self.responses[index],
            stop_reason=self.stop_reasons[index],
            reward=self.rewards[index],
            error=self.errors[index],
            metrics=self.metrics[index],
            messages=self.messages[index],
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what was derived from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def pick(self, indices: Sequence[int]) -> Episodes:
        """The episodes at these places, in that order."""
        if list(indices) == list(range(len(self))):
            return self
        lists = {name: [getattr(self, name)[index] for index in indices] for name in _LISTS}
        return Episodes(tokens=self.tokens.pick(indices), **lists)

    def placed(self, group_ids: Mapping[int, int]) -> Episodes:
        """The episodes with other numbers of their groups: present → new."""
        if all(before == after for before, after in group_ids.items()):
            return self
        renamed = {id(task): task.in_group(group_ids[task.group_id]) for task in self.tasks}
        tasks = [renamed[id(task)] for task in self.tasks]
        numbers = torch.tensor([task.group_id for task in tasks], dtype=torch.int64)
        return replace(self, tasks=tasks, tokens=replace(self.tokens, group_ids=numbers))

    @property
    def groups(self) -> list[tuple[Episode, ...]]:
        """The records of adjacent episodes of one task."""
        groups: list[list[Episode]] = []
        for episode in self:
            if not groups or groups[-1][0].task.group_id != episode.task.group_id:
                groups.append([])
            groups[-1].append(episode)
        return [*map(tuple, groups)]

    @cached_property
    def aborted(self) -> Tensor:
        """(E,) bool: the engine ended it; it is excluded from training."""
        return torch.tensor([reason == "aborted" for reason in self.stop_reasons], dtype=torch.bool)

    @cached_property
    def failed(self) -> Tensor:
        """(E,) bool: it has an error, and is excluded from training."""
        return torch.tensor([error != "" for error in self.errors], dtype=torch.bool)

    @property
    def num_sampled(self) -> Tensor:
        """(E,) int64: tokens that the policy sampled."""
        return self.tokens.units.episode.lengths

    @cached_property
    def num_prompt(self) -> Tensor:
        """(E,) int64: tokens that its first turn read; those of the rendered row if nothing was sampled."""
        tokens = self.tokens
        first = self.tokens.sequences_of_episodes
        read = torch.tensor([*map(len, [task.prompt_ids for task in self.tasks])], dtype=torch.int64)
        places = torch.where(tokens.sampled, tokens.sequences.places, tokens.sequences.total)
        begun = -tokens.sequences.max(-places).long()
        speaks = (first.lengths > 0).nonzero().squeeze(1)
        speaks = speaks[tokens.units.sequence.lengths[first.starts[speaks]] > 0]
        read[speaks] = begun[first.starts[speaks]]
        return read

    def ages(self, policy_version: int) -> Tensor:
        """(E,) float64: optimizer updates from the weights that sampled the oldest token to these.

        0 for an episode without sampled tokens.
        """
        return self.tokens.units.episode.max(policy_version - self.tokens.versions).clamp(min=0)

    def _sequence(self, number: int) -> TokenSequence:
        tokens = self.tokens
        start, end = self._spans[number]
        first, last = self._sampled_spans[number]
        kept, most_likely = (
            None if column is None else column.between(first, last)
            for column in (tokens.columns.get("kept"), tokens.columns.get("most_likely"))
        )
        experts = tokens.columns.get("experts")
        return TokenSequence(
            token_ids=tokens.token_ids[start:end],
            sampled=tokens.sampled[start:end],
            log_probs=tokens.rollout_log_probs[first:last],
            versions=tokens.versions[first:last],
            turns=tokens.turns[first:last],
            rewards=tokens.rewards[first:last],
            kept=kept,
            most_likely=most_likely,
            experts=None if experts is None else experts[start:end],
        )

    @cached_property
    def _first_sequences(self) -> list[int]:
        return self.tokens.sequences_of_episodes.starts.tolist()

    @cached_property
    def _num_sequences(self) -> list[int]:
        return self.tokens.sequences_of_episodes.lengths.tolist()

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return _spans_of(self.tokens.sequences)

    @cached_property
    def _sampled_spans(self) -> list[tuple[int, int]]:
        return _spans_of(self.tokens.units.sequence)


#: Fields that are lists with an entry per episode.
_LISTS = tuple(each.name for each in fields(Episodes) if each.name != "tokens")


def _spans_of(segments: Segments) -> list[tuple[int, int]]:
    """Start and end of each segment."""
    starts = segments.starts
    return list(zip(starts.tolist(), (starts + segments.lengths).tolist(), strict=True))


def _experts(turns: Turns, sequences: Segments) -> Tensor | None:
    """(N, layers, k) int16: those that computed each token of single turns; −1: not reported."""
    reported = [each for each in turns.experts if each is not None]
    if not reported:
        return None
    column = reported[0].new_full((sequences.total, *reported[0].shape[1:]), -1)
    for own, (_, end) in zip(turns.experts, _spans_of(sequences), strict=True):
        if own is not None:
            column[end - 1 - len(own) : end - 1] = own
    return column
