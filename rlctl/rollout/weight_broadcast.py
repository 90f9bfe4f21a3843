"""Broadcast of weights to vLLM servers through vLLM's weight-transfer API: NCCL on GPUs, gloo on CPUs.

The main rank and every worker of every server form one group. An update is a session on each server: start,
one request and one broadcast per chunk of weights, finish.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from itertools import accumulate, repeat
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, TCPStore

from rlctl.errors import RunFailure, one_line
from rlctl.leftovers import temporary_directory
from rlctl.processes import free_port, own_address
from rlctl.rollout.closed_ports import close_group_ports
from rlctl.rollout.expected_weights import ExpectedWeights
from rlctl.rollout.server_client import ServerClient, readable
from rlctl.rollout.vllm import IsolatedState
from rlctl.rollout.weights import chunks

#: Weights are sent in chunks of about this size; the main rank temporarily holds a chunk twice.
CHUNK_BYTES = 2**29
#: Seconds within which the group must be formed, and within which every server must load a chunk.
_CONNECT_S, _LOAD_S = 120.0, 600.0
#: Timeout of a broadcast over gloo, in seconds.
_GLOO_S = 60.0
_NOT_FORMED = "the group for weight transfer was not formed"
_Result = TypeVar("_Result")


def transfer_backend(device: torch.device) -> str:
    """vLLM's name of the backend that transfers weights between devices of this type."""
    return "nccl" if device.type == "cuda" else "gloo"


class WeightBroadcast:
    """Sends weights to all servers, from the main rank."""

    def __init__(self, client: ServerClient, expected: ExpectedWeights, device: torch.device) -> None:
        self._client = client
        self._expected = expected
        self._device = device
        self._group: _NcclGroup | _GlooGroup | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the group was formed."""
        return self._group is not None

    def connect(self) -> None:
        """Forms the group; replaces an existing one, so that workers of restarted servers join.

        Raises:
            RunFailure: a server does not join, or the group cannot be formed; nothing was sent.
        """
        self.close()
        asked = [self._client.start(self._client.send(url, "/get_world_size")) for url in self._client.urls]
        _all_done(asked, _CONNECT_S, _NOT_FORMED)
        with readable(" ".join(self._client.urls), "/get_world_size"):
            sizes = [int(answer.result().json()["world_size"]) for answer in asked]
        create: Callable[[int], _NcclGroup | _GlooGroup] = partial(_GlooGroup, self._client.urls)
        if self._device.type == "cuda":
            create = partial(_NcclGroup, self._device)
        created = _in_background(create, 1 + sum(sizes))
        _all_done([created], _CONNECT_S, _NOT_FORMED)
        group = created.result()
        opened = _in_background(group.join)
        offsets = accumulate([1, *sizes[:-1]])  # group rank of each server's first worker; rank 0 is this one
        # Each update request is one packed broadcast of any size.
        common = group.meeting | {"world_size": group.world_size, "packed": True}
        common |= {"packed_buffer_size_bytes": 2**62, "packed_num_buffers": 1}
        infos = ({"init_info": common | {"rank_offset": offset}} for offset in offsets)
        joined = self._post("/init_weight_transfer_engine", infos)
        _all_done([opened, *joined], _CONNECT_S, _NOT_FORMED)
        self._group = group

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads new weights into every server.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape, or a server did not accept it. The
                servers then have a mixture of old and new weights, and the group is closed.
        """
        assert self._group is not None
        try:
            _all_done(self._post("/start_weight_update", repeat({})))
            sent: list[Future[Any]] = []
            for chunk in chunks(self._expected.in_files(named_tensors), CHUNK_BYTES, self._device):
                flat = torch.cat([value.view(-1) for value in chunk.values()])
                _all_done(sent)  # servers load a chunk while the next is gathered
                update = {
                    "names": list(chunk),
                    "dtype_names": [str(flat.dtype).removeprefix("torch.")] * len(chunk),
                    "shapes": [list(value.shape) for value in chunk.values()],
                }
                sent = self._post("/update_weights", repeat({"update_info": update}))
                sent.append(_in_background(self._group.broadcast, flat.view(torch.uint8)))
            _all_done(sent)
            _all_done(self._post("/finish_weight_update", repeat({})))
        except BaseException:
            self.close()  # a broadcast that a rank misses never ends
            raise

    def close(self) -> None:
        """Leaves the group; may be called more than once."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _post(self, path: str, bodies: Iterable[dict[str, Any]]) -> list[Future[Any]]:
        """Sends the next body to each server."""
        each = zip(self._client.urls, bodies, strict=False)
        return [self._client.start(self._client.send(url, path, body)) for url, body in each]


class _NcclGroup:
    """The main rank of a group that sends (N,) uint8 to every worker, and leaves without waiting for them.

    Attributes:
        meeting: where the workers find the group, for vLLM. The id of an NCCL group goes through the servers'
            protected port; vLLM's alternative is a port that everyone can use, whose content it unpickles.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self.world_size = world_size
        self._device = device
        with IsolatedState().running():
            from vllm.distributed.device_communicators.pynccl import NCCLLibrary

            self._id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self.meeting = {"nccl_unique_id_b64": b64encode(self._id).decode()}

    def join(self) -> None:
        with IsolatedState().running(), torch.cuda.device(self._device):
            from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

            self._communicator = uid_init_process_group(self._id, 0, self.world_size, self._device)

    def broadcast(self, data: Tensor) -> None:
        with torch.cuda.device(self._device):  # set per thread
            stream = torch.cuda.current_stream()
            self._communicator.broadcast(data, src=0, stream=stream)
            stream.synchronize()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._communicator.nccl.ncclCommAbort(self._communicator.comm)


