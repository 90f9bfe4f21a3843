"""Locations of model files, and clear errors if they cannot be read. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.named_models import model_directory

#: Files in a model directory apart from its weights: configs, tokenizer, chat template, code.
_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def local_directory(path: str) -> Path:
    """The directory of a model's files: `path` itself, or its hub snapshot, downloaded if necessary.

    Raises:
        UsageError: no such directory, or not a valid hub name.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    with explained(path) as found:
        if Path(found).is_dir():
            return Path(found)
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, found, ignore_patterns=["*/*"])  # subfolders contain other formats
        directory = Path(fetch(allow_patterns=[*_TEXT_FILES, "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            fetch(allow_patterns=["*.bin"])
        return directory


def config_directory(path: str) -> Path:
    """The directory of the model's config.json; from the hub, only this file is downloaded if necessary.

    Raises:
        UsageError, EnvironmentFailure: as `local_directory`.
    """
    with explained(path) as found:
        if Path(found).is_dir():
            return Path(found)
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(found, "config.json")).parent


@contextmanager
def explained(
    path: str,
    key: str = "model.path",
    kind: str = "a model that can be trained",
    fix: str | None = None,
) -> Iterator[str]:
    """Turns errors during loading into clear messages; yields the directory or hub id that `path` stands for.

    Args:
        path: directory, hub id, or name of a model.
        key: the spec key that names the model.
        kind, fix: what the model must be, and what to write for another one; by default, a causal language
            model.
    """
    from safetensors import SafetensorError

    where, path = f"{key}={path}", model_directory(path)
    check_directory(path, where, fix)
    try:
        yield path
    except (OSError, SafetensorError) as error:
        raise _not_loaded(path, where, error) from error
    except UnpicklingError as error:
        raise UsageError(
            "a file of weights contains more than tensors; it is not loaded, because that could run its code",
            where=where,
            fix="use a copy of the model with *.safetensors files, or convert the file if you trust its "
            "author",
        ) from error
    except (ValueError, KeyError, ImportError) as error:
        fix = fix or "name a causal language model; model.trust_remote_code=true if it ships its own code"
        raise UsageError(f"not {kind}: {first_line(error)}", where=where, fix=fix) from error


def check_directory(path: str, where: str, fix: str | None = None) -> None:
    """Refuses a local path without config.json, instead of looking it up on the hub as an id."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
    if looks_local and not (Path(path) / "config.json").is_file():
        what = "it has no config.json" if Path(path).is_dir() else "no such directory"
        raise UsageError(
            f"not a Hugging Face model directory: {what}",
            where=where,
            fix=fix or "give a directory with config.json and weights, or a hub id such as Qwen/Qwen2.5-0.5B",
        )


def _not_loaded(path: str, where: str, error: Exception) -> UsageError | EnvironmentFailure:
    if (Path(path) / "config.json").is_file():
        return UsageError(f"the model cannot be read: {first_line(error)}", where=where)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
    return EnvironmentFailure(
        f"neither a directory nor in the cache, and the download failed: {first_line(error)}",
        where=where,
        fix="name a directory that exists, or unset HF_HUB_OFFLINE to download it"
        if offline
        else "check the id and the network, or download it beforehand",
    )
