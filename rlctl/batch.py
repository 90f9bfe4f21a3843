"""The records of a batch, in order of computation: Prompts → Rollouts → ScoredBatch → TrainBatch.

Letters: N prompts, B = N × n responses, P prompt tokens, T response tokens, L = P + T.
Log-probs are nats in float32 at the sampling temperature; index t is response token t itself
(already shifted); padding holds 0.0 and is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    #: Row index of a tensor: a slice selects views, an (N,) int64 tensor selects copies.
    Rows = slice | Tensor


class Rowwise:
    """Base of records whose fields have one entry per row: tensors, tuples, or None."""

    __slots__ = ()

    def pick(self, rows: Rows) -> Self:
        """Returns the given rows, in that order; a slice returns views."""
        return self._each(lambda value: value[rows])

    def to(self, device: Any) -> Self:
        """Returns the same data on `device`."""
        return self._each(lambda value: value if isinstance(value, tuple) else value.to(device))

    def _each(self, change: Callable[[Any], Any]) -> Self:
        """The record with every field changed that is not None."""
        given = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return type(self)(**{name: None if x is None else change(x) for name, x in given})


#: Why a sampler ends a response: an end-of-sequence token, the length limit, or a fault of the engine.
FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a batch, before sampling.

    Example: two prompts of 3 and 2 tokens give `prompt_ids` of shape (2, 3), the second row
    starting with one padding token.
    """

    prompt_ids: Tensor  # (N, P) int64, left-padded
    prompt_mask: Tensor  # (N, P) bool
    group_ids: Tensor  # (N,) int64, the prompt's index in the whole batch, over all ranks
    data_sources: tuple[str, ...]  # (N,) selects the grader of the response
    ground_truths: tuple[str, ...]  # (N,)
    texts: tuple[str, ...]  # (N,) the rendered prompt text that is tokenized, for dumps and graders
    extra_infos: tuple[Mapping[str, Any], ...] = ()  # (N,) or none: the row's `extra_info`, JSON-able
    messages: tuple[tuple[Mapping[str, str], ...], ...] = ()  # (N,) or none: the prompt as {role, content}


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Tokens that the sampler lists at each response position.

    Either those that truncation (top-p, top-k, min-p) kept, or the most likely ones with their log-probs.

    Example: two tokens sampled from {3, 7} and {5} have `counts` [[2, 1]] and `ids` [3, 7, 5].
    """

    counts: Tensor  # (B, T) int32, 0: the whole vocabulary, or no sampled token
    ids: Tensor  # (Σ counts,) int32: the concatenated lists, row by row
    log_probs: Tensor | None = None  # (Σ counts,) float32 nats under the sampling distribution

    def __getitem__(self, rows: Rows) -> TokenLists:
        """Returns the given rows, in that order; a slice returns views."""
        counts = self.counts[rows]
        if isinstance(rows, slice) and rows.step in (None, 1):
            first = int(self.counts[: rows.indices(len(self.counts))[0]].sum())
            taken: Rows = slice(first, first + int(counts.sum()))
        else:
            every = torch.arange(self.counts.numel(), device=counts.device).view_as(self.counts)
            taken = self._taken(every[rows].flatten(), counts.flatten())
        return TokenLists(counts, self.ids[taken], None if self.log_probs is None else self.log_probs[taken])

    def at(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Sizes (N,) and concatenated ids of the lists at the N True positions of `mask` (B, t), t ≤ T."""
        counts, taken = self._at(mask)
        return counts, self.ids[taken]

    def padded(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Ids (N, K) int64 and log-probs (N, K) of the lists at the N True positions of `mask`.

        K is the longest list. Shorter ones are padded with id 0 and log-prob −∞.
        """
        assert self.log_probs is not None
        counts, taken = self._at(mask)
        longest = int(self.counts.max()) if self.counts.numel() else 0
        listed = torch.arange(longest, device=counts.device) < counts[:, None]
        ids = torch.zeros(listed.shape, dtype=torch.int64, device=counts.device)
        log_probs = torch.full(listed.shape, -torch.inf, device=counts.device)
        return (
            ids.masked_scatter(listed, self.ids[taken].long()),
            log_probs.masked_scatter(listed, self.log_probs[taken]),
        )

    def _at(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = mask.nonzero(as_tuple=True)
        counts = self.counts[rows, columns]
        return counts, self._taken(rows * self.counts.shape[1] + columns, counts)

    def _taken(self, places: Tensor, counts: Tensor) -> Tensor:
        """Indices into `ids` of the lists at these indices of the flattened (B, T), with these sizes."""
        sizes = self.counts.flatten().long()
        starts = (sizes.cumsum(0) - sizes)[places] - (counts.cumsum(0) - counts)
        offsets = starts.repeat_interleave(counts.long())
        return offsets + torch.arange(len(offsets), device=offsets.device)

    def without(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(B, T) bool: `mask` is True, and the set does not contain the token of this position."""
        counts, ids = self.at(mask)
        owner = torch.arange(len(counts), device=ids.device).repeat_interleave(counts.long())
        found = counts == 0
        found[owner[ids == tokens[mask][owner]]] = True
        return torch.zeros_like(mask).masked_scatter(mask, ~found)

    @classmethod
    def joined(cls, parts: Sequence[TokenLists]) -> TokenLists:
        """Concatenates the rows of all parts, padded to the largest width."""
        width = max(part.counts.shape[1] for part in parts)
        pad = torch.nn.functional.pad
        counts = [pad(part.counts, (0, width - part.counts.shape[1])) for part in parts]
        log_probs = [part.log_probs for part in parts if part.log_probs is not None]
        ids = torch.cat([part.ids for part in parts])
        return cls(torch.cat(counts), ids, torch.cat(log_probs) if log_probs else None)

    def to(self, device: Any) -> TokenLists:
        """Returns the same data on `device`."""
        log_probs = None if self.log_probs is None else self.log_probs.to(device)
        return TokenLists(self.counts.to(device), self.ids.to(device), log_probs)


@dataclass(frozen=True, slots=True)
class ModelInputs(Rowwise):
    """Input of a forward pass of any model: B rows that end with T response columns."""

    input_ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) bool: False for padding
    position_ids: Tensor  # (B, L) int64
    scored: Tensor  # (B, T) bool: response positions whose log-probs or values are computed
    kept: TokenLists | None = None  # tokens that log-probs are normalised over; None: the vocabulary
    most_likely: TokenLists | None = None  # further tokens whose log-probs are computed

    @property
    def responses(self) -> Tensor:
        """(B, T) int64: the last T columns of `input_ids`."""
        return self.input_ids[:, self.input_ids.shape[1] - self.scored.shape[1] :]

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])