#: Groups that were left. gloo ends a broadcast that a rank misses only at its timeout, and freeing the group
#: would wait for that.
_LEFT: list[Any] = []


class _GlooGroup:
    """The same over gloo; on one machine, its members meet at a file that only their user can read."""

    def __init__(self, urls: list[str], world_size: int) -> None:
        self.world_size = world_size
        self._held = contextlib.ExitStack()
        host = own_address(urlsplit(url).hostname for url in urls)
        if host in {"127.0.0.1", "::1"}:
            directory = self._held.enter_context(temporary_directory("weights"))
            self._where = str(directory / "store")
            self._port = 0
        else:
            self._where = host
            self._port = free_port(host)
        self.meeting = {"master_address": self._where, "master_port": self._port}

    def join(self) -> None:
        self._group = join_gloo(self._where, self._port, 0, self.world_size)

    def broadcast(self, data: Tensor) -> None:
        self._group.broadcast(data, 0).wait()

    def abort(self) -> None:
        _LEFT.append(self._group)
        self._held.close()


def join_gloo(where: str, port: int, rank: int, world_size: int) -> Any:
    """A gloo group separate from torch's default one.

    Args:
        where: path of the file at which the ranks meet, or address at which rank 0 listens at the port.
    """
    store: FileStore | TCPStore
    if where.startswith("/"):
        store = FileStore(where, world_size)
    else:
        listener = socket.create_server((where, port)).detach() if rank == 0 else None  # at this address only
        timeout = timedelta(seconds=_CONNECT_S)
        store = TCPStore(
            where, port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    group = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=_GLOO_S))
    close_group_ports()  # all members are connected
    return group


def _in_background(function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
    """Runs a function in a daemon thread, because one that waits for a dead server never ends."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _all_done(
    futures: list[Future[Any]],
    seconds: float = _LOAD_S,
    words: str = "a vLLM server does not load new weights",
) -> None:
    """Waits for all futures.

    Raises:
        RunFailure: one of them failed, or `seconds` have passed.
    """
    done, waiting = wait(futures, timeout=seconds, return_when=FIRST_EXCEPTION)
    failures = [error for future in done if (error := future.exception())]
    # A server's error message is more informative than that of its closed connection in the group.
    for error in sorted(failures, key=lambda error: not isinstance(error, RunFailure)):
        if isinstance(error, RunFailure):
            raise error
        raise RunFailure(f"{words}: {one_line(error)}") from error
    if waiting:
        raise RunFailure(f"{words} within {seconds:.0f} s")
