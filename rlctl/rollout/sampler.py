"""Samples tokens inside `generate` from precomputed random numbers and records their log-probs.

Each token is sampled by inverse CDF: the first whose cumulative probability exceeds the uniform number of
this (sample, position). The result depends neither on torch's global random state nor on the other rows of
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlctl.batch import TokenLists
from rlctl.rollout.protocol import Sampling

#: Probabilities become integers in units of 2⁻⁴⁴, whose sums are exact in any order.
_UNITS = float(2**44)


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

    Args:
        step_seed: seed of the whole batch's random numbers.
        sample_ids: (B,) int64, index of each sample in the whole batch, over all ranks.
        num_samples: samples in the whole batch.
        length: response tokens.
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
