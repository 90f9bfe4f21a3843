"""Loading of saved states as tensors and plain data: a file that names anything else is refused.

DeepSpeed and torch's distributed checkpoints load pickles, which run code of whoever wrote the file. Here
they are read with `weights_only`, and with a list of the few classes that engines' states contain.

Executed as a module, `python -m rlctl.engine.plain_state MODULE ARGUMENT…` runs another module in this way.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

#: Module → classes in DeepSpeed's states besides tensors, numbers, texts and their collections.
_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
#: Module → names in the file `.metadata` of torch's distributed checkpoints.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}


class _StandIn:
    """In place of a class of DeepSpeed: what a state holds of it, without its code."""

    def __init__(self, *content: Any) -> None:
        del content


class PlainReader(FileSystemReader):
    """Reads a distributed checkpoint whose metadata are only metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `StorageReader`.

        Raises:
            pickle.UnpicklingError: the file contains something else.
        """
        del args
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(metadata).__name__}, not the metadata of a state")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of `_OF_METADATA`, or a dtype."""
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in _OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded: it could run code")
        return getattr(importlib.import_module(module), name)


@contextlib.contextmanager
def only_plain_data() -> Iterator[None]:
    """Context in which `torch.load` reads tensors, plain data and the classes of `_OF_DEEPSPEED`.

    It holds for all threads of the process; a call's own `weights_only=False` has no effect.

    Raises:
        pickle.UnpicklingError: by `torch.load`, of a file that contains anything else.
    """
    load: Callable[..., Any] = torch.load

    def load_plain(*args: Any, **options: Any) -> Any:
        return load(*args, **options | {"weights_only": True, "pickle_module": None})

    classes: list[Any] = [
        getattr(sys.modules[module], name)
        for module, names in _OF_DEEPSPEED.items()
        for name in names
        if module in sys.modules
    ]
    with torch.serialization.safe_globals(classes):
        torch.load = load_plain
        try:
            yield
        finally:
            torch.load = load


def load_plain(file: Path) -> Any:
    """The content of a file of `torch.save`, in the host's memory; tensors are read when they are used.

    DeepSpeed is not imported: its classes are replaced by one without code.

    Raises:
        pickle.UnpicklingError: the file contains something else than `only_plain_data` reads.
        Exception: of many kinds, from a damaged file.
    """
    stand_ins: list[Any] = [
        (_StandIn, f"{module}.{name}") for module, names in _OF_DEEPSPEED.items() for name in names
    ]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _main() -> None:
    module = sys.argv[1]
    importlib.import_module(module.rpartition(".")[0])  # whose classes can then be loaded
    del sys.argv[0]
    with only_plain_data():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
