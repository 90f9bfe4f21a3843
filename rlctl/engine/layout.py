"""Turns a flat run of tokens into what the body of a model reads, and returns the states that score tokens.

The state of a token predicts the next one, so what follows the last scored token of a sequence is not read.

    packed        p p p a a b c c | q q d d d     several sequences in a row, each shared beginning once
    padded        p p p a a                       one sequence in a row, padded on the right
                  p p p b ·
                  p p p c c
                  q q d d d

Adjacent sequences share the tokens with which both begin: a prompt, or the earlier turns of an episode. In
packed rows the position of a token is that in its sequence, and a token attends to its own sequence's past:
by a dense mask, so a row is at most as long as the longest sequence or `packed_width`; or, by kernels that
separate sequences where positions restart, in one long row without sharing. Padded rows are for models that
support neither, or where they are faster.

`BodyReader.plan` chooses one layout for all ranks. Under ZeRO-3 every layout calls the body once, so that
ranks stay in step: a shared prompt of padded rows, which needs two calls, is not shared there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rlctl.algos.segments import Segments
from rlctl.batch import ModelInputs
from rlctl.errors import RunFailure, known
from rlctl.prefix import (
    UNSUPPORTED,
    body_of,
    can_share_prefix,
    equal_beginnings,
    evaluating,
    has_keys_only,
    shared_prefix,
    shortest_window,
)
from rlctl.routing import REPLAY, Mixture, RoutedBody, Routing
from rlctl.run_spec.memory import has_no_mask, packed_width

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks

Layout = Literal["packed", "padded"]

#: Largest relative difference that one layer's rounding explains, in half precision and in float32.
_TOLERANCE, _TOLERANCE_FP32 = 0.04, 0.001
#: A beginning is shared if it is at least this part of the sequence: less would not pay for fuller rows.
_WORTH_SHARING = 1 / 16


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of a model's body, and the indices of the states that predict the scored tokens.

    Attributes:
        inputs: keyword arguments of the body.
        states_at: (M,) int64, indices into the flattened (rows × width) states; M scored tokens in order.
        scored_at: (M,) int64, indices of these tokens among all scored tokens; None: they are all.
        prefix: number of first columns that are equal in blocks of rows, and whose states are not needed.
        experts: (rows, width, layers, k) that compute each token, −1: not given; None: its routers choose.
    """

    inputs: dict[str, Any]
    states_at: Tensor
    scored_at: Tensor | None = None
    prefix: int = 0
    experts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The n tokens of K sequences that must be read, on the CPU."""

    ids: Tensor  # (n,) int64
    sequences: Segments  # (K)
    common: list[int]  # (K,) number of first tokens that are those of the sequence before, experts included
    wanted: Tensor  # (M,) int64: tokens whose states predict the scored ones
    experts: Tensor | None = None  # (n, layers, k) int16

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.sequences.lengths.max())


def _tokens_read(inputs: ModelInputs) -> _Tokens:
    """What must be read; one token if nothing is scored, so that a backward pass reaches every parameter.

    Raises:
        ValueError: the first token of a sequence is scored.
    """
    ids, scored, lengths = (column.cpu() for column in (inputs.token_ids, inputs.scored, inputs.lengths))
    sequences = Segments(lengths)
    if bool((scored & (sequences.places == 0)).any()):
        raise ValueError("nothing predicts the first token of a sequence, so it cannot be scored")
    chosen = scored.nonzero().squeeze(1)
    if not len(chosen):
        single = torch.ones(1, dtype=torch.int64)
        return _Tokens(single - 1, Segments(single), [0], chosen)
    reads = sequences.max(scored * sequences.places).clamp(min=0).long()
    is_read = sequences.places < sequences.spread(reads)
    ids = ids[is_read]
    segments = Segments(reads[reads > 0])
    equal = equal_beginnings(segments.padded(ids, -1))
    experts = None if inputs.experts is None else inputs.experts.cpu()[is_read]
    if experts is not None:
        at = segments.padded(torch.arange(len(ids)), 0)
        single, column = equal.nonzero(as_tuple=True)
        pair = experts[at[single, column]], experts[at[single + 1, column]]
        equal[single, column] = (pair[0] == pair[1]).flatten(1).all(1)
    common = [0, *equal.long().cumprod(1).sum(1).tolist()]
    return _Tokens(
        ids=ids,
        sequences=segments,
        common=common,
        wanted=(is_read.cumsum(0) - 1)[chosen - 1],
        experts=experts,
    )


@dataclass(frozen=True, slots=True)
class _Placing:
    """Where n tokens are in R rows of width W, on the CPU; tokens of a shared beginning may be at one place.

    Attributes:
        row, place: (n,) int64.
        shape: R, W.
        first, last: (n,) int64, numbers of the first and last sequence of the row, from 1, that contain the
            token, as do all between; None: there is no mask.
        prefix: the first columns, which are computed once for each run of rows that are equal there.
        num_runs: number of these runs.
        lengths: (K,) of the sequences that kernels separate in one row, without a mask; None: rows have one.
    """

    row: Tensor
    place: Tensor
    shape: tuple[int, int]
    first: Tensor | None = None
    last: Tensor | None = None
    prefix: int = 0
    num_runs: int = 0
    lengths: Tensor | None = None

    @property
    def attended(self) -> float:
        """Number of tokens that a token is compared with, on average: its row, or its own sequence."""
        if self.lengths is None:
            return float(self.shape[1])
        return float(self.lengths.square().sum() / self.lengths.sum())

    @property
    def computed(self) -> int:
        """Number of tokens that the model computes, padding included."""
        rows, width = self.shape
        return self.num_runs * self.prefix + rows * (width - self.prefix)

    def placed(self, values: Tensor, padding: int = 0) -> Tensor:
        """(R, W, …): the values of the tokens (n, …) at their places."""
        rows = values.new_full((*self.shape, *values.shape[1:]), padding)
        rows[self.row, self.place] = values
        return rows

    def rows(self, tokens: _Tokens, device: torch.device) -> Rows:
        """The body's inputs, with id and position 0 in padding, and without a mask."""
        ids, positions = (self.placed(x).to(device) for x in (tokens.ids, tokens.sequences.places))
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": None, "use_cache": False}
        if self.lengths is not None:
            inputs |= separations(self.lengths, device)
        experts = None if tokens.experts is None else self.placed(tokens.experts, -1).to(device)
        states_at = self.row * (self.shape[1] - self.prefix) + self.place - self.prefix
        return Rows(inputs, states_at[tokens.wanted].to(device), prefix=self.prefix, experts=experts)


