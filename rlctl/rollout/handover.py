"""Handing weights to engines in other processes: a Hugging Face directory per version, on shared memory."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlctl.errors import RunFailure, UsageError
from rlctl.rollout.weights import ExpectedWeights

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rlctl-weights-"
#: Weights are written in files of about this size, so that no more than that is held twice.
SHARD_BYTES = 2 * 2**30


class Handover:
    """Writes each version of the policy's weights where engines can read it, the last two kept.

    A directory appears under its name only when it is complete, so an engine that starts again may
    load the newest at any time.

    Args:
        model: the policy, for its config and the names of its weights.
        tokenizer: written beside the weights.
        parent: where to write; None: shared memory of this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, model: Any, tokenizer: Any, parent: Path | None) -> None:
        self._expected = ExpectedWeights(model)
        self._tokenizer = tokenizer
        self._config = copy.deepcopy(model.config)
        if not torch.cuda.is_available():  # see rlctl.rollout.vllm on tied heads
            self._config.tie_word_embeddings = False
        is_shared = parent is not None
        parent = parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            self._root = Path(
                tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=parent)
            )
            if is_shared:
                self._root.chmod(0o755)  # engines on other nodes may run as another user
        except OSError as error:
            raise UsageError(
                f"cannot write weights there: {error.strerror}", where="rollout.server.weights_dir"
            ) from error
        self._newest: Path | None = None
        self._before: Path | None = None

    def write(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> Path:
        """Write a version; the one before the last is removed.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape, or there is no room.
        """
        target, part = self._root / f"v{policy_version}", self._root / "part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            self._config.save_pretrained(part)
            self._tokenizer.save_pretrained(part)
            self._write_shards(part, named_tensors)
            shutil.rmtree(target, ignore_errors=True)  # the same version once more, after a resume
            part.rename(target)
        except OSError as error:
            raise RunFailure(
                f"weights for the rollout engines cannot be written: {error.strerror or error}",
                where=str(self._root),
                fix="free space there, or set rollout.server.weights_dir",
            ) from error
        if self._before and self._before != target:
            shutil.rmtree(self._before, ignore_errors=True)
        if self._newest != target:
            self._before, self._newest = self._newest, target
        return target

    def latest(self) -> Path:
        """The last complete version.

        Raises:
            ValueError: nothing was written yet.
        """
        if self._newest is None:
            raise ValueError("no weights have been handed over")
        return self._newest

    def close(self) -> None:
        """Remove everything written."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _write_shards(self, directory: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        shards: list[list[str]] = []
        shard: dict[str, Tensor] = {}
        size = 0
        for names, tensor in self._expected.checked(named_tensors):
            for name in names:  # tied weights under each name: safetensors shares no memory
                shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
                size += shard[name].nbytes
            if size >= SHARD_BYTES:
                _save(shard, directory, shards)
                shard, size = {}, 0
        if shard:
            _save(shard, directory, shards)
        _name_shards(directory, shards)


def _save(shard: dict[str, Tensor], directory: Path, shards: list[list[str]]) -> None:
    save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
    shards.append(list(shard))


def _name_shards(directory: Path, shards: list[list[str]]) -> None:
    """As transformers names them: one file, or several and an index."""
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _remove_abandoned(parent: Path) -> None:
    """What runs of this machine left that were killed: in shared memory it would stay until a reboot."""
    for path in parent.glob(f"{_PREFIX}{socket.gethostname()}-*"):
        pid = path.name.rsplit("-", 2)[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
