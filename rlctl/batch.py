"""The records of a step, in order of computation: Task → Turn → TokenSequence → Episode → TokenBatch.

Letters: E episodes of S sequences have N tokens, of which M were sampled by the policy. All that is computed
is a column of the M sampled tokens, in order: whatever was not sampled (prompt, output of a tool) is read by
attention only. Log-probs are nats in float32 at the sampling temperature, of the token itself.

Example, an episode with two sequences, of 3 and 2 tokens, whose last two and last one were sampled:

    lengths [3, 2]    owners [0, 0]    sampled [0 1 1 | 0 1]    N = 5, M = 3, S = 2, E = 1

The model reads the sequences apart (`TokenBatch.inputs`); score and advantage are the episode's
(`TokenBatch.units.episode`); `algorithm.unit` says whether correction and loss take it for one response of 3
tokens, or for two of 2 and 1 (`CorrectionRules.responses`). In the loss (`rlctl.train.objective.actor_loss`)
each token has a coefficient, which depends on its response unless the mean is over tokens (`coefficients`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rlctl.algos.segments import Segments, Units
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: What a column has one entry of.
Level = Literal["token", "sampled", "sequence", "episode"]

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

    def between(self, start: int, end: int) -> TokenLists:
        """The lists from one place up to another one, which is not included."""
        return self[torch.arange(start, end, device=self.counts.device)]

    @classmethod
    def of_each(cls, lists: Sequence[TokenLists | None], lengths: Sequence[int]) -> TokenLists | None:
        """One column of the columns of several turns or sequences, of these lengths; None: there is none.

        One that has none gets the whole vocabulary at every place.
        """
        log_probs = next((each.log_probs is not None for each in lists if each is not None), None)
        if log_probs is None:
            return None
        none = torch.empty(0)
        return cls.joined(
            [
                TokenLists(torch.zeros(length).int(), none.int(), none if log_probs else None)
                if each is None
                else each
                for each, length in zip(lists, lengths, strict=True)
            ]
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenLists]) -> TokenLists:
        """The places of all parts, one part after the other."""
        log_probs = [lists.log_probs for lists in parts if lists.log_probs is not None]
        columns = torch.cat([lists.counts for lists in parts]), torch.cat([lists.ids for lists in parts])
        return cls(*columns, torch.cat(log_probs) if log_probs else None)

    def to(self, device: Any) -> TokenLists:
        """The same data on `device`."""
        log_probs = None if self.log_probs is None else self.log_probs.to(device)
        return TokenLists(self.counts.to(device), self.ids.to(device), log_probs)


#: A `Tensor` (n, …), or `TokenLists` of n places.
Column: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data, as an environment reads it."""

    prompt_ids: Sequence[int]  # the rendered prompt as tokens
    text: str  # the rendered prompt, for dumps and graders
    group_id: int = 0  # index of the prompt in the whole batch, over all ranks
    row: int = 0  # index of the row in the data
    data_source: str = ""  # selects the grader
    ground_truth: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # of the row, JSON-able
    messages: tuple[Mapping[str, Any], ...] = ()  # the prompt as {role, content}
    environment: str = ""  # one of those that the spec names; empty: `environment.name`
    weight: float = 1.0  # factor of the advantages: 1 / P(prompt drawn)

    def in_group(self, group_id: int) -> Task:
        """The same row as the prompt of this group, in half the time of `dataclasses.replace`."""
        return Task(
            self.prompt_ids,
            self.text,
            group_id,
            self.row,
            self.data_source,
            self.ground_truth,
            self.extra_info,
            self.messages,
            self.environment,
            self.weight,
        )


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
class TokenSequence:
    """One stream of L tokens that is trained on; m of them were sampled. It begins with a token that was not.

    All but `token_ids`, `sampled` and `experts` are columns of the m sampled tokens.
    """

    token_ids: Tensor  # (L,) int64
    sampled: Tensor  # (L,) bool
    log_probs: Tensor  # (m,) float32
    versions: Tensor  # (m,) int64
    turns: Tensor  # (m,) int64, number of the turn within its episode, ascending
    rewards: Tensor | None = None  # (m,) float64, of the environment; None: the episode has a score only
    kept: TokenLists | None = None  # (m)
    most_likely: TokenLists | None = None  # (m)
    experts: Tensor | None = None  # (L, layers, k) int16, see `joined_experts`

    @classmethod
    def of_turn(cls, prompt_ids: Sequence[int], turn: Turn, number: int = 0) -> TokenSequence:
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
            experts=None if turn.experts is None else joined_experts(length, [(length, turn)]),
        )


