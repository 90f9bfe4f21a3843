"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Seconds by phase, as `timing_s/<phase>`; phases may nest.

    Args:
        device: of the rank.
        show: told the name of every phase that begins.
    """

    def __init__(self, device: torch.device, show: Callable[[str], None] = lambda _: None) -> None:
        self._is_cuda = device.type == "cuda"
        self._show = show
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what happens inside; on CUDA wait for the kernels, or they would be the next phase's."""
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
