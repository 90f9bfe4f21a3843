"""Load the policy, its tokenizer and the other models, with errors that say what to do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlctl.engine.liger import refuse_liger_here, run_liger
from rlctl.engine.model_files import explained
from rlctl.errors import UsageError
from rlctl.named_models import model_directory

if TYPE_CHECKING:
    from rlctl.engine.deepspeed import PartitionedLoading


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
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    read = partial(AutoModelForCausalLM.from_pretrained, path, **options)
    if partition:
        shared = {key: options[key] for key in ("revision", "trust_remote_code")}
        model = partition(read, AutoConfig.from_pretrained(path, **shared))
    else:
        model = read()
    if use_liger:
        run_liger(model)
    return model


def _check_embeddings(model: Any, tokenizer: Any, where: str, fix: str) -> None:
    weight = model.get_input_embeddings().weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]  # DeepSpeed's, where it is cut up
    if len(tokenizer) > rows:
        raise UsageError(
            f"the tokenizer knows {len(tokenizer)} tokens, the model has embeddings for {rows}",
            where=where,
            fix=fix,
        )