def joined_experts(length: int, turns: Sequence[tuple[int, Turn]]) -> Tensor | None:
    """(length, layers, k) int16: the experts that computed the tokens of a sequence; −1: not reported.

    Args:
        turns: number of the sequence's tokens up to the turn's last one; the turn. What a turn reports of
            tokens that an earlier one computed is not used: their log-probs are the earlier one's.
    """
    experts = None
    for end, turn in reversed(turns):
        if turn.experts is not None:
            if experts is None:
                experts = turn.experts.new_full((length, *turn.experts.shape[1:]), -1)
            experts[end - 1 - len(turn.experts) : end - 1] = turn.experts
    return experts


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment made of a task: sequences to train on, and what graders, dumps and metrics read."""

    task: Task
    member: int  # index within its group
    sequences: tuple[TokenSequence, ...]
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
        if len(self.sequences) == 1:  # a third of the time of the sum
            return self.sequences[0].log_probs.numel()
        return sum(sequence.log_probs.numel() for sequence in self.sequences)

    @property
    def num_prompt(self) -> int:
        """Number of tokens that its first turn read; those of the rendered row if nothing was sampled."""
        if not self.sequences or not self.sequences[0].log_probs.numel():
            return len(self.task.prompt_ids)
        return int(self.sequences[0].sampled.int().argmax())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(sequence.token_ids.numel() for sequence in self.sequences)


#: The episodes of one task: unit of the queue, of filtering, of staleness.
Group = tuple[Episode, ...]


#: What a fixed field of `TokenBatch` has one entry of: tokens (N,), sequences (S,), episodes (E,), or sampled
#: tokens (M,), as all others.
FIELD_LEVELS: dict[str, Level] = {
    **dict.fromkeys(("token_ids", "sampled"), "token"),
    **dict.fromkeys(("lengths", "owners"), "sequence"),
    **dict.fromkeys(("group_ids", "members", "prompt_weights"), "episode"),
}


@dataclass(frozen=True, slots=True)
class ColumnKind:
    """A named column that a batch may have beside its fixed fields.

    Attributes:
        level: what it has one entry of.
        description: what an entry is, with its unit.
        unknown: entry of a rank that did not compute the column, where others did.
    """

    level: Level
    description: str
    unknown: float = 0.0


#: Every column by its name; that of another name is an error.
COLUMN_KINDS: dict[str, ColumnKind] = {}


def declare_column(name: str, description: str, level: Level = "sampled", unknown: float = 0.0) -> None:
    """Lets batches have a column of this name.

    Raises:
        ValueError: a fixed field has the name, or another column, which is described otherwise.
    """
    kind = ColumnKind(level, description, unknown)
    if name in FIXED_FIELDS or COLUMN_KINDS.setdefault(name, kind) != kind:
        raise ValueError(f"a column `{name}` exists already; choose another name")


@dataclass(frozen=True)
class TokenBatch:
    """E episodes as one flat run of tokens: fixed fields, and named columns.

    A field that is None was not computed, like a column that is not there. Columns are declared by what makes
    them (`declare_column`).
    """

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
    rewards: Tensor  # (M,) float64: of the environment, 0.0 if it gives none; in training with the score
    old_log_probs: Tensor | None = None  # (M,) π_old; in bypass mode π_rollout
    advantages: Tensor | None = None  # (M,) float32
    columns: Mapping[str, Column] = field(default_factory=dict)  # all others, see `COLUMN_KINDS`

    @classmethod
    def of(cls, episodes: Sequence[Episode], device: Any = "cpu") -> TokenBatch:
        """The tokens of these episodes, in order, on `device`."""
        sequences = [sequence for episode in episodes for sequence in episode.sequences]

        def joined(name: str, dtype: Any) -> Tensor:
            parts = [getattr(sequence, name) for sequence in sequences]
            return torch.cat(parts) if parts else torch.empty(0, dtype=dtype)

        counts = [sequence.log_probs.numel() for sequence in sequences]
        columns: dict[str, Column] = {
            "kept": TokenLists.of_each([sequence.kept for sequence in sequences], counts),
            "most_likely": TokenLists.of_each([sequence.most_likely for sequence in sequences], counts),
        }
        shapes = {sequence.experts.shape[1:] for sequence in sequences if sequence.experts is not None}
        if shapes:
            [shape] = shapes
            unknown = torch.full((1, *shape), -1, dtype=torch.int16)
            columns["experts"] = torch.cat(
                [
                    unknown.expand(len(s.token_ids), *shape) if s.experts is None else s.experts
                    for s in sequences
                ]
            )
        rewards = torch.zeros(sum(counts), dtype=torch.float64)
        for own, sequence in zip(torch.split(rewards, counts), sequences, strict=True):
            if sequence.rewards is not None:
                own.copy_(sequence.rewards)
        owners = [number for number, episode in enumerate(episodes) for _ in episode.sequences]
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
            rewards=rewards,
        )
        return batch.with_columns(**columns).to(device)

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The episodes of all batches, one after the other; a column that one lacks is unknown there."""
        forms = {name: column_form(column) for batch in batches for name, column in batch.columns.items()}
        batches = [batch.with_unknown(forms) for batch in batches]
        values: dict[str, Any] = {}
        for name in FIXED_FIELDS:
            columns = [getattr(batch, name) for batch in batches]
            values[name] = None if columns[0] is None else torch.cat(columns)
        starts = torch.tensor([0, *(batch.num_episodes for batch in batches)]).cumsum(0).tolist()
        values["owners"] = torch.cat(
            [batch.owners + start for batch, start in zip(batches, starts, strict=False)]
        )
        lists: dict[str, Column] = {}
        for name, (kind, _) in forms.items():
            each = [batch.columns[name] for batch in batches]
            lists[name] = TokenLists.joined(each) if kind is TokenLists else torch.cat(each)
        return cls(**values, columns=lists)

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what was derived from them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.group_ids)

    def size(self, level: Level) -> int:
        """Number of entries of a column of this level."""
        like = {
            "token": self.token_ids,
            "sampled": self.turns,
            "sequence": self.lengths,
            "episode": self.group_ids,
        }
        return len(like[level])

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
    def episode_rewards(self) -> Tensor:
        """(E,) float64: the scores; without them sums of rewards, which are rounded."""
        scores: Tensor | None = self.columns.get("scores")
        return self.units.episode.sum(self.rewards) if scores is None else scores

    def penalised(self, penalties: Tensor) -> TokenBatch:
        """The batch with rewards minus `penalties` (M,), and scores minus their sums."""
        scores = self.episode_rewards - self.units.episode.sum(penalties)
        return replace(self, rewards=self.rewards - penalties).with_columns(scores=scores)

    def without_rewards(self) -> TokenBatch:
        """The batch with rewards and scores of 0."""
        scores = torch.zeros_like(self.episode_rewards)
        return replace(self, rewards=torch.zeros_like(self.rewards)).with_columns(scores=scores)

    @property
    def inputs(self) -> ModelInputs:
        """Input of a forward pass over these tokens."""
        columns: dict[str, Any] = {
            name: self.columns.get(name) for name in ("kept", "most_likely", "experts")
        }
        return ModelInputs(self.token_ids, self.sampled, self.lengths, **columns)

    def column(self, name: str) -> Any:
        """The column, or the fixed field, of this name.

        Raises:
            LookupError: it was not computed.
        """
        values = self.columns.get(name)
        if values is None and name in FIXED_FIELDS:
            values = getattr(self, name)
        if values is None:
            raise LookupError(f"the batch has no column `{name}`; it has {', '.join(self.columns) or 'none'}")
        return values

    def with_columns(self, **columns: Column | None) -> TokenBatch:
        """The batch with these columns, or without those that are None.

        Raises:
            ValueError: a column is not declared, or has another number of entries than its level.
        """
        for name, values in columns.items():
            if name not in COLUMN_KINDS:
                raise ValueError(f"column `{name}` is not declared; call declare_column first")
            size = self.size(COLUMN_KINDS[name].level)
            if values is not None and len(values) != size:
                raise ValueError(f"column `{name}` has {len(values)} entries instead of {size}")
        merged = {name: values for name, values in {**self.columns, **columns}.items() if values is not None}
        return replace(self, columns=merged)

    def with_unknown(self, forms: Mapping[str, tuple[Any, Any]]) -> TokenBatch:
        """The batch with those of these columns that it does not have, unknown; see `column_form`."""
        missing = {name: form for name, form in forms.items() if name not in self.columns}
        return self.with_columns(**{name: self._unknown(name, *form) for name, form in missing.items()})

    def _unknown(self, name: str, dtype: Any, shape: Any) -> Column:
        kind = COLUMN_KINDS[name]
        size = self.size(kind.level)
        device = self.token_ids.device
        if dtype is TokenLists:
            none = torch.zeros(0, dtype=torch.int32, device=device)
            counts = torch.zeros(size, dtype=torch.int32, device=device)
            return TokenLists(counts, none, none.float() if shape else None)
        return torch.full((size, *shape), kind.unknown, dtype=dtype, device=device)

    def pick(self, episodes: Tensor | Sequence[int]) -> TokenBatch:
        """The episodes with these indices (k,), in that order."""
        indices = episodes if isinstance(episodes, torch.Tensor) else torch.tensor(list(episodes))
        chosen = indices.to(self.group_ids.device, torch.int64)
        if torch.equal(chosen, torch.arange(self.num_episodes, device=chosen.device)):
            return self
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

    def mapped(self, change: Callable[[Any, Level], Any]) -> TokenBatch:
        """The batch with every field and column changed by (value, its level) → value, unless it is None.

        The order is the same on every rank whose batch has the same columns.
        """
        values: dict[str, Any] = {}
        for name in FIXED_FIELDS:
            value = getattr(self, name)
            values[name] = None if value is None else change(value, FIELD_LEVELS.get(name, "sampled"))
        columns = {
            name: change(column, COLUMN_KINDS[name].level) for name, column in sorted(self.columns.items())
        }
        return TokenBatch(**values, columns=columns)


