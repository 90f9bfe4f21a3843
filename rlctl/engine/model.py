"""Loading a policy and its tokenizer, with errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rlctl.errors import EnvironmentFailure, UsageError


def load_policy(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    attn_implementation: str,
    dtype: torch.dtype,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a directory or the hub.

    Raises:
        UsageError: no such model, not a causal language model, or the tokenizer knows tokens the
            model has no embedding for.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    _check_directory(path)
    shared = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **shared)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, **shared
        )
    except (OSError, SafetensorError) as error:
        raise _not_loaded(path, error) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"not a model that can be trained: {_first_line(error)}",
            where=f"model.path={path}",
            fix="name a causal language model; model.trust_remote_code=true if it ships its own code",
        ) from error
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model has embeddings for {rows}",
            where=f"model.path={path}",
            fix="use the tokenizer the model was trained with",
        )
    return model, tokenizer


def _check_directory(path: str) -> None:
    """A path that looks like a directory is not a hub id: say so rather than ask the hub."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
    if looks_local and not (Path(path) / "config.json").is_file():
        what = "no config.json in it" if Path(path).is_dir() else "no such directory"
        raise UsageError(
            f"not a Hugging Face model directory: {what}",
            where=f"model.path={path}",
            fix="give a directory with config.json and weights, or a hub id such as Qwen/Qwen2.5-0.5B",
        )


def _not_loaded(path: str, error: Exception) -> UsageError | EnvironmentFailure:
    if (Path(path) / "config.json").is_file():
        return UsageError(f"the model cannot be read: {_first_line(error)}", where=f"model.path={path}")
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
    return EnvironmentFailure(
        f"neither a directory nor in the cache, and the hub did not give it: {_first_line(error)}",
        where=f"model.path={path}",
        fix="unset HF_HUB_OFFLINE" if offline else "check the id and the network, or download it beforehand",
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
