"""A model's files: where they are, and clear errors for what cannot be read. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.named_models import model_directory

#: What a model directory holds apart from its weights: configs, tokenizer, chat template, code.
_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def local_directory(path: str) -> Path:
    """Where a model's files lie: the directory itself, or the hub's snapshot of it, fetched if need be.

    Raises:
        UsageError: no such directory, or not a name the hub can have.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    where, path = f"model.path={path}", model_directory(path)
    with explained(path, where):
        if Path(path).is_dir():
            return Path(path)
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, path, ignore_patterns=["*/*"])  # folders hold other formats
        found = Path(fetch(allow_patterns=[*_TEXT_FILES, "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            fetch(allow_patterns=["*.bin"])
        return found


def config_directory(path: str) -> Path:
    """Where the model's config.json lies; of a model of the hub that file alone is fetched, if need be.

    Raises:
        UsageError, EnvironmentFailure: as `local_directory`.
    """
    where, path = f"model.path={path}", model_directory(path)
    with explained(path, where):
        if Path(path).is_dir():
            return Path(path)
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(path, "config.json")).parent


@contextmanager
def explained(path: str, where: str) -> Iterator[None]:
    """Turn errors while loading into clear messages."""
    from safetensors import SafetensorError

    check_directory(path, where)
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _not_loaded(path, where, error) from error
    except UnpicklingError as error:
        raise UsageError(
            "a file of weights holds more than tensors, and reading it could run its code: it is not loaded",
            where=where,
            fix="use a copy of the model with *.safetensors files; its maker or you can convert it where the "
            "file is trusted",
        ) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"not a model that can be trained: {first_line(error)}",
            where=where,
            fix="name a causal language model; model.trust_remote_code=true if it ships its own code",
        ) from error


def check_directory(path: str, where: str) -> None:
    """A path that looks like a directory is not a hub id: say so rather than ask the hub."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
    if looks_local and not (Path(path) / "config.json").is_file():
        what = "no config.json in it" if Path(path).is_dir() else "no such directory"
        raise UsageError(
            f"not a Hugging Face model directory: {what}",
            where=where,
            fix="give a directory with config.json and weights, or a hub id such as Qwen/Qwen2.5-0.5B",
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
