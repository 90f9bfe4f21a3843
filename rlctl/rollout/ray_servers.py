"""vLLM servers on the machines of a Ray cluster: one actor per server starts it on the actor's machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.errors import EnvironmentFailure, one_line
from rlctl.rollout.local_server import LocalServer, server_port

#: Seconds to wait for an actor's response, and bytes of a server's last output that the response contains.
_ANSWER_S, _LOG_BYTES = 60.0, 8192
_INSTALL = 'pip install "rlctl[ray]", and set RAY_ADDRESS; or rollout.server.placement: nodes'


class _Actor:
    """Starts a server on the machine that Ray has chosen."""

    def __init__(self) -> None:
        from ray.util import get_node_ip_address

        self._host = get_node_ip_address()
        self._directory = Path(tempfile.mkdtemp(prefix="rlctl-server-"))
        self._server: LocalServer | None = None

    def address(self) -> tuple[str, int]:
        """Address and free port at which a server can listen."""
        return self._host, server_port(self._host)

    def start(self, arguments: list[str], environment: dict[str, str], files: dict[str, bytes]) -> None:
        """Starts the server; `files` are those of its model, whose directory replaces the argument ""."""
        for name, content in files.items():
            (self._directory / name).write_bytes(content)
        arguments = [argument or str(self._directory) for argument in arguments]
        self._server = LocalServer(arguments, environment, self._directory / "log")

    def poll(self) -> tuple[int | None, bytes]:
        """Exit code (None: running) and the end of the output."""
        log = self._directory / "log"
        output = log.read_bytes()[-_LOG_BYTES:] if log.exists() else b""
        return (self._server.poll() if self._server else None), output

    def end(self) -> None:
        """Stops the server."""
        if self._server:
            self._server.end()


class RayHost:
    """See `ServerHost`; a machine or actor that Ray reports as lost raises `OSError`."""

    def __init__(self, actor: Any, seconds: float) -> None:
        self._actor = actor
        self.host, self.port = self._ask("address", seconds=seconds)

    def start(self, arguments: list[str], environment: dict[str, str], model: Path, log: Path) -> RayServer:
        """See `ServerHost.start`."""
        has_weights = any(model.glob("*.safetensors"))
        files = {} if has_weights else {path.name: path.read_bytes() for path in model.iterdir()}
        given = ["" if argument == str(model) and files else argument for argument in arguments]
        self._ask("start", given, environment, files)
        return RayServer(self, log)

    def _ask(self, what: str, *arguments: Any, seconds: float = _ANSWER_S) -> Any:
        import ray

        try:
            return ray.get(getattr(self._actor, what).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            raise OSError(f"its machine or its Ray actor was lost: {one_line(error)}") from error


class RayServer:
    """See `ServerProcess`."""

    def __init__(self, host: RayHost, log: Path) -> None:
        self._host, self._log = host, log

    def poll(self) -> int | None:
        """See `ServerProcess.poll`; also writes the end of the output to the log."""
        code, output = self._host._ask("poll")
        self._log.write_bytes(output)
        return None if code is None else int(code)

    def end(self) -> None:
        """See `ServerProcess.end`."""
        with contextlib.suppress(OSError):
            self._host._ask("end")


@contextmanager
def ray_hosts(count: int, gpus: int, trainer_gpus: int, seconds: float) -> Iterator[list[RayHost]]:
    """Reserves hosts for servers in the cluster that `RAY_ADDRESS` names, spread over its machines.

    Args:
        count: number of servers.
        gpus: GPUs per server; 0: servers run on CPUs.
        trainer_gpus: GPUs of this machine that the trainer uses; reserved, because Ray does not know of them.
        seconds: how long to wait for free resources.

    Raises:
        EnvironmentFailure: Ray is not installed, there is no cluster, or too few of its resources are free.
    """
    try:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )
    except ImportError as error:
        what = f"Ray cannot be imported: {one_line(error)}"
        raise EnvironmentFailure(what, where="rollout.server.placement: ray", fix=_INSTALL) from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    was_connected = ray.is_initialized()
    if not was_connected:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ConnectionError, RuntimeError, ValueError
            what = f"no Ray cluster answers at {address}: {one_line(error)}"
            raise EnvironmentFailure(what, where="rollout.server.placement: ray", fix=_INSTALL) from error
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
