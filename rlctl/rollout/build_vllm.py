"""Builds vLLM engines from the spec of a run: in this process or clients of servers. Imports no vLLM.

completions             base of both: requests → sampling parameters, vLLM's lists → turns
  vllm                  an engine in this process; isolates the state that vLLM changes
    tensor_parallel     several ranks share one; vllm_workers: parts of it on CPUs
  vllm_server           samples from servers, also in flight
    server_client       requests to servers, and servers that fail; server_access: the key of a server
    replicas            starts, watches and restarts servers; server_process: each, here or through Ray
    weight_sync         gives servers new weights; weights: as files; weight_broadcast: without files
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import torch

from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.prefix import reads_more_than_text
from rlctl.processes import LOOPBACK, NODE_ADDRESS
from rlctl.rollout.completions import LOGPROBS_MODE, MERGE_LORA, listed_tokens, vllm_missing, vllm_options
from rlctl.rollout.expected_weights import ExpectedWeights
from rlctl.rollout.protocol import EngineContext, sampling_of
from rlctl.rollout.replicas import Replicas, ReplicaSettings
from rlctl.rollout.server_access import KEY, ask
from rlctl.rollout.server_client import ServerClient, readable
from rlctl.rollout.server_process import RayHost, ray_hosts
from rlctl.rollout.vllm import VLLMRollout
from rlctl.rollout.vllm_server import GENERATE, VLLMServerRollout
from rlctl.rollout.weight_broadcast import WeightBroadcast, transfer_backend
from rlctl.rollout.weight_sync import WeightSync
from rlctl.rollout.weights import PublishedWeights, VersionedDir
from rlctl.run_spec.rollout import VLLM_LORA_RANKS
from rlctl.run_spec.run_spec import RunSpec

ENGINE_LOGS = "engines"
_INFO_S = 60.0  # the first response is slow: the server inspects its environment
_RETRY_S = 1.0
_NOT_OFFERED = {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}


def build_vllm(context: EngineContext) -> VLLMRollout | VLLMServerRollout:
    """The vLLM engine of a run; without a model, one that reads the files of `model_path`.

    Raises:
        EnvironmentFailure, UsageError: vLLM is not available here, or does not support the model.
    """
    spec = context.spec
    rollout = context.spec.rollout
    if context.model is None:
        num_gpus = rollout.tensor_model_parallel_size
        shards = {"tensor_parallel_size": num_gpus} if 1 < num_gpus <= torch.cuda.device_count() else {}
        options = _options(spec) | shards | rollout.engine_kwargs
        return VLLMRollout(context.model_path, context.tokenizer, options)
    if spec.syncs_adapter and torch.cuda.is_available() and _dtype(spec) == "fp32":
        message = "vLLM's kernels for adapters support half precision only"
        raise UsageError(message, where="rollout.dtype", fix=f"write bf16; or {MERGE_LORA}")
    if rollout.mode == "server":
        return _on_servers(context)
    return VLLMRollout(
        context.model_path,
        context.tokenizer,
        training_options(spec, reads_images=reads_more_than_text(context.model.config)),
        ExpectedWeights(context.model),
        seed=spec.trainer.seed,
        revision=None if spec.is_embedded else spec.model.revision,
        sleeps=rollout.free_cache_engine,
    )


def _options(spec: RunSpec) -> dict[str, Any]:
    return vllm_options(
        _dtype(spec),
        spec.max_length,
        max_num_seqs=spec.rollout.max_num_seqs,
        gpu_memory_utilization=spec.rollout.gpu_memory_utilization,
        trust_remote_code=spec.model.trust_remote_code,
    )


#: vLLM's default; a proof of the weight sync asks for up to this many, whatever sampling asks for.
_MAX_LOGPROBS = 20


def training_options(spec: RunSpec, *, reads_images: bool = False) -> dict[str, Any]:
    """vLLM's options for an engine or a server of a training run; `rollout.engine_kwargs` come last.

    `reads_images`: the model reads images as well as text.
    """
    rollout = spec.rollout
    options = _options(spec)
    options["tensor_parallel_size"] = rollout.tensor_model_parallel_size
    if spec.syncs_adapter:  # vLLM is built for certain ranks: the smallest one ≥ the adapter's
        options["enable_lora"] = True
        options["max_lora_rank"] = min(rank for rank in VLLM_LORA_RANKS if rank >= spec.model.lora_rank)
    if reads_images:  # without the vision tower, whose weights are not synced
        options["language_model_only"] = True
    sampling = sampling_of(spec)
    listed = listed_tokens(sampling)
    if listed:
        options["max_logprobs"] = max(listed, _MAX_LOGPROBS)
    if sampling.with_experts:
        options["enable_return_routed_experts"] = True
    return options | rollout.engine_kwargs


def replica_settings(spec: RunSpec, *, reads_images: bool = False) -> ReplicaSettings:
    """Settings with which the vLLM servers of this run are started.

    Raises:
        UsageError: there are not enough GPUs in addition to the trainer's.
    """
    rollout = spec.rollout
    trainers = spec.trainer.n_gpus_per_node
    server = rollout.server
    on_gpus = torch.cuda.is_available()
    here = 0 if server.is_placed_by_ray else server.replicas
    theirs = here * rollout.tensor_model_parallel_size
    if on_gpus and trainers + theirs > (visible := torch.cuda.device_count()):
        raise UsageError(
            f"the trainer needs {trainers} GPUs and the servers {theirs}, but {visible} are visible",
            where="rollout.server.replicas × rollout.tensor_model_parallel_size",
            fix="lower one of them or trainer.n_gpus_per_node; or set rollout.mode: colocated",
        )
    options = training_options(spec, reads_images=reads_images)
    if rollout.in_flight:
        options |= {"enable_scale_out": True, "scheduling_policy": "priority"}
    if spec.broadcasts_weights(on_gpus=on_gpus):
        backend = transfer_backend(torch.device("cuda" if on_gpus else "cpu"))
        options["load_format"] = "dummy"
        options["weight_transfer_config"] = {"backend": backend}
        if backend == "gloo":
            options["worker_extension_cls"] = "rlctl.rollout.vllm_workers.GlooReceiver"
    return ReplicaSettings(
        options,
        first_gpu=trainers if on_gpus else None,
        host=LOOPBACK if spec.trainer.nnodes == 1 else os.environ.get(NODE_ADDRESS, LOOPBACK),
        server=server,
    )


def _on_servers(context: EngineContext) -> VLLMServerRollout:
    spec = context.spec
    server = context.spec.rollout.server
    broadcasts = spec.broadcasts_weights(on_gpus=context.device.type == "cuda")
    by_ray = server.is_placed_by_ray
    is_main = context.rank == 0
    # The first rank of every node starts servers there, because other nodes cannot read files of this node.
    on_nodes = spec.trainer.nnodes if broadcasts and not (by_ray or server.urls) else 1
    node, local_rank = divmod(context.rank, spec.trainer.n_gpus_per_node)
    published = adapters = replicas = broadcast = None
    directory = Path(server.weights_dir).expanduser() if server.weights_dir else None
    held = contextlib.ExitStack()
    if not server.urls:
        os.environ[KEY] = context.agree(os.environ.get(KEY) or secrets.token_hex(32))
    elif is_main:
        backends = reachable(
            server.urls,
            server.start_timeout,
            lora_rank=spec.model.lora_rank * spec.syncs_adapter,
            in_flight=spec.rollout.in_flight,
        )
        is_needed = server.weight_transfer == "broadcast"
        broadcasts = broadcasts and _can_broadcast(server.urls, backends, context.device, is_needed)
    if local_rank == 0 and node < on_nodes:
        published = PublishedWeights(context.model, context.tokenizer, directory)
        held.callback(published.close)
        if not server.urls:
            hosts = held.enter_context(_ray_hosts(spec, broadcasts)) if by_ray else ()
            if importlib.util.find_spec("vllm") is None and not by_ray:
                raise vllm_missing(ModuleNotFoundError(name="vllm"))
            logs = context.run_dir / ENGINE_LOGS / (f"node-{node}" if node else "")
            settings = replica_settings(spec, reads_images=reads_more_than_text(context.model.config))
            replicas = Replicas(settings, published.latest, logs, hosts)
            held.callback(replicas.close)
    if is_main and spec.syncs_adapter:
        adapters = VersionedDir(directory)
        held.callback(adapters.close)
    urls = [url.rstrip("/") for url in server.urls]
    for each in range(0 if urls else on_nodes):
        urls += context.agree(" ".join(replicas.urls) if replicas and each == node else "").split()
    client = ServerClient(urls, server, replicas.check if replicas else None)
    if is_main and published and broadcasts:
        broadcast = WeightBroadcast(client, published.expected, context.device)
        held.callback(broadcast.close)
    weights = WeightSync(
        client,
        context,
        published=published,
        replicas=replicas,
        adapters=adapters,
        broadcast=broadcast,
        starts_empty=broadcasts and not server.urls,
    )
    return VLLMServerRollout(context, client, weights, held)


def _ray_hosts(spec: RunSpec, broadcasts: bool) -> contextlib.AbstractContextManager[list[RayHost]]:
    """Hosts for servers in a Ray cluster.

    Raises:
        UsageError: the other machines of the cluster could not read new weights.
    """
    server = spec.rollout.server
    on_gpus = torch.cuda.is_available()
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


def reachable(urls: list[str], seconds: float, *, lora_rank: int = 0, in_flight: bool = False) -> list[str]:
    """Waits until every server responds, and checks that each was started with the options a run needs.

    Args:
        seconds: how long to wait for them.
        lora_rank: rank of the adapters to apply; 0: none.
        in_flight: the servers sample while their weights are updated.

    Returns:
        For each server, the backend of its weight transfer; "": it accepts weights as files only.

    Raises:
        EnvironmentFailure: a server does not respond in time, or was started with other options.
    """
    deadline = time.monotonic() + seconds
    backends = []
    for url in (given.rstrip("/") for given in urls):
        while True:
            try:
                health = ask("GET", f"{url}/health", 5)
                if health.status_code == HTTPStatus.UNAUTHORIZED:
                    message = "the server has another key"
                    fix = f"set {KEY} to the one that it was started with"
                    raise EnvironmentFailure(message, where=f"rollout.server.urls: {url}", fix=fix)
                if health.is_success:
                    backends.append(_check_settings(url, lora_rank, in_flight=in_flight))
                    break
                words = "it is not healthy"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                words = str(error) or type(error).__name__
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"no vLLM server answers: {words}",
                    where=f"rollout.server.urls: {url}",
                    fix="start it there, with the options in docs/how-to/rollout-engines.md",
                )
            time.sleep(_RETRY_S)
    return backends


def _check_settings(url: str, lora_rank: int, *, in_flight: bool) -> str:
    """Checks a server's options and returns the backend of its weight transfer.

    Log-probs before temperature would look plausible, but weight every sample wrongly.
    """
    where = f"rollout.server.urls: {url}"
    fix = "start it with the options in docs/how-to/rollout-engines.md"
    answer = ask("GET", f"{url}/server_info?config_format=json", _INFO_S)
    if not answer.is_success:
        message = "the server does not accept weight updates: vLLM's development mode is off"
        more = f"{fix}, VLLM_SERVER_DEV_MODE=1 among them"
        if answer.is_server_error:
            message = f"the server cannot describe itself: /server_info fails (HTTP {answer.status_code})"
            more = "see its log; vLLM lists its packages there, for which its environment needs pip"
        raise EnvironmentFailure(message, where=where, fix=more)
    with readable(url, "/server_info"):
        info = answer.json()
        mode = info["vllm_config"]["model_config"]["logprobs_mode"]
    if mode != LOGPROBS_MODE:
        message = f"the server reports {mode}, which are not log-probs of the distribution it samples from"
        raise EnvironmentFailure(
            message, where=where, fix=f"{fix}, --logprobs-mode {LOGPROBS_MODE} among them"
        )
    if in_flight:
        policy = info["vllm_config"]["scheduler_config"]["policy"]
        has_versions = ask("POST", url + GENERATE, _INFO_S, {}).status_code not in _NOT_OFFERED
        if not has_versions or policy != "priority":
            message = "the server was not started for rollout.in_flight: it "
            message += (
                "has no priorities" if has_versions else "does not report which weights sampled a token"
            )
            options = "--enable-scale-out and --scheduling-policy priority"
            raise EnvironmentFailure(message, where=where, fix=f"{fix}, {options} among them")
    lora = info["vllm_config"]["lora_config"]  # null without --enable-lora
    is_open = info["vllm_env"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]
    if lora_rank and not (is_open and lora and lora["max_lora_rank"] >= lora_rank):
        options = (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank of {lora_rank} or more"
        )
        message = f"the server does not accept adapters of rank {lora_rank}"
        raise EnvironmentFailure(message, where=where, fix=f"start it with {options}; or {MERGE_LORA}")
    return str((info["vllm_config"].get("weight_transfer_config") or {}).get("backend", ""))


def _dtype(spec: RunSpec) -> Any:
    return spec.rollout.dtype or spec.engine.dtype