FIXED_FIELDS = tuple(each.name for each in fields(TokenBatch) if each.name != "columns")

declare_column("kept", "with exact sampling the set that the token was sampled from")
declare_column(
    "most_likely",
    "further tokens whose log-probs a forward pass returns: the most likely ones of the sampler, or of"
    " another model, with its log-probs in nats",
)
declare_column("experts", "(layers, k) int16: those that computed the token; −1: not reported", "token", -1)
declare_column("age", "number of optimizer updates since the weights that sampled the token")
declare_column("ref_log_probs", "log-prob under the reference policy, nats")
declare_column("values", "value of the critic before its updates")
declare_column("returns", "target of the value")
declare_column("scores", "float64: what the rewards of the episode sum to, without rounding", "episode")
declare_column("baseline_scores", "score of the greedy response to the same prompt", "episode")
declare_column("score_norms", "squared norm of ∇ log π with respect to the logits")
declare_column("sequence_weights", "Π π/π_rollout over the episode", "episode")


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


def column_form(column: Column) -> tuple[Any, Any]:
    """Type of the entries and their shape; of lists whether they have log-probs."""
    if isinstance(column, TokenLists):
        return TokenLists, column.log_probs is not None
    return column.dtype, tuple(column.shape[1:])


def torch_device() -> torch.device:
    """Device of batches and models outside training: the first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
