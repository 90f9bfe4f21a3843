"""Rollout engines by name: factories and capabilities.

    @ROLLOUT_ENGINES.register(label="…", capabilities=EngineCapabilities(…))
    def my_engine(context: EngineContext) -> RolloutEngine: …

A user-defined engine is named `path/to/file.py:function`, see docs/how-to/extend.md. Does not import torch,
because the spec reads names and capabilities; an engine's dependencies are imported when it is built.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlctl.errors import EnvironmentFailure, RunFailure, SpecError, UsageError
from rlctl.leftovers import temporary_directory
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.rollout.protocol import Sampling
from rlctl.spec.rollout import VLLM_LORA_RANKS, EngineCapabilities, RolloutSpec
from rlctl.user_code import absolute_name, call_problem, missing_methods

if TYPE_CHECKING:
    import torch

    from rlctl.rollout.protocol import ResponseSampler, RolloutEngine
    from rlctl.rollout.ray_servers import RayHost
    from rlctl.rollout.replicas import ReplicaSettings
    from rlctl.rollout.vllm import VLLMRollout
    from rlctl.spec.run_spec import RunSpec

__all__ = [
    "EngineCapabilities",
    "EngineContext",
    "build_rollout",
    "chosen_engine",
    "engine_outside_training",
    "replica_settings",
    "sampling_of",
    "spec_outside_training",
]

ENGINE_LOGS = "engines"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Inputs from which a rollout engine is built, on one rank.

    Attributes:
        spec: spec of the run.
        model_path: directory or hub id of the policy.
        model: the policy, not yet wrapped by the training engine; an engine that keeps it must copy it. Under
            ZeRO-3 its weights are partitioned among the ranks (`ds_shape` is the full shape) unless the
            engine starts with the policy. None: the engine reads the weights of `model_path`, see
            `EngineCapabilities.reads_model_files`.
        tokenizer: tokenizer of the policy.
        device: device of the tensors of `Rollouts`.
        rank, world_size: rank of this process and number of ranks; rank 0 is the main one.
        agree: returns on every rank the first text among all ranks' that is not empty (a collective).
        run_dir: directory of the run; outside training a temporary one.
        params: `rollout.engine_params`, validated by the engine's parameter class; None: it has none.
    """

    spec: RunSpec
    model_path: str
    model: Any
    tokenizer: Any
    device: torch.device
    rank: int
    world_size: int
    agree: Callable[[str], str]
    run_dir: Path
    params: Any = None


def build_rollout(context: EngineContext) -> RolloutEngine:
    """Builds the engine that the spec names, with its validated `params`.

    Raises:
        EnvironmentFailure, UsageError: the engine is not available here, or does not support the model.
        RunFailure: the factory does not return a rollout engine.
    """
    from rlctl.spec.base import params_of

    part = ROLLOUT_ENGINES.part(context.spec.rollout.name)
    params = params_of(part, context.spec.rollout.engine_params)
    engine: RolloutEngine = part.function(replace(context, params=params))
    methods = ["generate", "close"] if context.model is None else ["generate", "sync_weights", "close"]
    if what := missing_methods(engine, *methods):
        raise RunFailure(what, where=f"rollout.name: {part.name}", fix="see rlctl/rollout/protocol.py")
    if problem := call_problem(engine.generate, [], None, n=1, step_seed=0, num_groups_total=1):
        fix = "def generate(self, prompts, sampling, *, n, step_seed, num_groups_total)"
        raise RunFailure(f"generate: {problem}", where=f"rollout.name: {part.name}", fix=fix)
    return engine


def chosen_engine(spec: RunSpec | None, name: str | None, option: str) -> str:
    """The rollout engine `name`, or that of the run, or `hf`; a user's function with its absolute path.

    `option` is the command's option that names an engine, for messages.

    Raises:
        UsageError: there is no such engine, or the user's file cannot be imported.
    """
    try:
        return ROLLOUT_ENGINES.part(name or (spec.rollout.name if spec else "hf")).name
    except UsageError as error:
        if name is None:
            error.fix = f"{error.fix}; or choose another engine: {option} hf"
        elif error.where == ROLLOUT_ENGINES.key:
            error.where = option
        raise


