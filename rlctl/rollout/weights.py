"""Weights for rollout engines: complete and of the right shapes; in files, one directory per version."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlctl import leftovers
from rlctl.errors import RunFailure, UsageError
from rlctl.files import apply_umask
from rlctl.leftovers import SHARED_MEMORY

#: Weights are written in files of about this size, so that at most this much is held in memory twice.
SHARD_BYTES = 2 * 2**30
#: Text models that vLLM gives no output head: it applies their embedding.
_WITHOUT_HEAD = ("gemma2", "gemma3n_text")


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A `Policy` without adapters.

    Attributes:
        named_tensors: all weights, by their names in the model's `state_dict()`.
    """

    named_tensors: Iterable[tuple[str, Tensor]]

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; `merged` has no effect."""
        del merged
        return iter(self.named_tensors)

    def adapter(self) -> NoReturn:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise ValueError("these weights have no adapter")


def _as_saved(model: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns a function that converts a weight of the model to the form `save_pretrained` would write."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return lambda weight: weight
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded from files
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or any(len(each.target_patterns) > 1 for each in conversions):
        return lambda weight: weight  # a file's weight combines several of the model's: unsupported
    return partial(revert_weight_conversion, model)


class ExpectedWeights:
    """Names and shapes of a complete set of a model's weights; tied names are one weight.

    Args:
        model: a Hugging Face model, not yet wrapped by a training engine; its weights may be partitioned.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        # `ds_shape`: DeepSpeed's full shape of a weight that is partitioned among the ranks.
        self._shapes = {name: tuple(getattr(part, "ds_shape", part.shape)) for name, part in state.items()}
        self._names = {name: tuple(names[id(tensor)]) for name, tensor in state.items()}
        self._as_saved = _as_saved(model)
        config = getattr(model, "config", None)
        self._has_head = config is None or config.get_text_config().model_type not in _WITHOUT_HEAD

    def in_files(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Like `checked`, but with the names and tensors of the model's files, which engines load.

        In memory, transformers may represent a model differently: experts in one tensor, modules renamed.
        Tied weights have the first of their names only, as in files. On CPUs they have all names, because
        engines run them untied, see `rlctl.rollout.vllm`; except if vLLM's model has no head.
        """
        most = 1 if torch.cuda.is_available() or not self._has_head else None
        for names, tensor in self.checked(named_tensors):
            first, *tied = [self._as_saved({name: tensor}) for name in names[:most]]
            for name, part in first.items():
                yield (name, *(next(iter(other)) for other in tied)), part

    def checked(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yields each correct weight with all its names; raises one error for all others at the end.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape. The correct ones have been yielded
                by then, so an engine that loaded them has a mixture of old and new weights.
        """
        covered: set[str] = set()
        wrong: list[str] = []
        for name, tensor in named_tensors:
            shape = self._shapes.get(name)
            if shape is None:
                wrong.append(f"{name} is unknown")
            elif shape != tuple(tensor.shape):
                wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
            else:
                covered.update(self._names[name])
                yield self._names[name], tensor
        wrong += [f"{name} is missing" for name in self._shapes if name not in covered]
        if wrong:
            raise RunFailure(f"weight sync to the rollout engine failed: {'; '.join(wrong)}")


class VersionedDir:
    """Writes each version to a directory and keeps the last two.

    A directory appears under its name only when it is complete, so a restarted engine can load the newest one
    at any time.

    Args:
        parent: directory to write to; None: shared memory of this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, parent: Path | None) -> None:
        is_shared = parent is not None
        parent = parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            leftovers.clear(parent)  # those in shared memory would stay until a reboot
            self._root, handle = leftovers.own_directory("weights", parent)
            self._held = contextlib.ExitStack()
            self._held.callback(os.close, handle)
            if is_shared:
                self._root.chmod(0o755)
        except OSError as error:
            raise UsageError(
                f"cannot write weights there: {error.strerror}", where="rollout.server.weights_dir"
            ) from error
        self._newest: Path | None = None
        self._before: Path | None = None

    def publish(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Writes a version by `fill` to a directory `name`, replacing an existing one; the last two are kept.

        Raises:
            RunFailure: there is not enough space.
        """
        target, part = self._root / name, self._root / "part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            fill(part)
            apply_umask(part)  # engines on other nodes may run as another user
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        except (OSError, SafetensorError) as error:  # a full disk can raise either one
            reason = getattr(error, "strerror", None) or error
            raise RunFailure(
                f"weights for the rollout engines cannot be written: {reason}",
                where=str(self._root),
                fix="free space there, or set rollout.server.weights_dir",
            ) from error
        if self._before and self._before != target:
            shutil.rmtree(self._before, ignore_errors=True)
        if self._newest != target:
            self._before, self._newest = self._newest, target
        return target

    def latest(self) -> Path:
        """Directory of the last complete version; there must be one."""
        assert self._newest is not None
        return self._newest

    def close(self) -> None:
        """Removes everything written."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._held.close()


class PublishedWeights(VersionedDir):
    """Writes each version of the policy's weights as a model that engines can load.

    Args:
        model: the policy, which provides the config and the names of the weights.
        tokenizer: written alongside the weights.
        parent: directory to write to; None: shared memory of this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, model: Any, tokenizer: Any, parent: Path | None) -> None:
        super().__init__(parent)
        self.expected = ExpectedWeights(model)
        self._tokenizer = tokenizer
        self._config = copy.deepcopy(model.config)
        if not torch.cuda.is_available():  # see rlctl.rollout.vllm on tied heads
            for part in (self._config, self._config.get_text_config()):
                part.tie_word_embeddings = False

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> Path:
        """Writes a version; the last two are kept.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape, or there is not enough space.
        """

        def fill(directory: Path) -> None:
            self._write_config(directory)
            self._write_shards(directory, named_tensors)

        return self.publish(f"v{policy_version}", fill)

    def write_config(self) -> Path:
        """Writes the model without weights, for engines that receive those in another way.

        Raises:
            RunFailure: there is not enough space.
        """
        return self.publish("config", self._write_config)

    def _write_config(self, directory: Path) -> None:
        self._config.save_pretrained(directory)
        self._tokenizer.save_pretrained(directory)

    def _write_shards(self, directory: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Writes the weights, and the index that names the file of each."""
        files: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        number = size = 0
        for names, tensor in self.expected.in_files(named_tensors):
            if size >= SHARD_BYTES:
                save_file(shard, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
                number, shard, size = number + 1, {}, 0
            for name in names:  # tied weights under each name: safetensors cannot share memory
                shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
                files[name] = f"model-{number}.safetensors"
                size += shard[name].nbytes
        save_file(shard, directory / f"model-{number}.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
