"""Weights for engines in other processes: one Hugging Face directory per version, in shared memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlctl.rollout.versioned_dir import VersionedDir
from rlctl.rollout.weights import ExpectedWeights

#: Weights are written in files of about this size, so that at most this much is held in memory twice.
SHARD_BYTES = 2 * 2**30


class PublishedWeights(VersionedDir):
    """Writes each version of the policy's weights as a model that engines can load.

    Args:
        model: the policy, which provides the config and the names of the weights.
        tokenizer: written alongside the weights.
        parent: directory to write to; None: shared memory of this machine.

    Attributes:
        expected: names and shapes of the policy's weights.

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
        shards: list[list[str]] = []
        shard: dict[str, Tensor] = {}
        size = 0
        for names, tensor in self.expected.in_files(named_tensors):
            for name in names:  # tied weights under each name: safetensors cannot share memory
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
    """Renames the files as transformers does: one file, or several and an index."""
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