def spec_outside_training(
    spec: RunSpec,
    name: str,
    *,
    dtype: Literal["fp32", "bf16", "int8"] | None = None,
    max_num_seqs: int | None = None,
) -> RunSpec:
    """The spec of one engine in this process, for `engine_outside_training`.

    Args:
        spec: settings of the model and, if it names this engine, of the engine.
        name: a registered engine, or `path/to/file.py:function` with an absolute path.
        dtype: precision of the engine; None: that of `engine.dtype`.
        max_num_seqs: sequences generated at once; None: no limit.

    Raises:
        UsageError: the engine runs only in servers, or does not support the parameters.
    """
    from rlctl.spec.base import param_problems

    rollout = spec.rollout if name == absolute_name(spec.rollout.name) else RolloutSpec()
    settings = {"name": name, "mode": "colocated", "dtype": dtype, "max_num_seqs": max_num_seqs}
    spec = spec.model_copy(
        update={
            "rollout": rollout.model_copy(update=settings),
            "trainer": spec.trainer.model_copy(update={"nnodes": 1, "n_gpus_per_node": 1}),
        }
    )
    if "colocated" not in spec.rollout_engine.modes:
        what, fix = f"{name} runs only in servers", "choose another engine, such as hf"
        raise UsageError(what, where="rollout.mode", fix=fix)
    if problems := param_problems(ROLLOUT_ENGINES, name, "rollout.engine_params", rollout.engine_params):
        raise SpecError(problems)
    return spec


@contextlib.contextmanager
def engine_outside_training(
    spec: RunSpec,
    model_path: str,
    tokenizer: Any,
    load: Callable[[], Any],
    *,
    max_prompt_length: int,
    max_response_length: int,
) -> Iterator[ResponseSampler]:
    """The engine of a spec with the weights of a model directory, on one rank; closed on exit.

    Args:
        spec: from `spec_outside_training`.
        model_path: directory or hub id of the model.
        tokenizer: tokenizer of the model.
        load: returns the model on any device; not called if the engine reads the files itself.
        max_prompt_length, max_response_length: in tokens.

    Raises:
        EnvironmentFailure, UsageError, RunFailure: as `build_rollout`.
    """
    from rlctl.batch import torch_device
    from rlctl.rollout.weights import PlainWeights

    lengths = {"max_prompt_length": max_prompt_length, "max_response_length": max_response_length}
    model_spec = spec.model.model_copy(update={"path": model_path, "revision": None, "lora_rank": 0})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update=lengths), "model": model_spec})
    model = None if spec.rollout_engine.reads_model_files else load()
    with temporary_directory("engine") as run_dir:
        engine = build_rollout(
            EngineContext(
                spec=spec,
                model_path=model_path,
                model=model,
                tokenizer=tokenizer,
                device=torch_device(),
                rank=0,
                world_size=1,
                agree=str,
                run_dir=run_dir,
            )
        )
        try:
            if model is not None and not spec.rollout_engine.starts_with_policy:
                engine.sync_weights(PlainWeights(model.named_parameters()), 0)
            del model
            yield engine
        finally:
            engine.close()


@ROLLOUT_ENGINES.register(
    label="Hugging Face generation in the trainer's process",
    capabilities=EngineCapabilities(
        dtypes=frozenset({"fp32", "bf16", "int8"}),
        starts_with_policy=True,
        checks_syncs=False,
        samples_while_training=frozenset({"colocated"}),
        slow_on_gpu="Hugging Face generation on a GPU takes about five times as long as vLLM's",
        reports_kept="always",
    ),
)
def hf(context: EngineContext) -> RolloutEngine:
    """Plain `model.generate` on a copy of the policy."""
    from rlctl.rollout.hf import HFRollout

    rollout = context.spec.rollout
    return HFRollout(
        context.model,
        context.tokenizer,
        context.device,
        max_num_seqs=rollout.max_num_seqs,
        dtype=rollout.dtype,
    )


