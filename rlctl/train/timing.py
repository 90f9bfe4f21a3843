"""Times the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Seconds by phase, as `timing_s/<phase>`; phases may nest.

    Args:
        device: of the rank.
        show: called with the name of every phase that begins.
    """

    def __init__(self, device: torch.device, show: Callable[[str], None] = lambda _: None) -> None:
        self._is_cuda = device.type == "cuda"
        self._show = show
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block; on CUDA, waits for its kernels, which would otherwise count for the next phase."""
        self._show(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._is_cuda:
                torch.cuda.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`timing_s/*` of every phase."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}
