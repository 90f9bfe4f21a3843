"""New weights to vLLM servers by broadcast, through vLLM's weight-transfer API: NCCL on GPUs, gloo on CPUs.

The main rank and every worker of every server form one group. An update is a session on each server: start,
one request and one broadcast per chunk of weights, finish.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from rlctl.errors import RunFailure
from rlctl.rollout.completions import one_line
from rlctl.rollout.process_state import Guest
from rlctl.rollout.weights import ExpectedWeights

#: Weights of about this size go out at once; the main rank holds them twice meanwhile.
CHUNK_BYTES = 2**29
#: Seconds until the group must be there, and until every server must have loaded a chunk.
_CONNECT_S, _LOAD_S = 120.0, 600.0
#: The same for a broadcast over gloo alone.
_GLOO_S = 60.0
_Result = TypeVar("_Result")


def transfer_backend(device: torch.device) -> str:
    """vLLM's name of the backend that moves weights between devices of this kind."""
    return "nccl" if device.type == "cuda" else "gloo"


class _Group(Protocol):
    """The main rank's end of the group; it is rank 0."""

    def broadcast(self, data: Tensor) -> None:
        """Send (N,) uint8 to every worker; returns when it is sent."""
        ...

    def abort(self) -> None:
        """Leave, whatever the others do."""
        ...


class WeightBroadcast:
    """The sender of weights, on the main rank.

    Args:
        urls: of all servers.
        expected: a complete set of the policy's weights.
        device: of the main rank.
    """

    def __init__(self, urls: list[str], expected: ExpectedWeights, device: torch.device) -> None:
        self._urls, self._expected, self._device = urls, expected, device
        self._group: _Group | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the group was formed."""
        return self._group is not None

    def connect(self) -> None:
        """Form the group, anew where there was one: workers of servers that started again join too.

        Raises:
            RunFailure: a server takes no part, or the group cannot be formed; nothing was sent.
        """
        self.close()
        sizes = [int(_ask("GET", url, "/get_world_size")["world_size"]) for url in self._urls]
        host = own_address(self._urls)
        with socket.create_server((host, 0)) as probe:
            port = probe.getsockname()[1]
        world_size = 1 + sum(sizes)
        opens = _open_nccl if self._device.type == "cuda" else _open_gloo
        opened: Future[_Group] = _in_background(opens, host, port, world_size, self._device)
        # Each request for an update is one packed broadcast, whatever its size.
        common = {"master_address": host, "master_port": port, "world_size": world_size, "packed": True}
        common |= {"packed_buffer_size_bytes": 2**62, "packed_num_buffers": 1}
        joined = [
            _post(url, "/init_weight_transfer_engine", {"init_info": common | {"rank_offset": offset}})
            for url, offset in zip(self._urls, _offsets(sizes), strict=True)
        ]
        _all_done([opened, *joined], _CONNECT_S, "the group for weight transfer was not formed")
        self._group = opened.result()

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights into every server.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape, or a server did not take it. What
                servers hold then is a mixture, and the group is gone.
        """
        assert self._group is not None
        try:
            self._ask_all("/start_weight_update", {})
            sent: list[Future[Any]] = []
            for names, flat, shapes in _chunks(self._expected.in_files(named_tensors), self._device):
                _all_done(sent, _LOAD_S, _TAKES_LONG)  # servers load a chunk while the next is gathered
                dtype = str(flat.dtype).removeprefix("torch.")
                update = {"names": names, "dtype_names": [dtype] * len(names), "shapes": shapes}
                sent = [_post(url, "/update_weights", {"update_info": update}) for url in self._urls]
                sent.append(_in_background(self._group.broadcast, flat.view(torch.uint8)))
            _all_done(sent, _LOAD_S, _TAKES_LONG)
            self._ask_all("/finish_weight_update", {})
        except BaseException:
            self.close()  # a broadcast that somebody misses never ends
            raise

    def close(self) -> None:
        """Leave the group; twice is fine."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _ask_all(self, path: str, body: dict[str, Any]) -> None:
        _all_done([_post(url, path, body) for url in self._urls], _LOAD_S, _TAKES_LONG)


_TAKES_LONG = "a vLLM server does not take new weights"


def _chunks(
    weights: Iterator[tuple[tuple[str, ...], Tensor]], device: torch.device
) -> Iterator[tuple[list[str], Tensor, list[list[int]]]]:
    """Names, their values one after the other in one (N,) tensor, shapes; one dtype per chunk."""
    names: list[str] = []
    values: list[Tensor] = []
    shapes: list[list[int]] = []
    size = 0
    for all_names, tensor in weights:
        if names and (size >= CHUNK_BYTES or tensor.dtype != values[0].dtype):
            yield names, torch.cat(values), shapes
            names, values, shapes, size = [], [], [], 0
        # A copy: a gathered weight is gone when the next one comes.
        value = tensor.detach().to(device, copy=True).reshape(-1)
        for name in all_names:  # tied weights under each name, as in files
            names.append(name)
            values.append(value)
            shapes.append(list(tensor.shape))
            size += value.nbytes
    if names:
        yield names, torch.cat(values), shapes


class _NcclGroup:
    def __init__(self, communicator: Any, device: torch.device) -> None:
        self._communicator, self._device = communicator, device

    def broadcast(self, data: Tensor) -> None:
        with torch.cuda.device(self._device):  # of this thread
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(data, src=0, stream=stream)
            stream.synchronize()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._communicator.nccl.ncclCommAbort(self._communicator.comm)


def _open_nccl(host: str, port: int, world_size: int, device: torch.device) -> _Group:
    with Guest().running(), torch.cuda.device(device):
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": host, "master_port": port, "world_size": world_size}
        communicator = trainer_init(where)
    if communicator.disabled:  # its broadcasts would do nothing
        raise RunFailure("vLLM cannot load NCCL in the trainer's process")
    return _NcclGroup(communicator, device)


#: gloo ends no broadcast that somebody misses before its time is over, and a group is freed only then.
_LEFT: list[Any] = []


class _GlooGroup:
    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, data: Tensor) -> None:
        self._group.broadcast(data, 0).wait()

    def abort(self) -> None:
        _LEFT.append(self._group)


def _open_gloo(host: str, port: int, world_size: int, device: torch.device) -> _Group:
    del device
    return _GlooGroup(join_gloo(host, port, 0, world_size))


def join_gloo(host: str, port: int, rank: int, world_size: int) -> Any:
    """A gloo group beside torch's default one; rank 0 listens at the port."""
    listener = socket.create_server((host, port)).detach() if rank == 0 else None  # at this address alone
    store = TCPStore(
        host,
        port,
        None,
        rank == 0,
        timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_GLOO_S))


