"""Rollouts with Hugging Face `generate`, in the trainer's process, from a copy of its model.

Tokens are sampled inside `generate` from precomputed random numbers, and their log-probs recorded. Each token
is sampled by inverse CDF: the first whose cumulative probability exceeds the uniform number of this (sample,
position). The result depends neither on torch's global random state nor on the other rows of the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts, TokenLists
from rlctl.prefix import body_of, can_share_prefix, shared_prefix
from rlctl.rollout.assemble import assemble, end_ids, positions, sample_ids, synced
from rlctl.rollout.protocol import Policy, Sampled, Sampling
from rlctl.rollout.weights import ExpectedWeights

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
            tokenizer: decodes responses; defines padding and end of sequence.
            device: device of the copy and of every tensor that `generate` returns.
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
        self._tokenizer = tokenizer
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

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `RolloutEngine.generate`; T is the longest response of this call."""
        policy_version = synced(self._policy_version)
        prompt_ids = prompts.prompt_ids.to(self._device).repeat_interleave(n, dim=0)
        prompt_mask = prompts.prompt_mask.to(self._device).repeat_interleave(n, dim=0)
        places = sample_ids(prompts.group_ids.to(self._device), n)
        uniforms = global_uniforms(step_seed, places, num_groups_total * n, sampling.max_response_length)
        size = self._max_num_seqs or len(places)
        chunks = [
            self._sample(prompt_ids[rows], prompt_mask[rows], uniforms[rows], sampling)
            for start in range(0, len(places), size)
            for rows in [slice(start, start + size)]
        ]
        width = max(chunk.tokens.shape[1] for chunk in chunks)
        sampled = Sampled(
            tokens=torch.cat([_widen(chunk.tokens, width, self._pad_id) for chunk in chunks]),
            log_probs=torch.cat([_widen(chunk.log_probs, width, 0.0) for chunk in chunks]),
            lengths=torch.cat([chunk.lengths for chunk in chunks]),
            finish_reason=torch.cat([chunk.finish_reason for chunk in chunks]),
            kept=_joined([chunk.kept for chunk in chunks]),
            most_likely=_joined([chunk.most_likely for chunk in chunks]),
        )
        return assemble(prompts, sampled, n=n, tokenizer=self._tokenizer, policy_version=policy_version)

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

    def _sample(
        self, prompt_ids: Tensor, prompt_mask: Tensor, uniforms: Tensor, sampling: Sampling
    ) -> Sampled:
        """Samples the responses of one chunk; T is its longest response."""
        prompt_length = prompt_ids.shape[1]
        sampler = RecordingSampler(uniforms, prompt_length, sampling, self._eos_ids)
        config = GenerationConfig(
            max_new_tokens=sampling.max_response_length,
            do_sample=False,  # the sampler has already chosen the token
            eos_token_id=self._eos_ids,
            pad_token_id=self._pad_id,
        )
        sequences = self._model.generate(
            prompt_ids,
            attention_mask=prompt_mask.long(),
            generation_config=config,
            logits_processor=processors(sampling, sampler),
            past_key_values=self._prefix(prompt_ids, prompt_mask),
        )
        responses = sequences[:, prompt_length:]
        return Sampled(
            tokens=responses,
            log_probs=sampler.log_probs[:, : responses.shape[1]],
            lengths=sampler.lengths,
            finish_reason=torch.where(
                sampler.stopped, FINISH_REASONS.index("stop"), FINISH_REASONS.index("length")
            ).to(torch.int8),
            kept=sampler.kept(responses.shape[1]),
            most_likely=sampler.most_likely(responses.shape[1]),
        )

    @torch.no_grad()
    def _prefix(self, prompt_ids: Tensor, prompt_mask: Tensor) -> Any:
        """Cache of the prompts (B, P) without their last token, continued by `generate`; None: not shared."""
        if not self._shares_prompts:
            return None
        ids, mask = prompt_ids[:, :-1], prompt_mask[:, :-1]
        return shared_prefix(body_of(self._model), ids, mask, positions(mask))


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


def _joined(parts: list[TokenLists | None]) -> TokenLists | None:
    lists = [part for part in parts if part is not None]
    return TokenLists.joined(lists) if lists else None


def _widen(values: Tensor, width: int, fill: float) -> Tensor:
    """Pad (B, t) on the right to (B, width)."""
    return functional.pad(values, (0, width - values.shape[1]), value=fill)


