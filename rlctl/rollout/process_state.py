"""Isolates the process-wide state that an engine's library changes.

vLLM's workers set torch's number of threads (on a GPU to 1, which makes Adam in host memory ten times
slower), environment variables and the precision of matrix products, and replace `torch.set_num_threads`.
An architecture that vLLM runs through transformers (SmolLM3, OLMo 2) gets another base class, constructor and
call in transformers' own module, with which no other model of this class can be created or run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

#: What vLLM replaces in a class of transformers.
_REPLACED = ("__init__", "__call__")


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Process-wide state that a library may change.

    Attributes:
        set_num_threads: torch's function, which a library may replace.
        classes: class of transformers' models → its bases, and what it defines of `_REPLACED`.
        stream: CUDA's current stream; None without CUDA.
    """

    num_threads: int
    set_num_threads: Callable[[int], None]
    matmul_precision: str
    dtype: torch.dtype
    device: torch.device
    stream: Any
    environment: dict[str, str]
    classes: dict[type, tuple[tuple[type, ...], dict[str, Any]]]

    @classmethod
    def now(cls) -> ProcessState:
        """Captures the current state."""
        return cls(
            num_threads=torch.get_num_threads(),
            set_num_threads=torch.set_num_threads,
            matmul_precision=torch.get_float32_matmul_precision(),
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            stream=torch.cuda.current_stream() if torch.cuda.is_available() else None,
            environment=dict(os.environ),
            classes={
                kind: (kind.__bases__, {name: vars(kind)[name] for name in _REPLACED if name in vars(kind)})
                for kind in _subclasses(PreTrainedModel)
            },
        )

    def apply(self, set_num_threads: Callable[[int], None]) -> None:
        """Restores this state; sets only what differs.

        Args:
            set_num_threads: torch's original function.
        """
        if torch.get_num_threads() != self.num_threads:
            set_num_threads(self.num_threads)
        torch.set_num_threads = self.set_num_threads  # type: ignore[assignment]
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if torch.get_default_device() != self.device:  # setting the CPU would slow every torch call
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        if self.stream is not None and (current := torch.cuda.current_stream()) != self.stream:
            self.stream.wait_stream(current)  # for the weights that are copied between the two
            torch.cuda.set_stream(self.stream)
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for kind, (bases, own) in self.classes.items():
            if kind.__bases__ != bases:
                kind.__bases__ = bases
                _define(kind, own)


def _define(kind: type, own: dict[str, Any]) -> None:
    """Makes `own` all that the class defines of `_REPLACED`; the rest is inherited."""
    for name in _REPLACED:
        if name in own:
            setattr(kind, name, own[name])
        elif name in vars(kind):
            delattr(kind, name)


def _subclasses(kind: type) -> Iterator[type]:
    below: type
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


class IsolatedState:
    """Runs an engine with the state that it last had, separate from that of the rest of the process."""

    def __init__(self) -> None:
        self._state: ProcessState | None = None
        self._set_num_threads = torch.set_num_threads

    @contextmanager
    def running(self) -> Iterator[None]:
        """Applies the engine's state inside the block and restores the previous one, even on errors."""
        before = ProcessState.now()
        if self._state is not None:
            self._state.apply(self._set_num_threads)
        try:
            yield
        finally:
            self._state = ProcessState.now()
            before.apply(self._set_num_threads)
