"""The records of a step, in order of computation: Task → Turn → Sequence → Episode → Group → TokenBatch.

Letters: E episodes of S sequences have N tokens, of which M were sampled by the policy. All that is computed
is a column of the M sampled tokens, in order: whatever was not sampled (prompt, output of a tool) is read by
attention only. Log-probs are nats in float32 at the sampling temperature, of the token itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlctl.algos.segments import Segments, Units
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Why a sampler ends a turn: an end-of-sequence token, the length limit, or a fault of the engine.
FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class TokenLists:
    """A list of tokens at each of n places: a column of lists.

    Either those that truncation (top-p, top-k, min-p) kept, or the most likely ones with their log-probs.

    Example: two tokens sampled from {3, 7} and {5} have `counts` [2, 1] and `ids` [3, 7, 5].
    """

    counts: Tensor  # (n,) int32, 0: the whole vocabulary
    ids: Tensor  # (Σ counts,) int32: the concatenated lists
    log_probs: Tensor | None = None  # (Σ counts,) float32 nats under the sampling distribution

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, places: Tensor) -> TokenLists:
        """The lists at these places: (k,) int64 indices, in that order, or an (n,) bool mask."""
        chosen = places.nonzero().squeeze(1) if places.dtype == torch.bool else places
        taken = Segments(self.counts.long()).entries_of(chosen)
        log_probs = None if self.log_probs is None else self.log_probs[taken]
        return TokenLists(self.counts[chosen], self.ids[taken], log_probs)

    def padded(self) -> tuple[Tensor, Tensor]:
        """Ids (n, K) int64 and log-probs (n, K); shorter lists are padded with id 0 and log-prob −∞."""
        assert self.log_probs is not None
        lists = Segments(self.counts.long())
        return lists.padded(self.ids.long(), 0), lists.padded(self.log_probs, -torch.inf)

    def without(self, tokens: Tensor) -> Tensor:
        """(n,) bool: the list does not contain the token (n,) of its place, and is not the vocabulary."""
        lists = Segments(self.counts.long())
        return (self.counts > 0) & ~lists.any(self.ids == lists.spread(tokens))

    @classmethod
    def joined(cls, parts: Many[TokenLists]) -> TokenLists:
        """The places of all parts, one part after the other."""
        log_probs = [part.log_probs for part in parts if part.log_probs is not None]
        columns = torch.cat([part.counts for part in parts]), torch.cat([part.ids for part in parts])
        return cls(*columns, torch.cat(log_probs) if log_probs else None)

    def to(self, device: Any) -> TokenLists:
        """The same data on `device`."""
        log_probs = None if self.log_probs is None else self.log_probs.to(device)
        return TokenLists(self.counts.to(device), self.ids.to(device), log_probs)


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data, as an environment reads it."""

    prompt_ids: Many[int]  # the rendered prompt as tokens
    text: str  # the rendered prompt, for dumps and graders
    group_id: int = 0  # index of the prompt in the whole batch, over all ranks
    row: int = 0  # index of the row in the data
    data_source: str = ""  # selects the grader
    ground_truth: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # of the row, JSON-able
    messages: tuple[Mapping[str, Any], ...] = ()  # the prompt as {role, content}
    environment: str = ""  # one of those that the spec names; empty: `environment.name`
    weight: float = 1.0  # factor of the advantages: 1 / P(prompt drawn)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call of an engine sampled; t tokens, end of sequence included."""

    token_ids: Tensor  # (t,) int64
    log_probs: Tensor  # (t,) float32, under the sampling distribution
    versions: Tensor  # (t,) int64, number of optimizer updates in the weights that sampled the token
    finish_reason: str  # stop, length or abort, see `FINISH_REASONS`
    kept: TokenLists | None = None  # (t) with exact sampling: the set that each token was sampled from
    most_likely: TokenLists | None = None  # (t) with score centering: the sampler's most likely tokens
    #: (r, layers, k) int16 with routing replay: of the r tokens before the last one, context included
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One stream of L tokens that is trained on; m of them were sampled. It begins with a token that was not.

    All but `token_ids`, `sampled` and `experts` are columns of the m sampled tokens.
    """

    token_ids: Tensor  # (L,) int64
    sampled: Tensor  # (L,) bool
    log_probs: Tensor  # (m,) float32
    versions: Tensor  # (m,) int64
    turns: Tensor  # (m,) int64, number of the turn within its episode, ascending
    rewards: Tensor | None = None  # (m,) float32, of the environment; None: the episode has a score only
    kept: TokenLists | None = None  # (m)
    most_likely: TokenLists | None = None  # (m)
    experts: Tensor | None = None  # (L, layers, k) int16, see `joined_experts`

    @classmethod
    def of_turn(cls, prompt_ids: Many[int], turn: Turn, number: int = 0) -> Sequence:
        """A prompt and what was sampled after it."""
        token_ids = torch.cat([torch.as_tensor(prompt_ids, dtype=torch.int64), turn.token_ids])
        length = token_ids.numel()  # a tenth of the time of `len`
        return cls(
            token_ids=token_ids,
            sampled=torch.arange(length) >= len(prompt_ids),
            log_probs=turn.log_probs,
            versions=turn.versions,
            turns=torch.full_like(turn.token_ids, number),
            kept=turn.kept,
            most_likely=turn.most_likely,
            experts=joined_experts(length, [(length, turn)]),
        )


def joined_experts(length: int, turns: Many[tuple[int, Turn]]) -> Tensor | None:
    """(length, layers, k) int16: the experts that computed the tokens of a sequence; −1: not reported.

    Args:
        turns: number of the sequence's tokens up to the turn's last one; the turn. What a turn reports of
            tokens that an earlier one computed is not used: their log-probs are the earlier one's.
    """
    found = None
    for end, turn in reversed(turns):
        if turn.experts is not None:
            if found is None:
                found = turn.experts.new_full((length, *turn.experts.shape[1:]), -1)
            found[end - 1 - len(turn.experts) : end - 1] = turn.experts
    return found


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment made of a task: sequences to train on, and what graders, dumps and metrics read."""

    task: Task
    member: int  # index within its group
    sequences: tuple[Sequence, ...]
    response: str  # text that graders read
    stop_reason: str = "completed"  # or max_tokens, aborted, …
    #: of the environment itself, those of turns included, added to the graders'; None: it gives none
    reward: float | None = None
    error: str = ""  # why the episode is excluded from training; empty: it is not
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, for display; empty: prompt and response

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens ended it."""
        return self.stop_reason == "max_tokens"

    @property
    def aborted(self) -> bool:
        """Whether the engine ended it; it is excluded from training."""
        return self.stop_reason == "aborted"

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(sequence.log_probs.numel() for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(sequence.token_ids.numel() for sequence in self.sequences)


#: The episodes of one task: unit of the queue, of filtering, of staleness.
Group = tuple[Episode, ...]


#: What a field of `TokenBatch` has one entry of: tokens (N,), sequences (S,), episodes (E,); all others are
#: columns of the sampled tokens (M,).
LEVELS = {
    **dict.fromkeys(("token_ids", "sampled", "experts"), "token"),
    **dict.fromkeys(("lengths", "owners"), "sequence"),
    **dict.fromkeys(
        ("group_ids", "members", "prompt_weights", "baseline_scores", "sequence_weights"), "episode"
    ),
}


@dataclass(frozen=True)
class TokenBatch:
    """E episodes as one flat run of tokens; what is None was not computed, or does not exist in this run."""

    token_ids: Tensor  # (N,) int64
    sampled: Tensor  # (N,) bool
    lengths: Tensor  # (S,) int64: tokens of each sequence
    owners: Tensor  # (S,) int64: its episode's index in this batch, ascending
    group_ids: Tensor  # (E,) int64, see `Task`
    members: Tensor  # (E,) int64: index within its group
    prompt_weights: Tensor  # (E,) float32, see `Task.weight`
    rollout_log_probs: Tensor  # (M,) float32
    versions: Tensor  # (M,) int64
    turns: Tensor  # (M,) int64
    rewards: Tensor  # (M,) float32: of the environment, 0.0 if it gives none; in training with the score
    kept: TokenLists | None = None
    most_likely: TokenLists | None = None
    experts: Tensor | None = None  # (N, layers, k) int16: those that computed a token; −1: not reported
    baseline_scores: Tensor | None = None  # (E,) of the greedy response; ReMax
    old_log_probs: Tensor | None = None  # (M,) π_old; in bypass mode π_rollout
    ref_log_probs: Tensor | None = None  # (M,) π_ref
    teacher_log_probs: Tensor | None = None  # (M,) of the teacher
    teacher_top_k: TokenLists | None = None  # (M) its K most likely tokens
    teacher_tail: Tensor | None = None  # (M,) its log-prob of all others together
    values: Tensor | None = None  # (M,) of the critic before its updates
    score_norms: Tensor | None = None  # (M,) ‖∇_logits log π‖²
    sequence_weights: Tensor | None = None  # (E,) Π π/π_rollout
    advantages: Tensor | None = None  # (M,) float32
    returns: Tensor | None = None  # (M,) float32: targets of the values
    age: Tensor | None = None  # (M,) optimizer updates since the sampling weights

    @classmethod
    def of(cls, episodes: Many[Episode], device: Any = "cpu") -> TokenBatch:
        """The tokens of these episodes, in order, on `device`."""
        sequences = [sequence for episode in episodes for sequence in episode.sequences]

        def joined(name: str, dtype: Any) -> Tensor:
            parts = [getattr(sequence, name) for sequence in sequences]
            return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

        def lists(name: str) -> TokenLists | None:
            found = [getattr(sequence, name) for sequence in sequences]
            return TokenLists.joined(found) if found and found[0] is not None else None

        experts = None
        shapes = {sequence.experts.shape[1:] for sequence in sequences if sequence.experts is not None}
        if shapes:
            [shape] = shapes
            none = torch.full((1, *shape), -1, dtype=torch.int16)
            experts = torch.cat(
                [none.expand(len(s.token_ids), *shape) if s.experts is None else s.experts for s in sequences]
            )
        rewards = [torch.zeros_like(s.log_probs) if s.rewards is None else s.rewards for s in sequences]
        owners = [place for place, episode in enumerate(episodes) for _ in episode.sequences]
        batch = cls(
            token_ids=joined("token_ids", torch.int64),
            sampled=joined("sampled", torch.bool),
            lengths=torch.tensor([sequence.token_ids.numel() for sequence in sequences], dtype=torch.int64),
            owners=torch.tensor(owners, dtype=torch.int64),
            group_ids=torch.tensor([e.task.group_id for e in episodes], dtype=torch.int64),
            members=torch.tensor([e.member for e in episodes], dtype=torch.int64),
            prompt_weights=torch.tensor([e.task.weight for e in episodes], dtype=torch.float32),
            rollout_log_probs=joined("log_probs", torch.float32),
            versions=joined("versions", torch.int64),
            turns=joined("turns", torch.int64),
            kept=lists("kept"),
            most_likely=lists("most_likely"),
            rewards=torch.cat([torch.empty(0), *rewards]),
            experts=experts,
        )
        return batch.to(device)

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.group_ids)

    @cached_property
    def sequences(self) -> Segments:
        """The tokens (N,) of each sequence."""
        return Segments(self.lengths)

    @cached_property
    def sequences_of_episodes(self) -> Segments:
        """The sequences (S,) of each episode."""
        return Segments.of_index(self.owners, self.num_episodes)

    @cached_property
    def units(self) -> Units:
        """The sampled tokens (M,) of each turn, sequence and episode."""
        sequence = Segments(self.sequences.sum(self.sampled).long())
        episode = Segments(self.sequences_of_episodes.sum(sequence.lengths).long())
        return Units.nested(sequence, episode, self.turns)

    @property
    def inputs(self) -> ModelInputs:
        """Input of a forward pass over these tokens."""
        listed = self.most_likely if self.teacher_top_k is None else self.teacher_top_k
        return ModelInputs(self.token_ids, self.sampled, self.lengths, self.kept, listed, self.experts)

    def pick(self, episodes: Tensor | Many[int]) -> TokenBatch:
        """The episodes with these indices (k,), in that order."""
        given = episodes if isinstance(episodes, torch.Tensor) else torch.tensor(list(episodes))
        chosen = given.to(self.group_ids.device, torch.int64)
        of_sequences = self.sequences_of_episodes.entries_of(chosen)
        places = {
            "episode": chosen,
            "sequence": of_sequences,
            "token": self.sequences.entries_of(of_sequences),
            "sampled": self.units.episode.entries_of(chosen),
        }
        picked = self.mapped(lambda value, of: value[places[of]])
        counts = self.sequences_of_episodes.lengths[chosen]
        owners = torch.arange(len(chosen), device=chosen.device).repeat_interleave(counts)
        return replace(picked, owners=owners)

    def to(self, device: Any) -> TokenBatch:
        """The same data on `device`."""
        return self.mapped(lambda value, _: value.to(device))

    def mapped(self, change: Any) -> TokenBatch:
        """The batch with every field changed by (value, its level) → value, unless it is None."""
        columns: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        for name, value in columns.items():
            columns[name] = None if value is None else change(value, LEVELS.get(name, "sampled"))
        return TokenBatch(**columns)


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Input of a forward pass of any model: S sequences of N tokens, M of which are scored.

    The first token of a sequence is never scored, because nothing predicts it.
    """

    token_ids: Tensor  # (N,) int64
    scored: Tensor  # (N,) bool: tokens whose log-probs or values are computed
    lengths: Tensor  # (S,) int64: tokens of each sequence
    kept: TokenLists | None = None  # (M) tokens that log-probs are normalised over; None: the vocabulary
    most_likely: TokenLists | None = None  # (M) further tokens whose log-probs are computed
    experts: Tensor | None = None  # (N, layers, k) that compute a token; −1: as the model chooses

    @property
    def tokens(self) -> Tensor:
        """(M,) int64: the scored tokens."""
        return self.token_ids[self.scored]


def torch_device() -> torch.device:
    """Device of batches and models outside training: the first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