@ROLLOUT_ENGINES.register(
    label="vLLM in the trainer's processes, or in servers",
    capabilities=EngineCapabilities(
        modes=frozenset({"colocated", "server"}),
        samples_while_training=frozenset({"server"}),
        reads_model_files=True,
        applies_adapters=True,
        takes_engine_kwargs=True,
        frees_memory=True,
        forms_batches=True,
        tensor_parallel=True,
        min_temperature=0.01,  # vLLM raises lower ones to this, with a warning in its log
        reports_kept="top_k",
    ),
)
def vllm(context: EngineContext) -> RolloutEngine | VLLMRollout:
    """vLLM: paged attention, continuous batching."""
    import torch

    from rlctl.prefix import reads_more_than_text
    from rlctl.rollout.completions import MERGE_LORA
    from rlctl.rollout.vllm import TrainedVLLMRollout, VLLMRollout
    from rlctl.rollout.weights import ExpectedWeights

    spec, rollout = context.spec, context.spec.rollout
    if context.model is None:
        num_gpus = rollout.tensor_model_parallel_size
        shards = {"tensor_parallel_size": num_gpus} if 1 < num_gpus <= torch.cuda.device_count() else {}
        return VLLMRollout(
            context.model_path,
            context.tokenizer,
            dtype=_dtype(spec),
            max_model_len=_longest(spec),
            max_num_seqs=rollout.max_num_seqs,
            trust_remote_code=spec.model.trust_remote_code,
            engine_kwargs=shards | rollout.engine_kwargs,
        )
    if spec.syncs_adapter and torch.cuda.is_available() and _dtype(spec) == "fp32":
        what = "vLLM's kernels for adapters support half precision only"
        raise UsageError(what, where="rollout.dtype", fix=f"write bf16; or {MERGE_LORA}")
    if rollout.mode == "server":
        return _on_servers(context)
    return TrainedVLLMRollout(
        context.model_path,
        context.tokenizer,
        ExpectedWeights(context.model),
        dtype=_dtype(spec),
        max_model_len=_longest(spec),
        max_num_seqs=rollout.max_num_seqs,
        seed=spec.trainer.seed,
        revision=None if spec.is_embedded else spec.model.revision,
        trust_remote_code=spec.model.trust_remote_code,
        reads_images=reads_more_than_text(context.model.config),
        max_lora_rank=_max_lora_rank(spec),
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        sleeps=rollout.free_cache_engine,
        device=context.device,
        engine_kwargs=_engine_kwargs(spec),
    )


