"""Starts, monitors, restarts and stops the vLLM servers of a run.

The servers run on this machine, or where Ray places them. Each process runs `vllm serve`; this module does
not import vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.processes import LOOPBACK
from rlctl.rollout.closed_ports import ClosedPorts
from rlctl.rollout.completions import MERGE_LORA
from rlctl.rollout.server_access import (
    HOST,
    KEY,
    MODEL_NAME,
    EngineProgress,
    RequireKey,
    ask,
    probe_interval,
)
from rlctl.rollout.server_process import SERVE, LocalHost, RayHost
from rlctl.run_spec.rollout import ServerSpec

_WATCH_S = 0.5
_HEALTH_S = 5.0
_LOG_LINES = 3


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings with which every replica is started.

    Attributes:
        options: options of vLLM, see `vllm_options`.
        first_gpu: first GPU of the replicas; lower ones belong to the trainer. None: there are no GPUs.
        host: address of this machine at which every rank reaches the replicas.
        server: number, time limits and restarts of the replicas.
    """

    options: Mapping[str, Any]
    first_gpu: int | None = None
    host: str = LOOPBACK
    server: ServerSpec = field(default_factory=ServerSpec)

    def arguments(self, model: Path | str) -> list[str]:
        """Arguments of `vllm serve`, except host and port."""
        arguments = [str(model), "--served-model-name", MODEL_NAME]
        arguments += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
        if self.first_gpu is None:
            # The worker runs in the engine's process: a separate one would only delay the start.
            arguments += ["--distributed-executor-backend", "uni"]
        extension = {"worker_extension_cls": f"{ClosedPorts.__module__}.{ClosedPorts.__name__}"}
        return [*arguments, *as_arguments(extension | dict(self.options))]


@dataclass(slots=True)
class _Replica:
    index: int
    host: LocalHost | RayHost
    log: Path
    progress: EngineProgress = field(init=False)
    is_ready: threading.Event = field(default_factory=threading.Event)
    heard: float = 0.0  # monotonic time of the engine's last progress, and of the next check
    ask_at: float = 0.0

    def __post_init__(self) -> None:
        self.progress = EngineProgress(self.url)

    @property
    def address(self) -> str:
        """Host and port, as in the URL."""
        name = f"[{self.host.host}]" if ":" in self.host.host else self.host.host
        return f"{name}:{self.host.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def log_tail(self) -> str:
        """The last lines of its log, preferably those that contain an error."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if "Error" in line] or lines
        return " ".join(" ".join(errors[-_LOG_LINES:]).split())[-600:]


def _close_ports(replica: _Replica, timeout: float) -> None:
    """Closes the ports of the worker's groups, unless the user names another extension of workers."""
    with contextlib.suppress(httpx.HTTPError):
        ask("POST", f"{replica.url}/collective_rpc", timeout, {"method": "close_ports"})


