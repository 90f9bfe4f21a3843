"""A vLLM worker for CPUs with uniquely named shared memory. vLLM imports it by name."""

from __future__ import annotations

import uuid

import torch.distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

from rlctl.leftovers import SHARED_MEMORY


class NamedCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped
    """A CPU worker whose files in `/dev/shm` have a unique name.

    Ranks of a tensor-parallel engine exchange data through these files. Under torchrun vLLM uses the same
    names in every run, so that two runs would collide, as would a run with the leftovers of a killed one.
    """

    def init_device(self) -> None:
        """Joins the engine; a collective of all ranks of the run."""
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names)
        # torch's process group already exists: vLLM uses only the name in this address.
        self.distributed_init_method = f"env://:{names[0]}"
        super().init_device()
        for path in SHARED_MEMORY.glob(f"*{names[0]}*"):  # open on all ranks, so names are not needed
            path.unlink(missing_ok=True)
