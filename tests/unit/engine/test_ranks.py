from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlctl.engine import ranks
from rlctl.engine.launch import LostRank
from rlctl.engine.ranks import join_ranks, missing_ranks
from rlctl.errors import EnvironmentFailure, UsageError
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
        (dist.DistNetworkError("The client socket has timed out"), ": The client socket has timed out"),
    ],
)
def test_what_another_ranks_end_does_here(error: RuntimeError, reason: str) -> None:
    with pytest.raises(LostRank, match="another rank") as caught, missing_ranks():
        raise error
    assert reason in caught.value.what
    assert "\n" not in caught.value.what
    assert "typically" not in caught.value.what


def test_an_error_of_this_ranks_own_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"), missing_ranks():
        raise RuntimeError("shapes do not fit")


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