def separations(lengths: Tensor, device: torch.device) -> dict[str, Any]:
    """What tells flash kernels where the sequences of a row begin and end, by transformers' names.

    Args:
        lengths: (K,) int64, tokens of each sequence, on the CPU.
    """
    ends = functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def row_width(config: Any) -> int | None:
    """Tokens per packed row, if no sequence is longer; None: all sequences are in one row without a mask."""
    return None if has_no_mask(config._attn_implementation) else packed_width(config.hidden_size)


def _packing(tokens: _Tokens, width: int | None) -> _Placing:
    """Packed rows: sequences one after the other, a shared beginning once; `width`: see `row_width`.

    Example: the sequences `abc`, `abde`, `fg` in one row, numbers 1 to 3. The second one shares two tokens
    with the first, its own ones are `de`:

        token   a b c d e f g
        place   0 1 2 3 4 5 6
        first   1 1 1 2 2 3 3     the sequence whose own token it is
        last    2 2 1 2 2 3 3     the last sequence that contains it
    """
    if width is None:
        count = len(tokens.ids)
        zeros = torch.zeros_like(tokens.ids)
        return _Placing(zeros, torch.arange(count), (1, count), lengths=tokens.sequences.lengths)
    bins = _bins(tokens, max(tokens.longest, width))
    sequences = tokens.sequences
    shared = torch.tensor(tokens.common)
    shared[[run.start for runs in bins for run in runs]] = 0  # what is before it may be in another row
    row, number, start, filled = _starts(bins, sequences.lengths - shared)
    is_own = torch.arange(tokens.longest) >= shared[:, None]
    owner = sequences.flat(_last_owners(is_own)).long()
    last = sequences.flat(_next_owners(is_own)).long() - 1
    column = start[owner] + sequences.places - shared[owner]
    return _Placing(
        row=row[owner],
        place=column,
        shape=(len(bins), filled),
        first=number[owner],
        last=number[last],
    )


