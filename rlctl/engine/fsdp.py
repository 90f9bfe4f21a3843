"""The training engines on torch's FSDP2, `fully_shard` (the idea: Zhao et al. 2023, arXiv:2304.11277).

Weights, gradients and moments are float32 and divided among the ranks, as under ZeRO-3. A layer's weights are
gathered in the engine's dtype for its forward and backward pass; gradients are summed over ranks in float32.
A state is saved by torch's distributed checkpoints, which any number of ranks can load.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlctl.engine.deepspeed_setup import Settings
from rlctl.engine.layout import idle_inputs
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.plain_state import PlainReader, only_plain_data
from rlctl.engine.policy_engine import Engine, FrozenModule, PolicyEngine, ValueEngine
from rlctl.engine.protocol import StepResult
from rlctl.engine.ranks import Ranks
from rlctl.engine.state_files import StateFiles
from rlctl.errors import RunFailure, first_line

_STATE = "fsdp"
#: Suffix of the files with the tensors of a distributed checkpoint.
_SHARD = ".distcp"


class _Shards(FileSystem):
    """The file system of a distributed checkpoint: shards are those of `StateFiles`."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Context of an open file; the metadata, a few KiB, are written at once."""
        is_shard = "w" in mode and Path(path).suffix == _SHARD
        with self._files.open(Path(path)) if is_shard else super().create_stream(path, mode) as stream:
            yield cast(io.IOBase, stream)


class _Writer(FileSystemWriter):
    """Writes a distributed checkpoint, the shards by `files`; rlctl itself waits for the disk."""

    def __init__(self, directory: Path, files: StateFiles) -> None:
        super().__init__(directory, sync_files=False)
        self.fs = _Shards(files)


class _Engine(Engine):
    """A module under FSDP2: the common part of policy and critic; see `protocol.TrainedModule`."""

    scales_gradients = True
    holds_state = True

    def __init__(self, model: Any, ranks: Ranks, **settings: Unpack[Settings]) -> None:
        super().__init__(model, ranks, **settings)
        self._clip = settings["grad_clip"] or math.inf
        self._module = sharded(model, self._wrapped, ranks, self._dtype, settings.get("shard_size"))
        self._model = getattr(self._module, "model", self._module)
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=0.0, betas=settings["betas"], weight_decay=settings["weight_decay"], fused=True
        )
        get_optimizer_state_dict(self._module, self._optimizer)  # creates the moments by a step of zero
        for state in self._optimizer.state.values():
            state["step"].zero_()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `TrainedModule.backward`; the gradients of ranks are summed after every micro-batch."""
        del last
        torch.autograd.backward(loss * self.ranks.world_size)  # FSDP averages over ranks

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """See `TrainedModule.step`. The norm is that of all ranks, so they agree whether it is finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        trained = self._optimizer.param_groups[0]["params"]
        if grad_scale != 1.0:
            torch._foreach_mul_([p.grad for p in trained if p.grad is not None], grad_scale)
        norm = in_full(nn.utils.clip_grad_norm_(trained, self._clip)).item()
        applied = not skip and math.isfinite(norm)
        if applied:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._end_of_mini_batch()
        return StepResult(grad_norm=norm, applied=applied)

    def save(self, directory: Path, files: StateFiles | None = None) -> None:
        """See `TrainedModule.save`."""
        save(self._state(), storage_writer=_Writer(directory / _STATE, files or StateFiles()))

    def load(self, directory: Path) -> None:
        """See `TrainedModule.load`; the number of ranks may be another one."""
        state = self._state()
        try:
            with only_plain_data():
                load(state, storage_reader=PlainReader(directory / _STATE))
            set_state_dict(
                self._module,
                self._optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", {})  # of a `CheckpointException`: rank → (error, stack)
            cause = next((failure for failure, _ in failures.values()), error)
            message = f"FSDP cannot load its state: {first_line(cause)}"
            raise RunFailure(message, where=str(directory / _STATE)) from error

    def _state(self) -> dict[str, Any]:
        self._ready()
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def _ready(self) -> None:
        """See `Engine._ready`."""
        reshard(self._module)

    @contextlib.contextmanager
    def _gathered(self, parts: Sequence[Any], *, changed: bool = False) -> Iterator[Sequence[Tensor]]:
        """See `Engine._gathered` (a collective); a rank changes its own part."""
        yield [part.to_local() if changed else in_full(part.detach()) for part in parts]


class FsdpEngine(PolicyEngine, _Engine):
    """A causal language model under FSDP2; see `TrainEngine`."""


class FsdpCritic(ValueEngine, _Engine):
    """A value model under FSDP2: the body of a model with a new value head; see `CriticEngine`."""


class FsdpReference(FrozenModule):
    """A `ListingPolicy` with separate weights, divided among the ranks, which is never trained."""

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        *,
        dtype: torch.dtype,
        temperature: float,
        shard_size: int | None = None,
    ) -> None:
        model.requires_grad_(False)
        policy = partial(PolicyModule, temperature=temperature)
        self._module = sharded(model, policy, ranks, dtype, shard_size)


def sharded(
    model: Any,
    wrap: Callable[..., nn.Module],
    ranks: Ranks,
    dtype: torch.dtype,
    shard_size: int | None = None,
) -> Any:
    """The module that `wrap` makes of the model, with weights divided among the ranks, layer by layer.

    With `shard_size`, which divides the number of ranks, each group of so many ranks holds all weights;
    gradients are summed within the groups, then over them ("hybrid" sharding).

    Layers with trained weights are kept in float32, others in `dtype`; all are gathered in `dtype`. Ranks
    stay in step if they call the body equally often.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # log-probs are rows of one tensor
    shape = (ranks.world_size // shard_size, shard_size) if shard_size else (ranks.world_size,)
    names = ("replicate", "shard") if shard_size else ("shard",)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def place(part: nn.Module) -> None:
        own = [parameter for parameter in part.parameters() if not isinstance(parameter, DTensor)]
        kept = torch.float32 if any(parameter.requires_grad for parameter in own) else dtype
        for parameter in own:
            parameter.data = parameter.data.to(ranks.device, kept)
        fully_shard(part, mesh=mesh, mp_policy=policy)

    for layer in [
        submodule for submodule in model.modules() if isinstance(submodule, GradientCheckpointingLayer)
    ]:
        place(layer)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(ranks.device)
    module = wrap(model, ranks=ranks, share_prompts=False, probe=False)
    place(module)
    module.eval()  # no dropout: π_θ would differ from one pass to the next
    with torch.no_grad():  # the first pass fixes dtypes, by what is trained now, and probes the model
        module(inputs=idle_inputs(ranks.device))
    reshard(module)
    return module


def reshard(module: nn.Module) -> None:
    """Divides weights again that a pass without a backward pass left gathered."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def in_full(tensor: Tensor) -> Tensor:
    """A tensor that may be divided among the ranks, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
