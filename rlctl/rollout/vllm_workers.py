"""Parts of vLLM's workers on CPUs, which vLLM imports by name: a worker, and weight transfer over gloo.

The transfer is registered when `--worker-extension-cls` makes a worker of `vllm serve` import this module.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.v1.worker.cpu_worker import CPUWorker

from rlctl.leftovers import SHARED_MEMORY
from rlctl.rollout.closed_ports import ClosedPorts
from rlctl.rollout.weight_broadcast import join_gloo


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


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """The protocol of vLLM's NCCL engine over gloo: receives chunks, each as one broadcast of bytes."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the trainer's group."""
        own = init_info
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + own.rank_offset
        self.group = join_gloo(own.master_address, own.master_port, rank, own.world_size)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives one chunk and loads it."""
        info = self.parse_update_info(update_info)
        (dtype,) = {getattr(torch, name) for name in info.dtype_names}
        counts = [torch.Size(shape).numel() for shape in info.shapes]
        flat = torch.empty(sum(counts), dtype=dtype)
        self.group.broadcast(flat.view(torch.uint8), 0).wait()
        parts = zip(info.names, torch.split(flat, counts), info.shapes, strict=True)
        self.model.load_weights((name, part.view(shape)) for name, part, shape in parts)

    def shutdown(self) -> None:
        """Leaves the group."""
        self.group = None


class GlooReceiver(ClosedPorts):
    """A worker extension: naming it makes vLLM import this module in the worker."""


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
