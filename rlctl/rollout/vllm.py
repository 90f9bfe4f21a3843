"""Rollouts with vLLM in this process."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from rlctl.errors import (
    EnvironmentFailure,
    RlctlError,
    RunFailure,
    UsageError,
    in_words,
    lost_rank,
    one_line,
)
from rlctl.processes import use_interface
from rlctl.rollout.completions import (
    MERGE_LORA,
    Completion,
    CompletionRollout,
    listed_tokens,
    vllm_missing,
)
from rlctl.rollout.expected_weights import ExpectedWeights
from rlctl.rollout.protocol import EngineReport, Policy, Request, Sampling, SavedAdapter
from rlctl.rollout.tensor_parallel import Asked, TensorParallelGroup
from rlctl.rollout.weights import VersionedDir
from rlctl.routing import REPLAY
from rlctl.run_spec.keys import closest

#: Size of the key-value cache on a CPU in GiB, unless VLLM_CPU_KVCACHE_SPACE is set.
CPU_CACHE_GIB = "2"
CPU_WORKER = "rlctl.rollout.vllm_workers.NamedCPUWorker"
#: Pattern of an error → what vLLM refuses, the key to change (None: the model), and what to write instead.
_REFUSALS = {
    "does not support LoRA": ("vLLM refuses the adapter", None, MERGE_LORA),
    "(?i)gpu.memory.utilization": ("vLLM does not start", "rollout.gpu_memory_utilization", None),
    "(?i)auxoutput|routed.experts": (
        *("vLLM cannot report experts here", REPLAY),
        "set it to false, or rollout.name: hf",
    ),
}


class VLLMRollout(CompletionRollout):
    """A `RolloutEngine` on vLLM's offline engine."""

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        options: Mapping[str, Any],
        expected: ExpectedWeights | None = None,
        *,
        seed: int = 0,
        revision: str | None = None,
        sleeps: bool = False,
    ) -> None:
        """Loads the model into a new engine.

        Args:
            model_path: directory or hub id.
            options: further arguments of vLLM's `LLM`, see `vllm_options`. With `enable_lora`, the engine
                applies the policy's adapter itself: it receives the frozen base once, and A and B at every
                sync.
            expected: weights that a sync must provide before sampling; None: they are read from `model_path`.
                If they are given, `tensor_parallel_size` is the number of ranks whose GPUs share the model:
                above 1, all ranks of torch's process group create such an engine, and later sync weights,
                release and finish together.
            seed: seed of the engine; each response has a separate seed.
            revision: branch, tag or commit of a model on the hub; None: the main one.
            sleeps: free the GPU's memory between sampling phases, see `release`.

        Raises:
            EnvironmentFailure: vLLM is not installed, or does not start on this machine.
            UsageError: vLLM rejects the model.
        """
        _set_environment()
        self._isolated = IsolatedState()
        try:
            with self._isolated.running(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vLLM's warnings about torch
                from vllm import LLM
        except Exception as error:  # the import loads drivers, operators and other packages
            raise vllm_missing(error) from error
        self._expected = expected
        self._sleeps = sleeps and torch.cuda.is_available()
        self._adapters = VersionedDir(None) if expected and options.get("enable_lora") else None
        num_ranks = options.get("tensor_parallel_size", 1) if expected else 1
        try:
            arguments = {
                "model": model_path,
                "seed": seed,
                "revision": revision,
                "tokenizer_revision": revision,
                "enable_sleep_mode": self._sleeps,
            }
            if expected:
                arguments |= _trained(options)
            self._group = TensorParallelGroup(num_ranks) if num_ranks > 1 else None
            self._joined_group = torch.distributed.is_initialized()  # of the trainer; else it forms its own
            config = _generation_config(model_path, revision, options.get("trust_remote_code", False))
            with self._isolated.running():
                self._llm: Any = LLM(**arguments | dict(options))
        except Exception as error:
            raise _not_started(model_path, error) from error
        super().__init__(tokenizer, config, policy_version=None if expected else 0)
        self._adapter: Any = None  # vLLM's request object of the adapter to sample with
        self._asleep: set[str] = set()
        self._sleeping_bytes = 0  # GPU memory that it frees while it sleeps
        self.release(weights_follow=expected is not None)

    def report(self) -> EngineReport:
        """vLLM's version and model runner, and the memory that it frees."""
        import vllm

        config = getattr(self._llm.llm_engine, "vllm_config", None)
        runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
        description = f"vLLM {vllm.__version__}, model runner {runner}"
        return EngineReport(description, sleeping_bytes=self._sleeping_bytes)

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        with self._isolated.running(), _keeping_process_group() if self._joined_group else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        if self._adapters:
            self._adapters.close()

    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        asked = [(list(request.token_ids), self._parameters(sampling, request)) for request in requests]
        if self._group:
            outputs = self._group.ask(asked, self._answer, self._policy_version)
        else:
            outputs = self._answer(asked)
        return [completion_of(output.outputs[0], has_lists=listed_tokens(sampling) > 0) for output in outputs]

    def finish(self) -> None:
        """Under tensor parallelism, processes requests until no rank of the group has any left."""
        if self._group:
            self._group.finish(self._answer, self._policy_version)

    def _answer(self, asked: list[Asked]) -> list[Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
        parameters = [SamplingParams(**options, detokenize=False, flat_logprobs=True) for _, options in asked]
        try:
            with self._isolated.running():
                self._wake("weights", "kv_cache")
                outputs: list[Any] = self._llm.generate(
                    prompts, parameters, use_tqdm=False, lora_request=self._adapter
                )
        except Exception as error:
            raise RunFailure(f"vLLM failed while sampling: {one_line(error)}", where="engine vllm") from error
        return outputs

    def release(self, *, weights_follow: bool) -> None:
        """Frees the GPU's memory if the engine sleeps; the next call restores what it needs.

        Args:
            weights_follow: all weights are synced before the next sampling, so they are discarded; otherwise
                they are copied to the host and back, as is the base of an adapter, which is synced only once.
        """
        if not self._sleeps or self._asleep:
            return
        weights_follow = weights_follow and self._adapter is None
        if weights_follow:
            self._policy_version = None  # sampling is an error until they are synced
        with self._isolated.running():
            torch.cuda.empty_cache()  # the trainer's memory is not counted
            free, _ = torch.cuda.mem_get_info()
            self._llm.sleep(level=2 if weights_follow else 1)
            self._sleeping_bytes = torch.cuda.mem_get_info()[0] - free
        self._asleep = {"weights", "kv_cache"}

    def _wake(self, *parts: str) -> None:
        """Wakes those of `parts` that are asleep; a part that is awake must not be woken again."""
        tags = sorted(self._asleep.intersection(parts))
        if tags:
            torch.cuda.empty_cache()  # memory cached in the trainer's step; not every vLLM does it
            self._llm.wake_up(tags=tags)
            self._asleep -= set(tags)

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; cached keys and values of the old weights are dropped."""
        assert self._expected is not None
        self._policy_version = None
        try:
            with self._isolated.running():
                self._wake("weights")
                if self._adapter is None:  # the base of an adapter does not change
                    named_tensors = self._expected.in_files(policy.weights(merged=self._adapters is None))
                    weights = ((name, tensor) for names, tensor in named_tensors for name in names)
                    self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                if self._adapters is not None:
                    self._adopt(policy.adapter(), self._adapters)
                if self._llm.reset_prefix_cache() is False:
                    raise RunFailure("vLLM kept cached blocks of older weights", where="engine vllm")
        except RlctlError:
            raise
        except Exception as error:
            raise RunFailure(
                f"vLLM did not load the new weights: {one_line(error)}", where="engine vllm"
            ) from error
        self._policy_version = policy_version

    def _adopt(self, adapter: SavedAdapter, versions: VersionedDir) -> None:
        """Replaces the previous adapter.

        Each adapter has a unique number and path, because vLLM's caches use them as keys.
        """
        from vllm.lora.request import LoRARequest

        engine = self._llm.llm_engine
        before = self._adapter
        number = before.lora_int_id + 1 if before else 1
        path = str(versions.publish(f"adapter-{number}", adapter.save))
        self._adapter = LoRARequest(path, number, path)
        if before:
            engine.remove_lora(before.lora_int_id)
        try:
            engine.add_lora(self._adapter)
        except ValueError as error:  # layers for which vLLM has no LoRA implementation
            raise UsageError(
                f"vLLM cannot run the adapter: {one_line(error)}",
                where="model.target_modules",
                fix=MERGE_LORA,
            ) from error


@contextmanager
def _keeping_process_group() -> Iterator[None]:
    """Context in which vLLM ends its own groups only, not torch's default group, which the trainer joined.

    DeepSpeed holds groups below the default one, and uses them again in the next run of this process.
    """
    destroy = torch.distributed.destroy_process_group

    def destroy_part(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    setattr(torch.distributed, destroy.__name__, destroy_part)
    try:
        yield
    finally:
        setattr(torch.distributed, destroy.__name__, destroy)


def _trained(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for an engine that gets its weights from the trainer, besides `options`."""
    settings: dict[str, Any] = {"load_format": "dummy"}
    if torch.distributed.is_initialized():  # by the trainer: one engine per rank, in its process
        settings["distributed_executor_backend"] = "external_launcher"
    if not torch.cuda.is_available():
        # On a CPU, vLLM repacks an output head that is tied to the embedding at the start, and keeps those
        # weights through every reload. Two separate tensors of the same values give the same model.
        settings["hf_overrides"] = {"tie_word_embeddings": False}
        if options.get("language_model_only"):  # the text config is a separate one
            settings["hf_overrides"]["text_config"] = {"tie_word_embeddings": False}
        if options.get("tensor_parallel_size", 1) > 1:
            settings["worker_cls"] = CPU_WORKER
    return settings


def _set_environment() -> None:
    """Sets the environment variables that vLLM reads on import."""
    if not torch.distributed.is_initialized():  # else they are set for all of the run's ranks
        use_interface()
    # Within this process vLLM's scheduler is deterministic, and its errors are raised here.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def completion_of(output: Any, *, has_lists: bool) -> Completion:
    """Converts vLLM's output, whose log-probs are `FlatLogprobs`; at each place, the sampled token is first.

    Raises:
        RunFailure: log-probs are not those of the sampled tokens.
    """
    token_ids = np.array(output.token_ids, dtype=np.int64)
    flat = output.logprobs
    starts = np.array(output.logprobs.start_indices, dtype=np.int64)
    ids = np.array(flat.token_ids, dtype=np.int64)
    log_probs = np.array(flat.logprobs, dtype=np.float32)
    if not np.array_equal(ids[starts], token_ids):
        raise RunFailure("vLLM's log-probs are not those of the tokens that it sampled", where="engine vllm")
    listed = (np.diff(starts, append=len(ids)), ids, log_probs) if has_lists else None
    experts = getattr(output, "routed_experts", None)  # where vLLM reports them
    return Completion(token_ids, log_probs[starts], output.finish_reason, listed, experts=experts)


def _generation_config(model_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The generation config of a model; also imports its class, so that `IsolatedState` can restore it."""
    from transformers import MODEL_MAPPING, AutoConfig, GenerationConfig

    revision = revision or "main"
    config = AutoConfig.from_pretrained(model_path, revision=revision, trust_remote_code=trust_remote_code)
    MODEL_MAPPING.get(type(config), None)
    try:
        return GenerationConfig.from_pretrained(model_path, revision=revision)
    except OSError:  # the model has none: derived from its config, as transformers does
        return GenerationConfig.from_model_config(config)


def _not_started(model_path: str, error: Exception) -> RlctlError:  # noqa: PLR0911
    if lost := lost_rank(error):  # vLLM forms groups of its own
        return lost
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown:
        from vllm import EngineArgs

        names = [field.name for field in fields(EngineArgs)]
        near = closest(unknown[1], names)
        fix = f"write {near}" if near else "leave it out"
        return UsageError("vLLM has no such option", where=f"rollout.engine_kwargs.{unknown[1]}", fix=fix)
    if isinstance(error, ValidationError) and (first := error.errors()[0])["loc"]:
        where = ".".join(["rollout.engine_kwargs", *map(str, first["loc"])])
        return UsageError(f"vLLM's option {in_words(first)}, got {first['input']!r}", where=where)
    if isinstance(error, TypeError) and "'str'" in str(error):  # it computes with the option
        message = f"vLLM needs a number for one of these options: {one_line(error)}"
        return UsageError(message, where="rollout.engine_kwargs", fix="correct the option that is a text")
    for pattern, (message, key, instead) in _REFUSALS.items():
        if re.search(pattern, str(error)):
            return UsageError(f"{message}: {one_line(error)}", where=key or model_path, fix=instead)
    if isinstance(error, ValueError):  # includes pydantic's errors, about the model or the options
        return UsageError(f"vLLM refuses the model: {one_line(error)}", where=model_path)
    return EnvironmentFailure(
        f"vLLM does not start: {one_line(error)}",
        where="engine vllm",
        fix="sample with the engine hf, or free memory",
    )


# --- the process-wide state that vLLM changes -------------------------------------------------------
#
# Its workers set torch's number of threads (on a GPU to 1, which makes Adam in host memory ten times slower),
# environment variables and the precision of matrix products, and replace `torch.set_num_threads`. An
# architecture that vLLM runs through transformers (SmolLM3, OLMo 2) gets another base class, constructor and
# call in transformers' own module, with which no other model of this class can be created or run.

#: What vLLM replaces in a class of transformers.
_REPLACED = ("__init__", "__call__")
_Classes = dict[type, tuple[tuple[type, ...], dict[str, Any]]]


def _set_stream(stream: Any) -> None:
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())  # for the weights that are copied between the two
        torch.cuda.set_stream(stream)


def _set_variables(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _classes() -> _Classes:
    """Class of transformers' models → its bases, and what it defines of `_REPLACED`."""
    return {
        kind: (kind.__bases__, {name: vars(kind)[name] for name in _REPLACED if name in vars(kind)})
        for kind in _subclasses(PreTrainedModel)
    }


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _set_classes(classes: _Classes) -> None:
    for kind, (bases, own) in classes.items():
        if kind.__bases__ != bases:
            kind.__bases__ = bases
            for name in _REPLACED:
                if name in own:
                    setattr(kind, name, own[name])
                elif name in vars(kind):
                    delattr(kind, name)


#: How each part of the state is read and set, by torch's own functions.
_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: torch.set_num_threads, partial(setattr, torch, "set_num_threads")),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
    # Setting the CPU would slow every torch call.
    (torch.get_default_device, lambda at: torch.set_default_device(None if at.type == "cpu" else at)),
    (lambda: torch.cuda.current_stream() if torch.cuda.is_available() else None, _set_stream),
    (lambda: dict(os.environ), _set_variables),
    (_classes, _set_classes),
)


def process_state() -> list[Any]:
    """The current state, for `restore`."""
    return [read() for read, _ in _STATE]


def restore(state: Sequence[Any]) -> None:
    """Sets what differs from an earlier state."""
    for (read, write), value in zip(_STATE, state, strict=True):
        if read() != value:
            write(value)


class IsolatedState:
    """Runs an engine with the state that it last had, separate from that of the rest of the process."""

    def __init__(self) -> None:
        self._state: list[Any] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Applies the engine's state inside the block and restores the previous one, even on errors."""
        before = process_state()
        if self._state is not None:
            restore(self._state)
        try:
            yield
        finally:
            self._state = process_state()
            restore(before)