def _offsets(sizes: list[int]) -> Iterator[int]:
    """Rank in the group of each server's first worker; the trainer is rank 0."""
    offset = 1
    for size in sizes:
        yield offset
        offset += size


def own_address(urls: list[str]) -> str:
    """This machine's address as the servers see it: where one is on another machine, not the loopback's."""
    found = "127.0.0.1"
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:  # connected: a route is chosen, no more
                route.connect(address)
                own = str(route.getsockname()[0])
            if not own.startswith("127.") and own != "::1":
                return own
            found = own
    return found


def _post(url: str, path: str, body: dict[str, Any]) -> Future[Any]:
    return _in_background(_ask, "POST", url, path, body)


def _ask(method: str, url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    try:
        answer = httpx.request(method, url + path, json=body, timeout=_LOAD_S, trust_env=False)
    except httpx.HTTPError as error:
        raise RunFailure(f"a vLLM server fails at {path}: {one_line(error)}", where=url) from error
    if not answer.is_success:
        words = " ".join(answer.text.split())[:500]
        raise RunFailure(f"vLLM refuses {path} (HTTP {answer.status_code}): {words}", where=url)
    return answer.json()


def _in_background(function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Run in a thread that may stay behind: one that waits for a server that died never ends."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _all_done(futures: list[Future[Any]], seconds: float, words: str) -> None:
    """Wait for all of them.

    Raises:
        RunFailure: the first that fails, or too much time has passed.
    """
    done, waiting = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
    failures = [error for future in done if (error := future.exception())]
    # What a server says tells more than that its end of the group was closed.
    for error in sorted(failures, key=lambda error: not isinstance(error, RunFailure)):
        if isinstance(error, RunFailure):
            raise error
        raise RunFailure(f"{words}: {one_line(error)}") from error
    if waiting:
        raise RunFailure(f"{words} within {seconds:.0f} s")
