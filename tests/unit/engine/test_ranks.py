from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from rlctl.engine import ranks
from rlctl.engine.ranks import Ranks, join_ranks, leave_ranks, missing_ranks, network_notes
from rlctl.errors import EnvironmentFailure, LostRank, UsageError
from rlctl.processes import progress, use_interface
from rlctl.rollout.vllm import _not_started
from rlctl.run_spec.run_spec import RunSpec
from tests.processes import Job


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="the machine has 2") as caught:
        join_ranks()
    assert caught.value.where == "trainer.n_gpus_per_node"


def test_a_gpu_that_torch_cannot_use_is_not_silently_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    was_initialized = dist.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ranks, "gpus", lambda: ["NVIDIA H100, 81559 MiB, 470.1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for cuda, what in ((None, "built without CUDA"), ("13.0", r"built for CUDA 13\.0")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with pytest.raises(EnvironmentFailure, match=what) as caught:
            join_ranks()
        assert caught.value.exit_code == 4
        assert "CUDA_VISIBLE_DEVICES=" in (caught.value.fix or "")
    assert dist.is_initialized() == was_initialized  # independent of other tests' state
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ranks.refuse_idle_gpu()


GLOO = (
    "[/builds/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7873. "
    "This is typically caused by a remote worker crashing."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(GLOO), ": Connection closed by peer [10.0.0.2]:7873"),
        (
            dist.DistBackendError("NCCL error: remote process exited\nLast error:\nsocket"),
            ": NCCL error: remote",
        ),
        (RuntimeError(f"Gloo connectFullMesh failed with {GLOO}"), ": Connection closed by peer"),
        (dist.DistNetworkError("The client socket has timed out"), ": The client socket has timed out"),
    ],
)
def test_what_another_ranks_end_does_here(
    error: RuntimeError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # which another test may have set
    with pytest.raises(LostRank, match="another rank") as caught, missing_ranks():
        raise error
    assert reason in caught.value.what
    assert "\n" not in caught.value.what
    assert "typically" not in caught.value.what
    assert "NCCL_SOCKET_IFNAME" in (caught.value.fix or "")
    assert _not_started("a model", error).what == caught.value.what  # vLLM forms groups too


def test_an_error_of_this_ranks_own_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"), missing_ranks():
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(
    ("own", "named"), [("10.1.2.3", "eth1"), ("127.0.0.1", "lo"), ("fe80::1%eth1", "eth1")]
)
def test_gloo_and_nccl_use_the_interface_of_an_address(
    monkeypatch: pytest.MonkeyPatch, own: str, named: str
) -> None:
    addresses = {"eth0": ["10.1.2.33"], "eth1": ["fe80::1%eth1", "10.1.2.3"], "lo": ["127.0.0.1", "::1"]}
    found = {name: [SimpleNamespace(address=each) for each in own] for name, own in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # restored after the test
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    use_interface(own)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={named}"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_interface(own)
    assert os.environ["GLOO_SOCKET_IFNAME"] == named


#: As NCCL 2.27 logs with NCCL_DEBUG_SUBSYS=INIT,NET.
NCCL_LOG = """\
node1:815:815 [0] NCCL INFO Bootstrap: Using fast0:10.77.0.2<0>
node1:815:815 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB fast0:10.77.0.2<0>
node1:815:815 [0] NCCL INFO Initialized NET plugin IB
"""


def test_the_start_says_which_network_nccl_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/%p.log")
    assert network_notes() == []
    log = tmp_path / f"{os.getpid()}.log"
    log.write_text(NCCL_LOG)
    [note] = network_notes()
    assert note.startswith("NCCL connects nodes by IB: [0]mlx5_0:1/IB [1]mlx5_1:1/IB")
    assert "slower" not in note
    log.write_text(NCCL_LOG.replace("NET/IB : Using [0]mlx5_0", "NET/Socket : Using [0]fast0"))
    [note] = network_notes()
    assert note.startswith("NCCL connects nodes by Socket: [0]fast0")
    assert "Docker" in note


@pytest.mark.parametrize(("splits", "backend"), [("", "nccl"), ("1", "cpu:gloo,cuda:nccl")])
def test_a_group_of_gpus_is_bound_to_its_device(
    monkeypatch: pytest.MonkeyPatch, splits: str, backend: str
) -> None:
    """Without it NCCL connects in the first collective, and a barrier guesses the device.

    vLLM refuses to split a group without gloo.
    """
    given = {}
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", splits)
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "RLCTL_ALONE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # restored after the test
        monkeypatch.setattr(dist.distributed_c10d, name, getattr(dist.distributed_c10d, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: given.update(how, backend=backend))
    join_ranks()
    assert (given["backend"], given["device_id"]) == (backend, torch.device("cuda", 1))
    assert (given["rank"], given["world_size"]) == (5, 8)


def test_vllm_in_hundreds_of_ranks_splits_them_into_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"
    monkeypatch.setenv(name, "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run_of(nodes: int, **rollout: str) -> RunSpec:
        trainer = {"nnodes": nodes, "n_gpus_per_node": 8}
        return RunSpec.model_validate({"trainer": trainer, "rollout": {"name": "vllm"} | rollout})

    ranks.split_groups_of_vllm(run_of(128))
    assert os.environ[name] == "0"  # the user's choice
    [warning] = ranks.group_notes(run_of(128))
    assert warning.startswith("warning: vLLM forms 12,290 groups on each rank, one by one")
    monkeypatch.delenv(name)
    for other in (run_of(8), run_of(128, mode="server"), run_of(128, name="hf")):
        ranks.split_groups_of_vllm(other)
        assert name not in os.environ
        assert ranks.group_notes(other) == []
    ranks.split_groups_of_vllm(run_of(32))
    assert os.environ[name] == "1"
    [note] = ranks.group_notes(run_of(32))
    assert f"14 times ({name}=1); with 0 it forms 3,074 groups" in note
    monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranks.split_groups_of_vllm(run_of(128))  # vLLM would refuse to split them
    assert name not in os.environ
    assert ranks.group_notes(run_of(128)) == []


def test_ranks_wait_without_limit_for_what_rank_0_does_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_PAUSE_S", 0.01)
    store, before, done = dist.HashStore(), progress(), []
    store.set_timeout(timedelta(milliseconds=1))

    def download() -> None:
        while progress() < before + 9:  # the other rank waits, and its watchdog sees no hang
            time.sleep(0.01)
        done.append("download")

    with pytest.raises(dist.DistStoreError):
        ranks._wait_for(store, 1, download)  # for a rank 0 that never starts there is a limit
    store.set_timeout(timedelta(seconds=60))
    with ThreadPoolExecutor() as threads:
        other = threads.submit(ranks._wait_for, store, 1, lambda: done.append("not by rank 1"))
        ranks._wait_for(store, 0, download)
        other.result(60)
    assert done == ["download"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


#: Addresses of the two nodes; node 0's own name means its loopback interface, as on Debian.
NODES, OWN_NAME = ("10.77.0.1", "10.77.0.2"), "127.0.1.1"


@pytest.fixture
def two_nodes() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs root and iproute2")
    names = [f"rlctl{os.getpid()}n{node}" for node in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        cable = ["name", "fast0", "netns", names[1]]
        ip("link", "add", "fast0", "netns", names[0], "type", "veth", "peer", *cable)
        for name, address in zip(names, NODES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "fast0")
            for device in ("lo", "fast0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def enter(namespace: str) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        os.environ.pop(name, None)
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0


def summed(result: str) -> int:
    """A sum over the ranks of two nodes, and in a second group, as vLLM forms one."""
    ranks: Ranks = join_ranks(60.0, on_loopback=False)
    with missing_ranks():
        found = torch.full((1,), float(ranks.rank + 1))
        dist.all_reduce(found, group=dist.new_group(backend="gloo"))
        chosen = [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")]
        Path(result).write_text(
            " ".join([str(ranks.sum([found.item()])[0]), *chosen, os.environ["VLLM_HOST_IP"]])
        )
        leave_ranks()
    return 0


def test_two_nodes_meet_at_the_interface_that_joins_them(tmp_path: Path, two_nodes: list[str]) -> None:
    jobs = []
    for rank, (name, address) in enumerate(zip(two_nodes, (OWN_NAME, NODES[0]), strict=True)):
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
        log = tmp_path / f"log-{rank}"
        jobs.append(Job(summed, str(tmp_path / str(rank)), log=log, env=env, before=partial(enter, name)))
    assert [job.wait(120.0) for job in jobs] == [0, 0], "\n".join(job.output[-3000:] for job in jobs)
    found = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert found == [f"6.0 fast0 =fast0 {address}" for address in NODES]


def timeouts(result: str) -> int:
    """Seconds: of the run's group, of one that another library forms, and of one over NCCL."""
    join_ranks(7000.0)
    cpu = torch.device("cpu")
    groups = [dist.group.WORLD, dist.new_group([0])]
    found = [group._get_backend(cpu).options._timeout for group in groups]
    found.append(dist.distributed_c10d._get_default_timeout(dist.Backend(dist.Backend.NCCL)))
    Path(result).write_text(" ".join(str(timeout.total_seconds()) for timeout in found))
    return 0


def test_every_group_waits_as_long_as_the_run(tmp_path: Path) -> None:
    """DeepSpeed's and vLLM's groups too: torch's default for NCCL is shorter than `trainer.hang_timeout`."""
    job = Job(timeouts, str(tmp_path / "result"), log=tmp_path / "log")
    assert job.wait() == 0, job.output
    assert (tmp_path / "result").read_text().split() == ["7300.0"] * 3
