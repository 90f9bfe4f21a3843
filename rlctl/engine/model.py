"""Load the policy, its tokenizer and the other models, with errors that say what to do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlctl.engine.liger import refuse_liger_here, run_liger
from rlctl.engine.model_files import explained
from rlctl.errors import UsageError
from rlctl.named_models import model_directory
from rlctl.prefix import body_of, reads_more_than_text

if TYPE_CHECKING:
    from rlctl.engine.deepspeed import PartitionedLoading

#: How images, videos or sound become tokens.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_policy(
    path: str,
    *,
    revision: str | None,
    trust_remote_code: bool,
    attn_implementation: str,
    dtype: torch.dtype,
    use_liger: bool = False,
    partition: PartitionedLoading | None = None,
) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a directory, the hub, or by a known name.

    Of a model that reads images as well, what text never reaches is frozen.

    With `partition` its weights are cut up among the ranks (a collective).

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
    path = model_directory(path)
    with explained(path, where):
        tokenizer = AutoTokenizer.from_pretrained(path, **shared)
        model = _causal_lm(
            path, use_liger, partition, dtype=dtype, attn_implementation=attn_implementation, **shared
        )
    _check_embeddings(model, tokenizer, where, "use the tokenizer the model was trained with")
    return model, tokenizer


def load_reader(path: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """A model's tokenizer and config, without its weights.

    Raises:
        UsageError, EnvironmentFailure: as `load_policy`.
    """
    from transformers import AutoConfig, AutoTokenizer

    where, path = f"model.path={path}", model_directory(path)
    with explained(path, where):
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
    partition: PartitionedLoading | None = None,
) -> Any:
    """A causal language model that reads the policy's tokens: a critic's body or a reference.

    What a directory holds besides, such as a reward model's `score`, is left out.

    Args:
        path, revision: directory or hub id, and its branch, tag or commit.
        tokenizer: the policy's.
        key: of the spec that named it, `critic.path` or `ref.path`, for errors.
        trust_remote_code, attn_implementation, dtype, use_liger, partition: as for the policy.

    Raises:
        UsageError: no such model, not a causal language model, the policy's tokenizer knows tokens it
            has no embedding for, or Liger has no kernels for it.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache, or Liger's
            kernels cannot run here.
    """
    where, path = f"{key}={path}", model_directory(path)
    with explained(path, where):
        model = _causal_lm(
            path,
            use_liger,
            partition,
            dtype=dtype,
            attn_implementation=attn_implementation,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
        )
    _check_embeddings(model, tokenizer, where, "name a model with the policy's tokenizer")
    return model


def _causal_lm(path: str, use_liger: bool, partition: PartitionedLoading | None, **options: Any) -> Any:
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    shared = {key: options[key] for key in ("revision", "trust_remote_code")}
    config = AutoConfig.from_pretrained(path, **shared)
    read = partial(_reader(config).from_pretrained, path, **options)
    model = partition(read, config) if partition else read()
    if reads_more_than_text(model.config):
        _freeze_unread(model)
        model.processor_files = _processor_files(model)  # read now: exports must not need the source again
    if use_liger:
        run_liger(model)
    return model


def _reader(config: Any) -> Any:
    """What reads a causal language model; where transformers knows it only with images, what reads that."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind, own_code = type(config), getattr(config, "auto_map", None) or {}
    is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    reads_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder
    return AutoModelForImageTextToText if reads_images and not is_text else AutoModelForCausalLM


def _freeze_unread(model: Any) -> None:
    """Freeze what text never reaches: what makes states of images or sound, and its way into the decoder.

    Nothing is frozen where the model has no decoder that runs text alone; the whole model is run then.
    """
    body = body_of(model)
    if body is None:
        return
    parts = (body, model.get_input_embeddings(), model.get_output_embeddings())
    read = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def _processor_files(model: Any) -> dict[str, bytes]:
    """By name: what a model that reads more than text needs besides config, weights and tokenizer."""
    from transformers.utils import cached_file

    revision = getattr(model.config, "_commit_hash", None)
    options = {
        "revision": revision,
        "_commit_hash": revision,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    found = (cached_file(model.name_or_path, name, **options) for name in _PROCESSOR_FILES)
    return {Path(file).name: Path(file).read_bytes() for file in found if file}


def _check_embeddings(model: Any, tokenizer: Any, where: str, fix: str) -> None:
    weight = model.get_input_embeddings().weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]  # DeepSpeed's, where it is cut up
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model has embeddings for {rows}",
            where=where,
            fix=fix,
        )