class Replicas:
    """Servers on this machine or on `hosts`, all monitored by one thread.

    Args:
        model: returns the directory that a starting server loads: the newest weights.
        log_dir: directory of the servers' logs, `engine-<i>.log`.
        hosts: host of each server; empty: `server.replicas` of them on this machine.

    Raises:
        UsageError: `settings.host` is not an address of this machine.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        model: Callable[[], Path],
        log_dir: Path,
        hosts: Sequence[RayHost] = (),
    ) -> None:
        self._settings = settings
        self._server = settings.server
        self._model = model
        log_dir.mkdir(parents=True, exist_ok=True)
        here = range(self._server.replicas)
        all_hosts: Sequence[LocalHost | RayHost] = hosts or [LocalHost(settings.host) for _ in here]
        self._replicas = [
            _Replica(index, host, log_dir / f"engine-{index}.log") for index, host in enumerate(all_hosts)
        ]
        self._restarts_left = self._server.max_restarts
        self._patience = self._server.answer_timeout
        self._failure: RunFailure | None = None
        self._is_closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="replicas", daemon=True)

    @property
    def urls(self) -> list[str]:
        """URLs of the servers; restarts do not change them."""
        return [replica.url for replica in self._replicas]

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._watcher.ident is not None

    def start(self) -> None:
        """Starts all servers and waits until they respond.

        Raises:
            EnvironmentFailure: a server does not start; contains the end of its log.
            UsageError: vLLM cannot run adapters of this model.
        """
        self._watcher.start()  # starts them, because a server ends with the thread that started it
        deadline = time.monotonic() + self._server.start_timeout
        for replica in self._replicas:
            while not replica.is_ready.wait(_WATCH_S):
                if self._failure or time.monotonic() > deadline:
                    words = self._failure.what if self._failure else replica.log_tail()
                    self.close()
                    if "does not support LoRA" in words:
                        raise UsageError(f"vLLM refuses: {words}", where=str(replica.log), fix=MERGE_LORA)
                    raise EnvironmentFailure(
                        f"a vLLM server does not start: {words}",
                        where=str(replica.log),
                        fix="see its log; or sample with rollout.name=hf",
                    )

    @contextlib.contextmanager
    def loading(self, seconds: float) -> Iterator[None]:
        """Context in which engines load weights, and may produce no tokens for this long."""
        self._patience = max(seconds, self._server.answer_timeout)
        try:
            yield
        finally:
            for replica in self._replicas:
                replica.heard = time.monotonic()
            self._patience = self._server.answer_timeout

    def check(self) -> None:
        """Raises the failure of the monitoring thread, if there is one.

        Raises:
            RunFailure: a server cannot be started, or failed with no restart left; contains the end of its
                log.
        """
        if self._failure:
            raise self._failure

    def close(self) -> None:
        """Stops all servers; may be called more than once."""
        self._is_closing.set()
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _watch(self) -> None:
        try:
            for replica in self._replicas:
                self._launch(replica)
            while not self._is_closing.wait(_WATCH_S) and not self._failure:
                for replica in self._replicas:
                    self._observe(replica)
        except OSError as error:  # out of memory or processes
            self._failure = RunFailure(f"a vLLM server cannot be started: {error}")
        finally:
            for replica in self._replicas:
                replica.is_ready.clear()
                replica.host.end()

    def _observe(self, replica: _Replica) -> None:
        code = replica.host.poll()
        was_ready = replica.is_ready.is_set()
        if code is None:
            now = time.monotonic()
            if was_ready and now < replica.ask_at:
                return
            interval = probe_interval(self._server.answer_timeout)
            if _works(replica, interval):
                if not was_ready:
                    _close_ports(replica, interval)
                replica.is_ready.set()
                replica.heard = now
            replica.ask_at = now + interval
            if not was_ready or now - replica.heard < self._patience:
                return
            message = f"runs, but its engine has not answered for {now - replica.heard:.0f} s"
        else:
            message = f"ended with code {code}"
        replica.is_ready.clear()
        replica.host.end()  # or the remaining processes of its group
        if not was_ready or not self._restarts_left:
            words = f"vLLM server {replica.index} {message}: {replica.log_tail()}"
            self._failure = RunFailure(words, where=str(replica.log))
            return
        self._restarts_left -= 1
        self._launch(replica)

    def _launch(self, replica: _Replica) -> None:
        settings = self._settings
        model = self._model()
        arguments = [*SERVE, *settings.arguments(model), "--host", replica.host.host]
        arguments += ["--port", str(replica.host.port)]
        # Weight sync is an endpoint of vLLM's development mode.
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {KEY: os.environ[KEY], HOST: replica.address}
        if settings.options.get("enable_lora"):
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if settings.first_gpu is None:
            environment["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2")
            environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        elif isinstance(replica.host, LocalHost):  # Ray sets it on other machines
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus(replica.index))
        replica.host.start(arguments, environment, model, replica.log)

    def _gpus(self, index: int) -> list[str]:
        size = self._settings.options.get("tensor_parallel_size", 1)
        first = self._settings.first_gpu or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(first + (index + 1) * size)]
        return names[first + index * size : first + (index + 1) * size]


def _works(replica: _Replica, timeout: float) -> bool:
    """Whether the server answers; once it is ready: whether its engine works."""
    with contextlib.suppress(httpx.HTTPError):
        if replica.is_ready.is_set():
            return replica.progress.is_seen(timeout)
        return ask("GET", f"{replica.url}/health", _HEALTH_S).is_success
    return False


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Converts vLLM options to arguments of `vllm serve`: `--name value`, `--flag` and `--no-flag`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            arguments += [f"--{flag}", text]
    return arguments
