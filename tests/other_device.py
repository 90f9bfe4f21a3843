"""A device apart from the CPU, for tests without a GPU: operations that mix tensors of both raise.

The CPU computes them. They say `cpu:1`, because a build of torch without CUDA has no gradients for tensors
that say `cuda:0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cpu", 1)
#: Operations that take tensors of another device: copies, and reads and writes by indices on the CPU.
_COPIES = ("copy_", "_to_copy")
_STRICT = ("stack", "cat")  # others take numbers, as tensors without dimensions, from the CPU
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class Placed(torch.Tensor):
    """A tensor of the device; `on_cpu` has its values."""

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> Placed:
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.size(), dtype=on_cpu.dtype, device=DEVICE, **layout
        )
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def numpy(self) -> Any:
        raise TypeError("NumPy cannot read this device")

    def new_tensor(self, data: Any, **options: Any) -> Placed:
        return Placed(self.on_cpu.new_tensor(data, **options))


class _Mode(TorchDispatchMode):
    """Handles operations that create or copy tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_ours = _is_ours(kwargs.get("device")) or any(isinstance(x, Placed) for x in tree_leaves(args))
        return _run(func, args, kwargs) if is_ours else func(*args, **kwargs)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    placed = [x for x in tensors if isinstance(x, Placed)]
    name = func.__name__.partition(".")[0]
    others = [x for x in tensors if (x.ndim or name in _STRICT) and not isinstance(x, Placed)]
    is_read = name in _INDEXED and isinstance(args[0], Placed)
    if placed and others and name not in _COPIES and not is_read:
        raise RuntimeError(f"{name} of tensors on different devices")
    if name == "copy_":
        _plain(args[0]).copy_(_plain(args[1]))
        return args[0]
    given = {key: _plain(value) for key, value in kwargs.items()}
    stays = bool(placed)
    if (device := kwargs.get("device")) is not None:
        stays, given["device"] = _is_ours(device), torch.device("cpu")
    found = func(*tree_map(_plain, args), **given)
    if name == "_local_scalar_dense":
        return found
    known = {id(x.on_cpu): x for x in placed}  # operations in place return their argument

    def place(x: Any) -> Any:
        if not stays or not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else Placed(x)

    return tree_map(place, found)


def _plain(x: Any) -> Any:
    return x.on_cpu if isinstance(x, Placed) else x


@contextmanager
def other_device() -> Iterator[Callable[[Any], Any]]:
    """Yields a function that moves tensors, records and modules (in place) to the device."""
    plain, as_plain = torch.tensor, torch.as_tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        return Placed(plain(data, **options)) if _is_ours(device) else plain(data, device=device, **options)

    def as_tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        found = as_plain(data, **options)
        return found if device is None else found.to(device)

    with pytest.MonkeyPatch.context() as patched, _Mode():
        patched.setattr(torch, "tensor", tensor)  # it does not reach the mode
        patched.setattr(torch, "as_tensor", as_tensor)  # nor does this
        patched.setattr(nn.Module, "to", lambda module, *_, **__: _moved(module))
        yield _moved


def _moved(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x if isinstance(x, Placed) else x.to(DEVICE)
    if isinstance(x, nn.Module):
        for module in x.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, Placed):
                    copy = Placed(parameter.detach().clone())
                    module._parameters[name] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else _moved(buffer)
        return x
    if isinstance(x, dict):
        return {key: _moved(value) for key, value in x.items()}
    if is_dataclass(x):
        return type(x)(**{part.name: _moved(getattr(x, part.name)) for part in fields(x)})
    return x