class RecordingSampler(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """The last logits processor: samples the token, records its log-prob, and makes it the argmax.

    Attributes:
        log_probs: (B, T) float32, log-prob of each chosen token under the processed distribution;
            columns not generated stay 0. No more than one step's (B, V) is in memory at a time.
        lengths: (B,) int64, number of tokens of each row up to and including its end of sequence.
        stopped: (B,) bool, the row has reached an end of sequence.
    """

    def __init__(
        self, uniforms: Tensor, prompt_length: int, sampling: Sampling, end_ids: Sequence[int]
    ) -> None:
        """Takes (B, T) float64 `uniforms` in [0, 1); `prompt_length` includes padding."""
        self.log_probs = torch.zeros(uniforms.shape, dtype=torch.float32, device=uniforms.device)
        self.lengths = torch.zeros(len(uniforms), dtype=torch.int64, device=uniforms.device)
        self.stopped = torch.zeros(len(uniforms), dtype=torch.bool, device=uniforms.device)
        self._end_ids = torch.tensor(list(end_ids), device=uniforms.device)
        self._uniforms = uniforms
        self._prompt_length = prompt_length
        self._greedy = sampling.greedy
        self._with_kept = sampling.with_kept
        self._sizes = torch.zeros(uniforms.shape, dtype=torch.int32, device=uniforms.device)
        self._sets: list[Tensor] = []  # per step, (2, kept): flattened indices in (B, T), tokens
        self._num_most_likely = sampling.num_most_likely
        self._most_likely: list[tuple[Tensor, Tensor]] = []  # per step, (B, K): tokens, log-probs

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sets (B, V) `scores` in place to zero at the chosen token and to -inf elsewhere."""
        position = input_ids.shape[1] - self._prompt_length
        if self._with_kept:
            self._keep(position, scores)
        log_probs = scores.float().log_softmax(dim=-1)
        if self._greedy:
            tokens = log_probs.argmax(dim=-1, keepdim=True)
        else:
            tokens = draw(log_probs, self._uniforms[:, position, None])
        self.log_probs[:, position] = log_probs.gather(1, tokens).squeeze(1)
        if self._num_most_likely:
            highest = log_probs.topk(min(self._num_most_likely, log_probs.shape[-1]))
            self._most_likely.append((highest.indices.int(), highest.values))
        self.lengths += ~self.stopped
        self.stopped |= torch.isin(tokens.squeeze(1), self._end_ids)
        return scores.fill_(-torch.inf).scatter_(1, tokens, 0.0)

    def _keep(self, position: int, scores: Tensor) -> None:
        """Records the tokens that unfinished rows sample from; none for rows whose scores are all finite."""
        kept = scores > -torch.inf
        kept &= ~(self.stopped | kept.all(-1))[:, None]
        self._sizes[:, position] = kept.sum(-1)
        rows, tokens = kept.nonzero(as_tuple=True)
        self._sets.append(torch.stack([rows * self._sizes.shape[1] + position, tokens]).int())

    def kept(self, length: int) -> TokenLists | None:
        """The tokens that each of the first `length` tokens was sampled from; None unless `with_kept`."""
        if not self._with_kept:
            return None
        places, tokens = torch.cat(self._sets, dim=1)
        return TokenLists(self._sizes[:, :length], tokens[places.argsort(stable=True)])

    def most_likely(self, length: int) -> TokenLists | None:
        """The most likely tokens at each of the first `length` positions; None unless `num_most_likely`."""
        if not self._num_most_likely:
            return None
        tokens, log_probs = (torch.stack(steps[:length], 1) for steps in zip(*self._most_likely, strict=True))
        is_sampled = torch.arange(length, device=tokens.device) < self.lengths[:, None]
        listed = (log_probs > -torch.inf) & is_sampled[..., None]
        return TokenLists(listed.sum(-1, dtype=torch.int32), tokens[listed], log_probs[listed])


def draw(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sampling, (B, V) normalised log-probs and (B, 1) uniforms in [0, 1) → (B, 1) int64.

    The CDF is summed in integers, which is exact in any order (a parallel sum of floats need not even be
    monotone), so a token of probability zero is never sampled. A row of NaN gives an arbitrary token.
    """
    cdf = log_probs.exp().mul_(_UNITS).to(torch.int64).cumsum_(dim=-1)
    total = cdf[:, -1:]
    target = (uniforms * total).to(torch.int64)  # float64 below 1, so the product rounds to below total
    return torch.searchsorted(cdf, target, right=True).clamp_(max=log_probs.shape[-1] - 1)


def global_uniforms(step_seed: int, sample_ids: Tensor, num_samples: int, length: int) -> Tensor:
    """(B, length) float64: the rows of these samples in the random numbers of the whole batch.

    `sample_ids` (B,) int64 are indices in the whole batch of `num_samples`, over all ranks.
    """
    generator = torch.Generator().manual_seed(step_seed)
    of_all_samples = torch.rand(num_samples, length, dtype=torch.float64, generator=generator)
    return of_all_samples[sample_ids.cpu()].to(sample_ids.device)


def processors(sampling: Sampling, sampler: RecordingSampler) -> LogitsProcessorList:
    """transformers' processors for `sampling`, in transformers' order, then `sampler`."""
    chain = LogitsProcessorList()
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    chain.append(sampler)
    return chain
