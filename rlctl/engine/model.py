"""Loading the policy, its tokenizer and other models beside it, with errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlctl.engine.liger import refuse_liger_here, run_liger
from rlctl.errors import EnvironmentFailure, UsageError

#: What a model directory holds beside its weights: configs, tokenizer, chat template, code.
_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


def load_policy(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    attn_implementation: str,
    dtype: torch.dtype,
    use_liger: bool = False,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a directory or the hub.

    Raises:
        UsageError: no such model, not a causal language model, the tokenizer knows tokens the model
            has no embedding for, or Liger has no kernels for it.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache, or Liger's
            kernels cannot run here.
    """
    from transformers import AutoTokenizer

    shared = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    where = f"model.path={path}"
    if use_liger:
        refuse_liger_here()
    with _explained(path, where):
        tokenizer = AutoTokenizer.from_pretrained(path, **shared)
        model = _causal_lm(path, use_liger, dtype=dtype, attn_implementation=attn_implementation, **shared)
    _check_embeddings(model, tokenizer, where, "use the tokenizer the model was trained with")
    return model, tokenizer


def local_directory(path: str) -> Path:
    """Where a model's files lie: the directory itself, or the hub's snapshot of it, fetched if need be.

    Raises:
        UsageError: no such directory, or not a name the hub can have.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    with _explained(path, f"model.path={path}"):
        if Path(path).is_dir():
            return Path(path)
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, path, ignore_patterns=["*/*"])  # folders hold other formats
        found = Path(fetch(allow_patterns=[*_TEXT_FILES, "*.safetensors"]))
        if not any(found.glob("*.safetensors")):
            fetch(allow_patterns=["*.bin"])
        return found


def load_reader(path: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """A model's tokenizer and config, without its weights.

    Raises:
        UsageError, EnvironmentFailure: as `load_policy`.
    """
    from transformers import AutoConfig, AutoTokenizer

    with _explained(path, f"model.path={path}"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        return tokenizer, AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def load_beside(
    path: str,
    tokenizer: Any,
    *,
    key: str,
    revision: str | None,
    trust_remote_code: bool,
    attn_implementation: str,
    dtype: torch.dtype,
    use_liger: bool = False,
) -> Any:
    """A causal language model that reads the policy's tokens: a critic's body or a reference.

    What a directory holds besides, such as a reward model's `score`, is left out.

    Args:
        path, revision: directory or hub id, and its branch, tag or commit.
        tokenizer: the policy's.
        key: of the spec that named it, `critic.path` or `ref.path`, for errors.
        trust_remote_code, attn_implementation, dtype, use_liger: as for the policy.

    Raises:
        UsageError: no such model, not a causal language model, the policy's tokenizer knows tokens it
            has no embedding for, or Liger has no kernels for it.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache, or Liger's
            kernels cannot run here.
    """
    where = f"{key}={path}"
    with _explained(path, where):
        model = _causal_lm(
            path,
            use_liger,
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
        )
    _check_embeddings(model, tokenizer, where, "name a model with the policy's tokenizer")
    return model


def _causal_lm(path: str, use_liger: bool, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    if use_liger:
        run_liger(model)
    return model


@contextmanager
def _explained(path: str, where: str) -> Iterator[None]:
    """What goes wrong while loading, in words."""
    from safetensors import SafetensorError

    _check_directory(path, where)
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _not_loaded(path, where, error) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"not a model that can be trained: {_first_line(error)}",
            where=where,
            fix="name a causal language model; model.trust_remote_code=true if it ships its own code",
        ) from error


def _check_embeddings(model: Any, tokenizer: Any, where: str, fix: str) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model has embeddings for {rows}",
            where=where,
            fix=fix,
        )


def _check_directory(path: str, where: str) -> None:
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
        return UsageError(f"the model cannot be read: {_first_line(error)}", where=where)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
    return EnvironmentFailure(
        f"neither a directory nor in the cache, and the hub did not give it: {_first_line(error)}",
        where=where,
        fix="unset HF_HUB_OFFLINE" if offline else "check the id and the network, or download it beforehand",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
