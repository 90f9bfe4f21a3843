"""Rollouts with Hugging Face `generate`, in the trainer's process, from a copy of its model.

Tokens are sampled inside `generate` from precomputed random numbers, and their log-probs recorded. Each token
is sampled by inverse CDF: the first whose cumulative probability exceeds the uniform number of this (request,
position). The result depends neither on torch's global random state nor on the other requests of the batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlctl.algos.segments import Segments
from rlctl.batch import TokenLists
from rlctl.episodes import Turns, joined_ids, joined_turns
from rlctl.prefix import body_of, can_share_prefix, equal_beginnings, shared_prefix, shortest_window
from rlctl.rollout.expected_weights import ExpectedWeights
from rlctl.rollout.protocol import Policy, Request, Requests, Sampling, end_ids, synced
from rlctl.routing import REPLAY, Mixture, Routing

RolloutDtype = Literal["fp32", "bf16", "int8"]

#: Value of `engine.dtype` → torch dtype. `int8` of `rollout.dtype` has none: weights are rounded to 8 bits,
#: arithmetic uses the model's dtype.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Probabilities become integers in units of 2⁻⁴⁴, whose sums are exact in any order.
_UNITS = float(2**44)


class HFRollout:
    """A `RolloutEngine` on plain `model.generate`; any causal language model of transformers works."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device | str,
        max_num_seqs: int | None = None,
        dtype: RolloutDtype | None = None,
    ) -> None:
        """Copies `model`; the original is not used afterwards, so that the trainer may own it.

        Args:
            model: a causal language model, not yet wrapped by a training engine.
            tokenizer: defines padding and end of sequence.
            device: device of the copy.
            max_num_seqs: sequences generated at once; None: the whole batch.
            dtype: precision of the copy; None: that of the model. `int8` samples like an engine with
                weight-only quantisation, see `_round_to_int8`.

        Raises:
            UsageError: neither model nor tokenizer defines an end-of-sequence token.
        """
        self._model = copy.deepcopy(model).to(device).eval().requires_grad_(False)
        self._is_int8 = dtype == "int8"
        if dtype is not None:
            into_precision(self._model, dtype)
        self._device = torch.device(device)
        self._max_num_seqs = max_num_seqs
        self._eos_ids = end_ids(tokenizer, model.generation_config)
        self._pad_id = self._eos_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        # An empty config, because `generate` takes missing settings from the model's generation config
        # (Qwen's has a top_p and a repetition penalty).
        self._model.generation_config = GenerationConfig()
        self._shares_prompts = can_share_prefix(self._model)
        self._weights: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        self._expected = ExpectedWeights(self._model)
        self._policy_version: int | None = 0  # None during a sync and after a failed one

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Turns:
        """See `RolloutEngine.sample`; adjacent requests with equal tokens share their computation.

        Each time half of the rows have ended, the others go on without them.
        """
        policy_version = synced(self._policy_version)
        size = self._max_num_seqs or max(len(requests), 1)
        requests = Requests.of(requests)
        chunks = (requests[start : start + size] for start in range(0, len(requests), size))
        return joined_turns([self._sample(chunk, sampling, policy_version) for chunk in chunks])

    @torch.no_grad()
    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`: all weights, merged; one name of tied weights is enough."""
        self._policy_version = None
        for names, tensor in self._expected.checked(policy.weights()):
            self._weights[names[0]].copy_(tensor)  # casts and moves; tied names are one tensor
        if self._is_int8:
            _round_to_int8(self._model)
        self._policy_version = policy_version

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        del self._model, self._weights

    @torch.no_grad()
    def _sample(self, requests: Requests, sampling: Sampling, policy_version: int) -> Turns:
        """Samples the turns of one chunk."""
        sampler = RecordingSampler(requests, sampling, self._eos_ids, self._device)
        longest = sampler.tokens.shape[1]
        divides = self._shares_prompts and not sampling.with_experts  # a cache can be that of other rows
        prompt_ids, prompt_mask, shared = _in_columns(
            requests.token_ids,
            self._pad_id,
            shares=divides,
            window=shortest_window(self._model.config.get_text_config()) - longest,
        )
        prompt_ids = prompt_ids.to(self._device)
        prompt_mask = prompt_mask.to(self._device)
        config = GenerationConfig(
            max_length=prompt_ids.shape[1] + longest,
            return_dict_in_generate=True,
            do_sample=False,  # the sampler has already chosen the token
            eos_token_id=self._eos_ids,
            pad_token_id=self._pad_id,
        )
        body = body_of(self._model)
        routing = Routing(Mixture.of(body, REPLAY)) if sampling.with_experts else None
        with routing or contextlib.nullcontext():
            first = prompt_ids[:, :shared]
            is_read = prompt_mask[:, :shared]
            cache = shared_prefix(body, first, is_read, (is_read.cumsum(1) - 1).clamp_(min=0))
            token_ids = prompt_ids
            mask = prompt_mask.long()
            while True:
                found = self._model.generate(
                    token_ids,
                    attention_mask=mask,
                    generation_config=config,
                    logits_processor=processors(sampling, sampler),
                    stopping_criteria=[sampler.most_have_ended] if divides else None,
                    past_key_values=cache,
                )
                rows = sampler.go_on()
                if not len(rows):
                    break
                token_ids = found.sequences[rows]
                cache = found.past_key_values
                mask = functional.pad(mask[rows], (0, token_ids.shape[1] - mask.shape[1]), value=1)
                cache.batch_select_indices(rows)
        turns = sampler.turns(policy_version)
        if routing is None:
            return turns
        count = prompt_ids.shape[1]
        first, *steps = routing.passes(body, sampler.num_steps)
        columns = first.view(len(turns), count, *first.shape[1:])
        experts = torch.cat([columns, *(step[:, None] for step in steps)], 1).to("cpu", torch.int16)
        spans = zip(experts, (~prompt_mask).sum(1).tolist(), turns.lengths.tolist(), strict=True)
        return replace(turns, experts=[row[start : count + size - 1] for row, start, size in spans])


def into_precision(model: nn.Module, dtype: RolloutDtype) -> None:
    """Converts `model` in place to the precision of an engine of this dtype."""
    if dtype == "int8":
        _round_to_int8(model)
        return
    # Parameters only, as `from_pretrained` does: rounding rotary frequencies to bfloat16 would change the
    # model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])


@torch.no_grad()
def _round_to_int8(model: nn.Module) -> None:
    """Rounds the weight of every linear layer, including the output head, to 8 bits per output row.

    Row i becomes s_i·round(w_i / s_i) with s_i = max|w_i| / 127: symmetric, 255 levels, computed in
    float32 and stored in the layer's dtype, as a weight-only int8 kernel uses it.
    Norms and embeddings are unchanged, except for an embedding that is tied to the head.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.float()
            step = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
            module.weight.copy_((weight / step).round() * step)


def _in_columns(
    rows: Sequence[Sequence[int]], pad_id: int, *, shares: bool, window: int
) -> tuple[Tensor, Tensor, int]:
    """Places prompts so that adjacent ones share the computation of the tokens with which they begin.

        · s s s | · a a       two beginnings, each computed once; both parts are padded on the left
        · s s s | b b b
        t t t t | · · c

    Which rows share is chosen for the fewest computed tokens.

    Args:
        shares: False: there is no first part.
        window: most columns if there is padding between the parts, which shortens a sliding window.

    Returns:
        Token ids (B, P) int64; the mask (B, P) bool of those that are not padding; columns of the first part.
    """
    lengths = torch.tensor([*map(len, rows)])
    flat = Segments(lengths)
    ids = joined_ids(rows)
    cost = len(rows) * int(lengths.max())
    width = 0
    cuts = torch.zeros_like(lengths)
    common = equal_beginnings(flat.padded(ids, -1)).sum(1)
    # with the row before; every row goes on with a token of its own
    common = functional.pad(common, (1, 0)).minimum(lengths - 1).minimum(lengths.roll(1) - 1)
    for least in sorted({*common.tolist()} - {0}) if shares else ():
        is_new = common < least
        runs = Segments.of_index(is_new.cumsum(0) - 1, int(is_new.sum()))
        shared = -runs.max(-torch.where(is_new, lengths - 1, common)).long()
        most = int(shared[runs.lengths > 1].max())
        first = runs.spread(shared.clamp(max=most))
        rest = int((lengths - first).max())
        found = len(runs) * most + len(rows) * rest
        if found < cost and (rest == 1 or most + rest <= window):
            cost = found
            width = most
            cuts = first
    in_first = flat.places < flat.spread(cuts)
    size = width + int((lengths - cuts).max())
    columns = flat.places + torch.where(in_first, width - flat.spread(cuts), size - flat.spread(lengths))
    token_ids = torch.full((len(rows), size), pad_id)
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    token_ids[flat.index, columns] = ids
    mask[flat.index, columns] = True
    return token_ids, mask, width


class RecordingSampler(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """The last logits processor: samples the token, records it, and makes it the argmax.

    Attributes:
        tokens: (B, T) int64, the chosen tokens; T is the largest limit of a request.
        log_probs: (B, T) float32, log-prob of each chosen token under the processed distribution. No more
            than one step's (B, V) is in memory at a time.
        lengths: (B,) int64, number of tokens of each turn, end of sequence included.
        stopped: (B,) bool, the turn has reached an end of sequence.
        rows: (b,) int64, the requests whose rows are computed.
        num_steps: number of calls.
    """

    def __init__(
        self,
        requests: Requests,
        sampling: Sampling,
        end_ids: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """Draws all random numbers."""
        limits = requests.limits(sampling)
        self._uniforms = uniforms(requests.seeds, max(limits)).to(device)
        self._limits = torch.tensor(limits, device=device)
        self._end_ids = torch.tensor(list(end_ids), device=device)
        self._sampling = sampling
        self.tokens = torch.zeros(self._uniforms.shape, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(self._uniforms.shape, dtype=torch.float32, device=device)
        self.lengths = torch.zeros_like(self._limits)
        self.stopped = torch.zeros_like(self._limits, dtype=torch.bool)
        self.num_steps = 0
        self.rows = torch.arange(len(requests), device=device)
        self._sizes = torch.zeros_like(self.tokens, dtype=torch.int32)
        self._sets: list[Tensor] = []  # per step, (2, kept): flattened indices in (B, T), tokens
        self._most_likely: list[tuple[Tensor, Tensor]] = []  # per step, (B, K): tokens, log-probs

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sets (B, V) `scores` in place to zero at the chosen token and to -inf elsewhere."""
        position = self.num_steps
        running = self._running[self.rows]
        rows = self.rows
        self.num_steps += 1
        if self._sampling.with_kept:
            self._keep(position, scores, running)
        log_probs = scores.float().log_softmax(dim=-1)
        if self._sampling.greedy:
            tokens = log_probs.argmax(dim=-1, keepdim=True)
        else:
            tokens = draw(log_probs, self._uniforms[rows, position, None])
        self.tokens[rows, position] = tokens.squeeze(1)
        self.log_probs[rows, position] = log_probs.gather(1, tokens).squeeze(1)
        count = self._sampling.num_most_likely
        if count:
            highest = log_probs.topk(min(count, log_probs.shape[-1]))
            shape = len(self.lengths), highest.values.shape[1]
            ids = self.tokens.new_zeros(shape, dtype=torch.int32)
            values = log_probs.new_zeros(shape)
            ids[rows] = highest.indices.int()
            values[rows] = highest.values
            self._most_likely.append((ids, values))
        self.lengths[rows] += running
        self.stopped[rows] |= running & torch.isin(tokens.squeeze(1), self._end_ids)
        tokens = torch.where(running[:, None], tokens, self._end_ids[0])  # ends a row at its limit
        return scores.fill_(-torch.inf).scatter_(1, tokens, 0.0)

    @property
    def _running(self) -> Tensor:
        """(B,) bool: the turn goes on."""
        return ~self.stopped & (self.num_steps < self._limits)

    def most_have_ended(self, token_ids: Tensor, _: Any) -> Tensor:
        """For each row that is computed, whether at most half of them go on; a criterion of `generate`."""
        is_few = 2 * self._running.sum() <= len(token_ids)
        return is_few.expand(len(token_ids))

    def go_on(self) -> Tensor:
        """(b,) int64: places of the rows that go on among those that were computed; only these are next."""
        goes_on = self._running[self.rows]
        self.rows = self.rows[goes_on]
        return goes_on.nonzero().squeeze(1)

    def _keep(self, position: int, scores: Tensor, running: Tensor) -> None:
        """Records the tokens that running rows sample from; none for rows whose scores are all finite."""
        kept = scores > -torch.inf
        kept &= (running & ~kept.all(-1))[:, None]
        self._sizes[self.rows, position] = kept.sum(-1, dtype=torch.int32)
        rows, tokens = kept.nonzero(as_tuple=True)
        self._sets.append(torch.stack([self.rows[rows] * self._sizes.shape[1] + position, tokens]).int())

    def turns(self, policy_version: int) -> Turns:
        """One turn per request, on the CPU."""
        tokens = self._column(self.tokens)
        return Turns(
            token_ids=tokens,
            log_probs=self._column(self.log_probs),
            versions=torch.full_like(tokens, policy_version),
            lengths=self.lengths.cpu(),
            finish_reasons=["stop" if stopped else "length" for stopped in self.stopped.tolist()],
            kept=self._kept() if self._sampling.with_kept else None,
            most_likely=self._listed() if self._sampling.num_most_likely else None,
        )

    def _column(self, rows: Tensor) -> Tensor:
        """Of (B, T, …), what belongs to sampled tokens: (M, …)."""
        is_sampled = torch.arange(rows.shape[1]) < self.lengths.cpu()[:, None]
        return rows.cpu()[is_sampled]

    def _kept(self) -> TokenLists:
        """The tokens that each token was sampled from."""
        places, tokens = torch.cat(self._sets, dim=1)
        return TokenLists(self._column(self._sizes), tokens[places.argsort(stable=True)].cpu())

    def _listed(self) -> TokenLists:
        """The most likely tokens at the position of each token."""
        ids, log_probs = (
            self._column(torch.stack(steps, 1)) for steps in zip(*self._most_likely, strict=True)
        )
        is_listed = log_probs > -torch.inf
        return TokenLists(is_listed.sum(-1, dtype=torch.int32), ids[is_listed], log_probs[is_listed])


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling, (B, V) normalised log-probs and (B, 1) uniforms in [0, 1) → (B, 1) int64.

    The CDF is summed in integers, which is exact in any order (a parallel sum of floats need not even be
    monotone), so a token of probability zero is never sampled. A row of NaN gives an arbitrary token.
    """
    cdf = log_probs.exp().mul_(_UNITS).to(torch.int64).cumsum_(dim=-1)
    total = cdf[:, -1:]
    target = (uniforms * total).to(torch.int64)  # float64 below 1, so the product rounds to below total
    return torch.searchsorted(cdf, target, right=True).clamp_(max=log_probs.shape[-1] - 1)


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """(B, count) float64 in [0, 1): the random numbers of each request, the same whatever their count."""
    numbers = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in zip(numbers, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return numbers


def processors(sampling: Sampling, sampler: RecordingSampler) -> LogitsProcessorList:
    """transformers' processors for `sampling`, in transformers' order, then `sampler`."""
    is_hotter = sampling.temperature != 1.0
    first = [TemperatureLogitsWarper(sampling.temperature)] if is_hotter else []
    return LogitsProcessorList([*first, *truncation(sampling), sampler])


def truncation(sampling: Sampling) -> LogitsProcessorList:
    """transformers' processors for top-k, top-p and min-p, which apply to logits over the temperature."""
    found = LogitsProcessorList()
    if sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found
