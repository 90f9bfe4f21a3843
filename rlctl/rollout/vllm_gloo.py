"""vLLM's weight transfer for workers on CPUs: the protocol of its NCCL engine, over gloo.

Imported by a worker of `vllm serve` through `--worker-extension-cls`, and by nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from rlctl.rollout.weight_broadcast import join_gloo


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped
    """Receives chunks, each as one broadcast of bytes."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the trainer's group."""
        own, parallel = init_info, self.parallel_config
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


class GlooReceiver:
    """An empty worker extension: naming it makes vLLM import this module in the worker."""


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