def _starts(bins: list[list[range]], num_own: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of each sequence (K,) its row, its number there, from 1, and the place of its first own token.

    Args:
        num_own: (K,) own tokens of each sequence.

    Returns:
        these, and the width of the rows.
    """
    order = torch.tensor([sequence for runs in bins for run in runs for sequence in run])
    in_row = Segments(torch.tensor([sum(map(len, runs)) for runs in bins]))
    row, number, start = torch.empty(3, len(num_own), dtype=torch.int64)
    own = num_own[order]
    row[order] = in_row.index
    number[order] = in_row.places + 1
    start[order] = (in_row.cumsum(own) - own).long()
    return row, number, start, int(in_row.sum(own).max())


def _last_owners(is_own: Tensor) -> Tensor:
    """(K, L): of each token the last sequence up to its own one that has an own token at its position."""
    every = torch.arange(len(is_own), dtype=torch.int32)[:, None]
    return torch.where(is_own, every, 0).cummax(0).values


def _next_owners(is_own: Tensor) -> Tensor:
    """(K, L): of each token the next sequence that has an own token at its position; K: there is none."""
    count = len(is_own)
    every = torch.arange(count, dtype=torch.int32)[:, None]
    later = torch.where(is_own, every, count)[1:]
    following = later.flip(0).cummin(0).values.flip(0)
    return functional.pad(following, (0, 0, 0, 1), value=count)


def _bins(tokens: _Tokens, width: int) -> list[list[range]]:
    """The sequences of each packed row, in runs that share beginnings; no row is longer than `width`.

    Each run, longest first, is placed in the first row with enough space.
    """
    runs: list[tuple[int, range]] = []  # each with its number of tokens
    for sequence, length in enumerate(tokens.sequences.lengths.tolist()):
        size = length
        start = sequence
        if runs and tokens.common[sequence] >= _WORTH_SHARING * length:
            grown = runs[-1][0] + length - tokens.common[sequence]
            if grown <= width:
                size = grown
                start = runs.pop()[1].start
        runs.append((size, range(start, sequence + 1)))
    bins: list[list[range]] = [[] for _ in runs]
    free = [width] * len(runs)
    for size, run in sorted(runs, key=lambda sized: -sized[0]):
        index = next(index for index, left in enumerate(free) if size <= left)
        bins[index].append(run)
        free[index] -= size
    return [runs for runs in bins if runs]


def _padding(tokens: _Tokens, share_prompts: bool) -> _Placing:
    """A row per sequence; with `share_prompts` and without experts, shared prompts end in one column."""
    sequences = tokens.sequences
    wanted = tokens.wanted
    cuts = torch.zeros_like(sequences.lengths)
    num_runs = 0
    if share_prompts and len(sequences) > 1 and tokens.experts is None:
        # Of what is read before the first state that scores: only keys and values are needed.
        first = sequences.places[wanted][Segments.of_index(sequences.index[wanted], len(sequences)).starts]
        is_new = torch.tensor(tokens.common)[1:] < torch.maximum(first[1:], first[:-1])
        runs = Segments.of_index(functional.pad(is_new, (1, 0)).cumsum(0), int(is_new.sum()) + 1)
        if len(runs) < len(sequences):
            cuts = -runs.spread(runs.max(-first).long())
            num_runs = len(runs)
    prefix = int(cuts.max())
    column = sequences.places + sequences.spread(prefix - cuts)
    shape = len(sequences), int(column.max()) + 1
    return _Placing(sequences.index, column, shape, prefix=prefix, num_runs=num_runs)


def packed_rows(body: Any, tokens: _Tokens, packing: _Placing) -> Rows:
    """Packed rows for a model without its head, for which `can_pack` holds."""
    device = next(body.parameters()).device
    config = body.config
    rows = packing.rows(tokens, device)
    if packing.first is not None and packing.last is not None:
        first, last = (packing.placed(x).to(device) for x in (packing.first, packing.last))
        mask = _mask(first, last, rows.inputs["position_ids"])
        if config._attn_implementation == "eager":  # it adds the mask to the scores
            dtype = next(body.parameters()).dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        rows.inputs["attention_mask"] = mask
    return rows


def _mask(first: Tensor, last: Tensor, positions: Tensor) -> Tensor:
    """(R, 1, W, W) bool: a token attends to the past of its sequence, padding to padding.

    Args:
        first, last: (R, W) int64, the sequences that contain the token, see `_Placing`; 0: padding.
        positions: (R, W) int64.
    """
    of_token = first[:, :, None]  # one sequence that contains it; the past of all of them is equal
    belongs = (first[:, None] <= of_token) & (of_token <= last[:, None])
    return (belongs & (positions[:, None] <= positions[:, :, None]))[:, None]


def padded_rows(body: Any, tokens: _Tokens, padding: _Placing) -> Rows:
    """Padded rows for a model without its head."""
    device = next(body.parameters()).device
    rows = padding.rows(tokens, device)
    rows.inputs["attention_mask"] = padding.placed(torch.ones_like(padding.row)).to(device)
    return rows


@dataclass(frozen=True, slots=True)
class _Placed:
    """What a pass reads, and where it is in packed and in padded rows; None: they are not supported."""

    tokens: _Tokens
    packed: _Placing | None
    padded: _Placing | None


class BodyReader:
    """Runs the body of a model over inputs.

    Args:
        model: a causal language model.
        share_prompts: in padded rows, compute a prompt that adjacent rows share once, if the model supports
            this; under ZeRO-3 False.
        sequence: group of ranks that process each row together; None: each rank processes its own rows.
        ranks: all ranks of the run, which must choose alike; None: this process is alone.

    Attributes:
        packs: whether the model supports packed rows; None: not known before `probe`.
        shares_prompts: whether padded rows share prompts.
        layout: that of the passes of a mini-batch; None: each pass chooses for itself.
    """

    def __init__(
        self, model: Any, *, share_prompts: bool = True, sequence: Any = None, ranks: Ranks | None = None
    ) -> None:
        self.packs: bool | None = None
        self.shares_prompts = share_prompts and can_share_prefix(model)
        self.layout: Layout | None = None
        self.sequence = sequence
        self._body = body_of(model)
        self._ranks = ranks
        self._planned: dict[ModelInputs, _Placed] = {}  # by the identity of the tensors

    def probe(self) -> None:
        """Finds out what the model supports. All ranks call this, because its passes may be collectives."""
        self.packs = self.agree(can_pack(self._body))

    def agree(self, holds: bool) -> bool:
        """Whether something holds on all ranks."""
        return holds if self._ranks is None else self._ranks.max(float(not holds)) == 0.0

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """Chooses the layout of these passes of all ranks, which all call this; returns it in words."""
        self._planned = {inputs: self._placed(inputs) for inputs in passes}
        costs = [self._costs(self._planned[inputs]) for inputs in passes]
        sums = [sum(cost[place] for cost in costs) for place in (0, 1)]
        packed, padded = self._ranks.sum(sums) if self._ranks else sums
        self.layout = choose_layout(packed, padded)
        return f"{self.layout} rows; cost in tokens: packed {packed:,.0f}, padded {padded:,.0f}"

    def forget_plan(self) -> None:
        """Later passes choose their layout for themselves."""
        self.layout = None
        self._planned = {}

    def states(self, inputs: ModelInputs, *, routing: bool = False) -> tuple[Tensor, Tensor | None]:
        """States that predict the M scored tokens, in order, followed by their routing on request.

        Returns:
            (M, H) states and None; with sequence parallelism (m, H) states of this rank's tokens, and (m,)
            indices of these among the M tokens.

        Raises:
            RunFailure: rows that must be split among ranks cannot be packed; experts are of another model.
            UsageError: the model has no routers whose choice can be replaced.
        """
        body = RoutedBody(self._body) if routing else self._body
        placed = self._planned.get(inputs) or self._placed(inputs)
        layout = self.layout or choose_layout(*self._costs(placed))
        if layout == "packed" and placed.packed is not None:
            rows = packed_rows(body, placed.tokens, placed.packed)
            rows = self.sequence.own_tokens(rows) if self.sequence else rows
        elif placed.padded is None:
            message = "a sequence longer than the window of a layer cannot be split among ranks"
            raise RunFailure(message, where="engine.sequence_parallel", fix="set it to 1")
        else:
            rows = padded_rows(body, placed.tokens, placed.padded)
        if rows.experts is None:
            return states_of(body, rows), rows.scored_at
        with Routing(self._mixture, self._mixture.of_routers(rows.experts.flatten(0, 1))) as chosen:
            states = states_of(body, rows)
        chosen.check(self._body, 1)
        return states, rows.scored_at

    @cached_property
    def _mixture(self) -> Mixture:
        return Mixture.of(self._body, REPLAY)

    @cached_property
    def _row_width(self) -> int | None:
        return row_width(self._body.config)

    def _placed(self, inputs: ModelInputs) -> _Placed:
        tokens = _tokens_read(inputs)
        can_pack = self.packs and tokens.longest <= shortest_window(self._body.config)
        return _Placed(
            tokens,
            packed=_packing(tokens, self._row_width) if can_pack else None,
            padded=None if self.sequence else _padding(tokens, self.shares_prompts),
        )

    def _costs(self, placed: _Placed) -> tuple[float, float]:
        """Costs of packed and padded rows in tokens of linear layers alone; infinite: not supported.

        By the ratio of attention to linear layers that `packed_width` is based on.
        """
        config = self._body.config

        def cost(placing: _Placing | None) -> float:
            if placing is None:
                return math.inf
            return float(placing.computed * (1 + placing.attended / (5 * config.hidden_size)))

        return cost(placed.packed), cost(placed.padded)


def choose_layout(packed: float, padded: float) -> Layout:
    """The layout that costs less; of equal ones the padded one, because rows without padding need no mask."""
    return "packed" if packed < padded else "padded"


def states_of(body: Any, rows: Rows) -> Tensor:
    """(M, H) states that predict the scored tokens."""
    arguments = rows.inputs
    prefix = rows.prefix
    if prefix:
        ids, mask, positions = (arguments[name] for name in ("input_ids", "attention_mask", "position_ids"))
        cache = shared_prefix(body, ids[:, :prefix], mask[:, :prefix].bool(), positions[:, :prefix])
        rest = {"input_ids": ids[:, prefix:], "position_ids": positions[:, prefix:]}
        arguments = arguments | rest | {"past_key_values": known(cache), "use_cache": True}
    states: Tensor = body(**arguments).last_hidden_state
    return states.flatten(0, 1).index_select(0, rows.states_at)


@torch.no_grad()
def can_pack(body: Any) -> bool:
    """Whether a model without its head gives the same states for packed rows as for separate sequences.

    Recurrent states continue through the whole row, and some attention layers build their own mask. Instead
    of a list of architectures, this compares both computations on a short probe, and looks into the cache.
    """
    if body is None:  # the model has none
        return False
    device = next(body.parameters()).device
    # Long enough for a bias by place instead of position to show; 11 divides no block of a sparse attention.
    ids = torch.arange(26, device=device).reshape(2, 13) % body.config.vocab_size
    ids[1, :2] = ids[0, :2]  # the same prompt
    scored = torch.arange(13, device=device).expand(2, 13) >= 2
    inputs = ModelInputs(ids.flatten(), scored.flatten(), torch.tensor([13, 13], device=device))
    tokens = _tokens_read(inputs)
    if tokens.longest > shortest_window(body.config):
        return False
    try:
        with evaluating(body):
            separate = body(input_ids=ids, use_cache=True)
            if not has_keys_only(getattr(separate, "past_key_values", None)):
                return False
            rows = packed_rows(body, tokens, _packing(tokens, row_width(body.config)))
            packed = states_of(body, rows)
            with rounding_embeddings(body):
                rounded = body(input_ids=ids, use_cache=False).last_hidden_state
    except UNSUPPORTED:  # such as this mask
        return False
    plain, rounded = (states[:, 1:-1].flatten(0, 1) for states in (separate.last_hidden_state, rounded))
    return same_values(packed, plain, rounded)


@torch.no_grad()
def reads_past_only(model: Any) -> bool:
    """Whether the logits of a token depend on earlier tokens only, not on later ones or padding after it."""
    device = next(model.parameters()).device
    ids = torch.arange(13, device=device)[None] % model.config.get_text_config().vocab_size
    mask = (torch.arange(13, device=device)[None] < 10).long()
    positions = torch.arange(13, device=device)[None] * mask
    with evaluating(model):
        whole = model(input_ids=ids[:, :6], use_cache=False).logits
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        with rounding_embeddings(model):
            rounded = model(input_ids=ids[:, :6], use_cache=False).logits
    return same_values(padded.logits[:, :6], whole, rounded)


@contextmanager
def rounding_embeddings(model: Any) -> Iterator[None]:
    """Changes the embeddings of all tokens by up to half a unit of rounding inside the block.

    What that changes in the output shows how far rounding changes it: in bf16, 0.5 % in a model of few
    layers, and 8 % in SmolLM2-135M.
    """

    def change(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device) - 0.5
        return output * (1.0 + torch.finfo(output.dtype).eps * noise).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def same_values(values: Tensor, plain: Tensor, rounded: Tensor | None = None) -> bool:
    """Whether two results of one computation differ by rounding only.

    `rounded`: `plain` inside `rounding_embeddings`; None: the computation is that of one layer.
    """
    size = plain.float().norm()
    tolerance = _TOLERANCE_FP32
    if rounded is not None:  # in 12 models: rounding up to this effect, wrong positions 7 times it
        tolerance = max(tolerance, 3.0 * float((rounded.float() - plain.float()).norm() / size))
    elif plain.dtype != torch.float32:
        tolerance = _TOLERANCE
    return bool((values.float() - plain.float()).norm() < tolerance * size)


def idle_inputs(device: Any = "cpu") -> ModelInputs:
    """Two tokens, one of which is scored: a pass by which a rank stays in step with ranks that have more.

    Its loss, times 0, is passed to `backward`.
    """
    scored = torch.tensor([False, True], device=device)
    return ModelInputs(torch.zeros_like(scored, dtype=torch.int64), scored, torch.tensor([2], device=device))