def _on_servers(context: EngineContext) -> RolloutEngine:
    from rlctl.prefix import reads_more_than_text
    from rlctl.rollout.completions import vllm_missing
    from rlctl.rollout.published_weights import PublishedWeights
    from rlctl.rollout.replicas import Replicas
    from rlctl.rollout.versioned_dir import VersionedDir
    from rlctl.rollout.vllm_reachable import reachable
    from rlctl.rollout.vllm_server import VLLMServerRollout
    from rlctl.rollout.weight_broadcast import WeightBroadcast

    spec, model, tokenizer = context.spec, context.model, context.tokenizer
    server = spec.rollout.server
    broadcasts = spec.broadcasts_weights(on_gpus=context.device.type == "cuda")
    needs_broadcast = server.weight_transfer == "broadcast"
    by_ray, is_main = server.is_placed_by_ray, context.rank == 0
    # The first rank of every node starts servers there, because other nodes cannot read files of this node.
    on_nodes = spec.trainer.nnodes if broadcasts and not (by_ray or server.urls) else 1
    node, local_rank = divmod(context.rank, spec.trainer.n_gpus_per_node)
    published = adapters = replicas = broadcast = None
    directory = Path(server.weights_dir).expanduser() if server.weights_dir else None
    held = contextlib.ExitStack()
    if is_main and server.urls:
        rank = spec.model.lora_rank * spec.syncs_adapter
        backends = reachable(server.urls, server.start_timeout, lora_rank=rank)
        broadcasts = broadcasts and _can_broadcast(server.urls, backends, context.device, needs_broadcast)
    if local_rank == 0 and node < on_nodes:
        published = PublishedWeights(model, tokenizer, directory)
        if not server.urls:
            hosts = held.enter_context(_ray_hosts(spec, broadcasts)) if by_ray else None
            if importlib.util.find_spec("vllm") is None and not by_ray:
                raise vllm_missing(ModuleNotFoundError(name="vllm"))
            logs = context.run_dir / ENGINE_LOGS / (f"node-{node}" if node else "")
            settings = replica_settings(spec)
            if reads_more_than_text(model.config):
                settings = replace(
                    settings, more_arguments=("--language-model-only", *settings.more_arguments)
                )
            replicas = Replicas(server.replicas, settings, published.latest, logs, hosts)
    if is_main and spec.syncs_adapter:
        adapters = VersionedDir(directory)
    urls = [url.rstrip("/") for url in server.urls]
    for each in range(0 if urls else on_nodes):
        urls += context.agree(" ".join(replicas.urls) if replicas and each == node else "").split()
    if is_main and published and broadcasts:
        broadcast = WeightBroadcast(urls, published.expected, context.device)
    return VLLMServerRollout(
        urls,
        tokenizer,
        model.generation_config,
        device=context.device,
        rank=context.rank,
        agree=context.agree,
        published=published,
        replicas=replicas,
        start_timeout=server.start_timeout,
        answer_timeout=server.answer_timeout if server.urls else None,
        adapters=adapters,
        takes_adapter=spec.syncs_adapter,
        broadcast=broadcast,
        needs_broadcast=needs_broadcast,
        starts_empty=broadcasts and not server.urls,
        held=held,
    )


def _ray_hosts(spec: RunSpec, broadcasts: bool) -> contextlib.AbstractContextManager[list[RayHost]]:
    """Hosts for servers in a Ray cluster.

    Raises:
        UsageError: the other machines of the cluster could not read new weights.
    """
    import torch

    from rlctl.rollout.ray_servers import ray_hosts

    server, on_gpus = spec.rollout.server, torch.cuda.is_available()
    if not (broadcasts or server.weights_dir):
        raise UsageError(
            "servers on other machines cannot read weights in the shared memory of this machine",
            where="rollout.server.placement: ray",
            fix="set rollout.server.weight_transfer: broadcast, or a shared rollout.server.weights_dir",
        )
    gpus = spec.rollout.tensor_model_parallel_size if on_gpus else 0
    of_trainer = spec.trainer.n_gpus_per_node if on_gpus else 0
    return ray_hosts(server.replicas, gpus, of_trainer, server.start_timeout)


def _can_broadcast(urls: list[str], backends: list[str], device: torch.device, is_needed: bool) -> bool:
    """Whether running servers, with these backends of vLLM's weight transfer, can receive a broadcast.

    Raises:
        EnvironmentFailure: they cannot, and a broadcast is required.
    """
    from rlctl.rollout.completions import vllm_missing
    from rlctl.rollout.weight_broadcast import transfer_backend

    backend = transfer_backend(device)
    others = [url for url, found in zip(urls, backends, strict=True) if found != backend]
    if is_needed and others:
        options = f"--weight-transfer-config '{json.dumps({'backend': backend})}'"
        raise EnvironmentFailure(
            "a vLLM server does not accept weights by broadcast",
            where=f"rollout.server.urls: {others[0]}",
            fix=f"start it with {options}; or set rollout.server.weight_transfer: auto",
        )
    has_vllm = backend == "gloo" or importlib.util.find_spec("vllm") is not None
    if is_needed and not has_vllm:
        raise vllm_missing(ModuleNotFoundError(name="vllm"))
    return has_vllm and not others


