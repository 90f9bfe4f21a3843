"""Of vLLM on CPUs: a worker whose shared memory has a name of its own. vLLM imports it by name."""

from __future__ import annotations

import uuid

import torch.distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

from rlctl.spec.machine import SHARED_MEMORY


class NamedCPUWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped
    """Ranks of a tensor-parallel engine exchange numbers through files in `/dev/shm`. Under torchrun vLLM
    names them alike in every run: two runs would collide, and so would a run with what a killed one left.
    """

    def init_device(self) -> None:
        """Join the engine; a collective of all ranks of the run."""
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names)
        # torch's process group is there already: only the name is read from this address.
        self.distributed_init_method = f"env://:{names[0]}"
        super().init_device()
        for path in SHARED_MEMORY.glob(f"*{names[0]}*"):  # open on all ranks: nothing needs the name
            path.unlink(missing_ok=True)