@dataclass(frozen=True, slots=True)
class Rollouts(Rowwise):
    """n sampled responses per prompt.

    Responses of one prompt are adjacent, but only `group_ids` define which rows belong together.
    """

    input_ids: Tensor  # (B, L) int64: prompt left-padded, response right-padded
    attention_mask: Tensor  # (B, L) bool
    position_ids: Tensor  # (B, L) int64, 0 at the first real token
    responses: Tensor  # (B, T) int64
    response_mask: Tensor  # (B, T) bool: tokens the policy sampled, end-of-sequence included
    rollout_log_probs: Tensor  # (B, T) float32, under the sampling distribution
    finish_reason: Tensor  # (B,) int8, index into `FINISH_REASONS`
    group_ids: Tensor  # (B,) int64
    policy_version: Tensor  # (B,) int64, number of optimizer updates in the sampling weights
    data_sources: tuple[str, ...]
    ground_truths: tuple[str, ...]
    prompt_texts: tuple[str, ...]
    response_texts: tuple[str, ...]
    extra_infos: tuple[Mapping[str, Any], ...] = ()  # (B,) or none, see `Prompts`
    messages: tuple[tuple[Mapping[str, str], ...], ...] = ()  # (B,) or none, see `Prompts`
    kept: TokenLists | None = None  # with exact sampling: the set that each token was sampled from
    most_likely: TokenLists | None = None  # with score centering: the sampler's most likely tokens
    prompt_weights: Tensor | None = None  # (B,) float32 factor of the advantages: 1 / P(prompt drawn)

    @classmethod
    def joined(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenates the rows of all parts, padded to the longest prompt and the longest response."""
        prompt = max(part.prompt_mask.shape[1] for part in parts)
        length = max(part.responses.shape[1] for part in parts)

        def padded(part: Rollouts, value: Tensor) -> Tensor:
            right = length - part.responses.shape[1]
            is_whole = value.shape[1] == part.input_ids.shape[1]  # prompt and response
            left = prompt - part.prompt_mask.shape[1] if is_whole else 0
            return torch.nn.functional.pad(value, (left, right))

        def together(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            if values[0] is None:
                return None
            if isinstance(values[0], tuple):
                return tuple(item for value in values for item in value)
            if isinstance(values[0], TokenLists):
                return TokenLists.joined(values)
            if values[0].ndim == 2:
                values = [padded(part, value) for part, value in zip(parts, values, strict=True)]
            return torch.cat(values)

        return cls(**{f.name: together(f.name) for f in fields(cls)})

    @property
    def inputs(self) -> ModelInputs:
        """Input of a forward pass over these rows."""
        columns = (self.input_ids, self.attention_mask, self.position_ids, self.response_mask)
        return ModelInputs(*columns, self.kept)

    @property
    def prompt_mask(self) -> Tensor:
        """(B, P) bool: prompt tokens, without padding."""
        return self.attention_mask[:, : self.input_ids.shape[1] - self.responses.shape[1]]

    @property
    def truncated(self) -> Tensor:
        """(B,) bool: ended by the length limit."""
        return self.finish_reason == FINISH_REASONS.index("length")

    @property
    def aborted(self) -> Tensor:
        """(B,) bool: ended by the engine, not by the policy or the length limit; excluded from training."""
        return self.finish_reason == FINISH_REASONS.index("abort")


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Rollouts with their grades and the outputs of policy, reference and critic."""

    rollouts: Rollouts
    scores: Tensor  # (B,) float32 grader output; 0.0 where not `score_valid`
    score_valid: Tensor  # (B,) bool: False where the grader failed; such samples are excluded
    token_level_rewards: Tensor  # (B, T) float32: the score at the last token, minus any KL penalty
    old_log_probs: Tensor  # (B, T) float32, π_old; in bypass mode equal to `rollout_log_probs`
    score_norms: Tensor | None = None  # (B, T) ‖∇_logits log π‖² = 1 − 2π + Σπ²; for optimal baselines
    sequence_weights: Tensor | None = None  # (B,) Π π/π_rollout of the response tokens
    ref_log_probs: Tensor | None = None  # (B, T) float32, π_ref; None: no KL penalty
    values: Tensor | None = None  # (B, T) float32, from the critic before its updates; None: no critic
    baseline_scores: Tensor | None = None  # (B,) score of the prompt's greedy response; for ReMax

    @property
    def valid_mask(self) -> Tensor:
        """(B, T) bool: response tokens of samples that were graded."""
        return self.rollouts.response_mask & self.score_valid[:, None]


@dataclass(frozen=True, slots=True)
class TrainBatch(Rowwise):
    """The tensors that the update reads, each with B rows."""

    input_ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) bool
    position_ids: Tensor  # (B, L) int64
    responses: Tensor  # (B, T) int64
    response_mask: Tensor  # (B, T) bool, never mutated
    sample_mask: Tensor  # (B,) bool: False for a sample whose grader failed
    rollout_log_probs: Tensor  # (B, T) float32
    old_log_probs: Tensor  # (B, T) float32
    advantages: Tensor  # (B, T) float32, 0.0 off-mask
    ref_log_probs: Tensor | None = None  # (B, T) float32; None: no KL in the loss
    values: Tensor | None = None  # (B, T) float32, from the critic before its updates; None: no critic
    returns: Tensor | None = None  # (B, T) float32, regression targets of the values; 0.0 off-mask
    age: Tensor | None = None  # (B,) optimizer updates since the sampling weights
    kept: TokenLists | None = None  # see `Rollouts`
    most_likely: TokenLists | None = None  # see `Rollouts`
    group_ids: Tensor | None = None  # (B,) int64, see `Rollouts`

    @property
    def valid_mask(self) -> Tensor:
        """(B, T) bool: response tokens of samples that were graded."""
        return self.response_mask & self.sample_mask[:, None]

    @property
    def inputs(self) -> ModelInputs:
        """Input of a forward pass over these rows."""
        columns = (self.input_ids, self.attention_mask, self.position_ids, self.response_mask)
        return ModelInputs(*columns, self.kept, self.most_likely)

    def split(self, size: int) -> list[TrainBatch]:
        """Splits into consecutive parts of `size` rows (the last may be smaller)."""
        return [self.pick(slice(start, start + size)) for start in range(0, len(self), size)]

    def __len__(self) -> int:
        return int(self.responses.shape[0])


def torch_device() -> torch.device:
    """Device of batches and models outside training: the first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