def replica_settings(spec: RunSpec) -> ReplicaSettings:
    """Settings with which the vLLM servers of this run are started.

    Raises:
        UsageError: there are not enough GPUs in addition to the trainer's.
    """
    import torch

    from rlctl.rollout.replicas import ReplicaSettings
    from rlctl.rollout.vllm import VLLM_DTYPES
    from rlctl.rollout.weight_broadcast import transfer_backend

    rollout, trainers = spec.rollout, spec.trainer.n_gpus_per_node
    on_gpus = torch.cuda.is_available()
    backend = transfer_backend(torch.device("cuda" if on_gpus else "cpu"))
    here = 0 if rollout.server.is_placed_by_ray else rollout.server.replicas
    theirs = here * rollout.tensor_model_parallel_size
    if on_gpus and trainers + theirs > (visible := torch.cuda.device_count()):
        raise UsageError(
            f"the trainer needs {trainers} GPUs and the servers {theirs}, but {visible} are visible",
            where="rollout.server.replicas × rollout.tensor_model_parallel_size",
            fix="lower one of them or trainer.n_gpus_per_node; or set rollout.mode: colocated",
        )
    return ReplicaSettings(
        dtype=VLLM_DTYPES[_dtype(spec)],
        max_model_len=_longest(spec),
        max_num_seqs=rollout.max_num_seqs,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        first_gpu=trainers if on_gpus else None,
        trust_remote_code=spec.model.trust_remote_code,
        max_lora_rank=_max_lora_rank(spec),
        transfer_backend=backend if spec.broadcasts_weights(on_gpus=on_gpus) else "",
        host=_address(spec),
        start_timeout=rollout.server.start_timeout,
        answer_timeout=rollout.server.answer_timeout,
        max_restarts=rollout.server.max_restarts,
        more_arguments=tuple(as_arguments(_engine_kwargs(spec))),
    )


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Converts vLLM options to arguments of `vllm serve`: `--name value`, `--flag` and `--no-flag`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            arguments += [f"--{flag}", text]
    return arguments


def sampling_of(spec: RunSpec) -> Sampling:
    """Sampling settings of the training responses."""
    rollout = spec.rollout
    return Sampling(
        max_response_length=spec.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_kept=rollout.exact_sampling,
        num_most_likely=spec.algorithm.rollout_correction.score_centering or 0,
    )


def _engine_kwargs(spec: RunSpec) -> dict[str, Any]:
    """vLLM's own arguments; with token lists also the maximum number of log-probs per token."""
    from rlctl.rollout.completions import listed_tokens

    listed = listed_tokens(sampling_of(spec))
    return ({"max_logprobs": listed} if listed else {}) | spec.rollout.engine_kwargs


def _address(spec: RunSpec) -> str:
    """Address at which this node's servers listen: loopback, or one that ranks on other nodes can reach."""
    from rlctl.rollout.weight_broadcast import own_address

    main = os.environ.get("MASTER_ADDR", LOOPBACK)
    if spec.trainer.nnodes == 1:
        return LOOPBACK
    is_first = int(os.environ.get("RANK", "0")) < spec.trainer.n_gpus_per_node
    return main if is_first else own_address([f"http://{main}"])


def _max_lora_rank(spec: RunSpec) -> int:
    """LoRA rank an engine is built for: the smallest supported one ≥ the adapter's; 0: merged weights."""
    if not spec.syncs_adapter:
        return 0
    return min(rank for rank in VLLM_LORA_RANKS if rank >= spec.model.lora_rank)


def _longest(spec: RunSpec) -> int:
    return spec.data.max_prompt_length + spec.data.max_response_length


def _dtype(spec: RunSpec) -> Any:
    return spec.rollout.dtype or spec.engine.dtype
