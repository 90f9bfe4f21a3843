"""Weights for rollout engines in files, one directory per version."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlctl import leftovers
from rlctl.errors import RunFailure, UsageError
from rlctl.files import apply_umask
from rlctl.leftovers import SHARED_MEMORY
from rlctl.rollout.expected_weights import ExpectedWeights

#: Weights are written in files of about this size, so that at most this much is held in memory twice.
SHARD_BYTES = 2 * 2**30


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
            message = f"cannot write weights there: {error.strerror}"
            raise UsageError(message, where="rollout.server.weights_dir") from error
        self._newest: Path | None = None
        self._before: Path | None = None

    def publish(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Writes a version by `fill` to a directory `name`, replacing an existing one; the last two are kept.

        Raises:
            RunFailure: there is not enough space.
        """
        target = self._root / name
        unfinished = self._root / "part"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            fill(unfinished)
            apply_umask(unfinished)  # engines on other nodes may run as another user
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        except (OSError, SafetensorError) as error:  # a full disk can raise either one
            reason = getattr(error, "strerror", None) or error
            message = f"weights for the rollout engines cannot be written: {reason}"
            fix = "free space there, or set rollout.server.weights_dir"
            raise RunFailure(message, where=str(self._root), fix=fix) from error
        if self._before and self._before != target:
            shutil.rmtree(self._before, ignore_errors=True)
        if self._newest != target:
            self._before = self._newest
            self._newest = target
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
        for number, shard in enumerate(chunks(self.expected.in_files(named_tensors), SHARD_BYTES, "cpu")):
            file = f"model-{number}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            files |= dict.fromkeys(shard, file)
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def chunks(
    weights: Iterable[tuple[tuple[str, ...], Tensor]], num_bytes: int, device: torch.device | str
) -> Iterator[dict[str, Tensor]]:
    """Copies of weights by name, in chunks of one dtype and about `num_bytes`.

    Copies, because a gathered weight is freed when the next one is gathered; one under each name of a tied
    weight, because safetensors cannot share memory.
    """
    chunk: dict[str, Tensor] = {}
    size = 0
    for names, tensor in weights:
        if chunk and (size >= num_bytes or tensor.dtype != next(iter(chunk.values())).dtype):
            yield chunk
            chunk = {}
            size = 0
        for name in names:
            chunk[name] = tensor.detach().to(device, copy=True).contiguous()
            size += tensor.nbytes
    if chunk:
        yield chunk
