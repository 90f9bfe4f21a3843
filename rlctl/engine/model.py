"""Loads the policy, its tokenizer and the other models, with errors that suggest a fix.

On request, models use Liger's fused kernels (Hsu et al. 2024, arXiv:2410.10989): RMSNorm, rotary embedding
and gated feed-forward become one kernel each, which stores less for the backward pass. The library's fused
loss is not used: rlctl computes log-probs itself, at a temperature.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, Unpack

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlctl.engine.varlen import NAME, refuse_varlen, register
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.lean_imports import import_models, import_tokenizers
from rlctl.model_files import TOKENIZERS, explained
from rlctl.prefix import body_of, reads_more_than_text

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.engine.ranks import Ranks
    from rlctl.engine.state_files import StateFiles

#: Files that define how images, videos or audio become tokens.
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_WEIGHTS = "model.safetensors"
#: Name in `transformers.modeling_utils` of the function that writes a file of weights.
_SAVES_WEIGHTS = "safe_save_file"
#: Bytes of weights that a rank holds before the next one shares the export: small models are one file.
SHARE_BYTES = 2**30
_LIGER, _NO_LIGER = "model.use_liger", "set it to false"
_ROTARY = "apply_rotary_pos_emb"

#: Activations that Liger's feed-forward layers compute, regardless of the model's config.
_ACTIVATIONS = {"LigerSwiGLUMLP": ("silu", "swish"), "LigerGEGLUMLP": ("gelu_pytorch_tanh",)}


class Loading(TypedDict):
    """How a model is loaded.

    Attributes:
        revision: branch, tag or commit of a model on the hub; None: the main one.
        trust_remote_code: run Python code shipped with the model.
        attn_implementation: transformers' name of the attention kernel. If the model soft-caps attention
            scores, `sdpa` stands for `eager`.
        dtype: dtype of the weights; "auto": that of the config, else of the files.
        use_liger: whether the model uses Liger's kernels.
        partition: partitions the weights among the ranks (a collective); None: every rank holds all.
    """

    revision: str | None
    trust_remote_code: bool
    attn_implementation: str
    dtype: torch.dtype | Literal["auto"]
    use_liger: NotRequired[bool]
    partition: NotRequired[Callable[..., Any] | None]  # `load_partitioned`


def load_tokenizer(path: str, **loading: Unpack[Loading]) -> Any:
    """Loads a model's tokenizer; errors are those of `load_policy`."""
    import_tokenizers()
    from transformers import AutoTokenizer

    with explained(path) as name:
        return AutoTokenizer.from_pretrained(name, **_source(loading))


def load_policy(path: str, **loading: Unpack[Loading]) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer from a directory, the hub, or by a short name.

    In a model that also reads images, parameters that text does not use are frozen.

    Raises:
        UsageError: no such model, not a causal language model, the tokenizer has tokens without an
            embedding in the model, or Liger has no kernels for it.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache, or Liger's
            kernels cannot run here.
    """
    if loading.get("use_liger"):
        refuse_liger_here()
    tokenizer = load_tokenizer(path, **loading)
    with explained(path) as name:
        model = _causal_lm(name, loading)
    _check_embeddings(model, tokenizer, f"model.path={path}", "use the tokenizer the model was trained with")
    return model, tokenizer


def load_other_model(path: str, tokenizer: Any, *, key: str, **loading: Unpack[Loading]) -> Any:
    """Loads a causal language model for the policy's tokens: a critic's body, or one that is not trained.

    Other weights in its files, such as a reward model's `score`, are ignored.

    Args:
        key: spec key that names the model, such as `ref.path`, for errors.

    Raises:
        UsageError, EnvironmentFailure: as `load_policy`; its tokenizer is not the policy's.
    """
    with explained(path, key) as name:
        _refuse_other_tokens(name, tokenizer, f"{key}={path}", loading)
        model = _causal_lm(name, loading)
    _check_embeddings(model, tokenizer, f"{key}={path}", "name a model with the policy's tokenizer")
    return model


def _refuse_other_tokens(path: str, tokenizer: Any, where: str, loading: Loading) -> None:
    """Refuses a model whose tokenizer gives a token another id; files without a tokenizer pass."""
    from transformers import AutoTokenizer

    if not _files(path, TOKENIZERS, loading["revision"]):
        return
    theirs = AutoTokenizer.from_pretrained(path, **_source(loading)).get_vocab()
    own = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    for number, token in own:
        other = theirs.get(token)
        if other != number:
            has = "has no such token" if other is None else f"gives it {other}"
            message = f"its tokenizer is not the policy's, which gives {token!r} the id {number}: it {has}"
            raise UsageError(message, where=where, fix="name a model with the policy's tokenizer")


def _source(loading: Loading) -> dict[str, Any]:
    return {"revision": loading["revision"] or "main", "trust_remote_code": loading["trust_remote_code"]}


def _causal_lm(path: str, loading: Loading) -> Any:
    import_models()
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = _source(loading)
    kernel = loading["attn_implementation"]
    config = AutoConfig.from_pretrained(path, **source)
    if kernel == "sdpa" and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        kernel = "eager"  # sdpa ignores the soft cap, and would compute another model
    if kernel == NAME:
        refuse_varlen(config)
        register()
    options = {"dtype": loading["dtype"], "attn_implementation": kernel}
    read = partial(_reader(config).from_pretrained, path, **options, **source)
    partition = loading.get("partition")
    model = partition(read, config) if partition else read()
    if reads_more_than_text(model.config):
        _freeze_unread(model)
        model.processor_files = _processor_files(model)  # read now: exports must not need the source again
    if loading.get("use_liger"):
        run_liger(model)
    return model


def _reader(config: Any) -> Any:
    """The auto class that loads the model: for causal language models, or else for images and text."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    own_code = getattr(config, "auto_map", None) or {}
    is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code
    reads_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder
    return AutoModelForImageTextToText if reads_images and not is_text else AutoModelForCausalLM


def _freeze_unread(model: Any) -> None:
    """Freezes parameters that text does not use: encoders of images or audio, and their projections.

    Nothing is frozen if the model has no separate text decoder, because then the whole model runs.
    """
    body = body_of(model)
    if body is None:
        return
    parts = (body, model.get_input_embeddings(), model.get_output_embeddings())
    read = {id(parameter) for module in parts if module is not None for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in read:
            parameter.requires_grad_(False)


def _processor_files(model: Any) -> dict[str, bytes]:
    """Name → content of the files that a multimodal model needs besides config, weights and tokenizer."""
    revision = getattr(model.config, "_commit_hash", None)
    files = _files(model.name_or_path, _PROCESSOR_FILES, revision, _commit_hash=revision)
    return {file.name: file.read_bytes() for file in files}


def _files(path: str, names: Iterable[str], revision: str | None, **more: Any) -> list[Path]:
    """Those of a model's files that exist."""
    from transformers.utils import cached_file

    options = {
        "revision": revision,
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    paths = (cached_file(path, name, **options, **more) for name in names)
    return [Path(file) for file in paths if file]


def _check_embeddings(model: Any, tokenizer: Any, where: str, fix: str) -> None:
    weight = model.get_input_embeddings().weight
    rows = getattr(weight, "ds_shape", weight.shape)[0]  # DeepSpeed's, if it is partitioned
    if len(tokenizer) > rows:
        message = f"the tokenizer has {len(tokenizer)} tokens, the model has embeddings for {rows}"
        raise UsageError(message, where=where, fix=fix)


def export(
    model: Any,
    weights: Iterator[tuple[str, Tensor]],
    ranks: Ranks,
    directory: Path,
    files: StateFiles | None = None,
) -> None:
    """Writes config and weights as a plain Hugging Face directory (all ranks).

    Each rank holds and saves a part of a large model; then the files of all ranks become those of one model.

    Args:
        weights: of the model, in full; reading them may be a collective, so all ranks iterate.
        files: held files get the weights, to be written later; otherwise they are written here.
    """
    held = files if files and files.are_held else None
    # Weights in memory that are one weight in the files must be saved together, so by one rank.
    conversions = getattr(model, "_weight_conversions", None) or ()
    is_joined = any(len(each.target_patterns) > 1 for each in conversions)
    sizes = [0] * (1 if is_joined else ranks.world_size)
    own: dict[str, Tensor] = {}
    for name, tensor in weights:
        open_files = sizes[: 1 + sum(sizes) // SHARE_BYTES]
        owner = open_files.index(min(open_files))
        sizes[owner] += tensor.nbytes
        if owner == ranks.rank:
            own[name] = tensor.to("cpu", copy=held is not None)
    unfinished = directory / f"rank-{ranks.rank}"
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    kept: dict[Path, tuple[dict[str, Tensor], dict[str, str]]] = {}
    if own:
        generation = model.generation_config
        # transformers refuses to save some that it loads, such as a temperature without `do_sample`.
        model.generation_config = type(generation)()
        model.should_save_on_this_rank = lambda _: True  # not only on rank 0
        with _keeping_weights(kept) if held else contextlib.nullcontext():
            model.save_pretrained(
                unfinished, state_dict=own, variant="part"
            )  # so that nothing loads it as a model
        del model.should_save_on_this_rank
        model.generation_config = generation
    opened: Any = safe_open
    parts = [(path, list(tensors)) for path, (tensors, _) in sorted(kept.items())]
    everyones = ranks.exchange(
        parts or [(p, list(opened(p, "pt").keys())) for p in sorted(unfinished.glob("*.safetensors"))]
    )
    for (path, _), file in zip(everyones, _names_of_files(len(everyones)), strict=True):
        if held and path in kept:
            tensors, metadata = kept.pop(path)
            held.put(directory / file, partial(save_file, tensors, metadata=metadata))
    if ranks.is_main:
        _join_parts(unfinished, everyones, {"total_size": sum(sizes)}, directory, are_held=bool(held))
        model.generation_config.to_json_file(directory / "generation_config.json")
        for name, content in getattr(model, "processor_files", {}).items():
            (directory / name).write_bytes(content)
    ranks.barrier()


@contextlib.contextmanager
def _keeping_weights(kept: dict[Path, tuple[dict[str, Tensor], dict[str, str]]]) -> Iterator[None]:
    """Context in which `save_pretrained` writes all but the weights: `kept` receives them, by their file."""
    from transformers import modeling_utils

    def keep(tensors: dict[str, Tensor], filename: str, metadata: dict[str, str]) -> None:
        kept[Path(filename)] = tensors, metadata

    write: Any = modeling_utils.safe_save_file
    setattr(modeling_utils, _SAVES_WEIGHTS, keep)
    try:
        yield
    finally:
        setattr(modeling_utils, _SAVES_WEIGHTS, write)


def _names_of_files(count: int) -> list[str]:
    """Names of so many files of weights, as `save_pretrained` chooses them."""
    if count == 1:
        return [_WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _join_parts(
    main: Path,
    saved: list[tuple[Path, list[str]]],
    metadata: dict[str, int],
    directory: Path,
    *,
    are_held: bool = False,
) -> None:
    """Moves the files of the main rank's part and the weights of all parts, as `save_pretrained` names them.

    Args:
        saved: files of weights of all ranks, and the names of the weights in each.
        are_held: the files of weights are not written yet.
    """
    files: dict[str, str] = {}
    for left in directory.glob("model*.safetensors*"):  # of an export that was killed
        left.unlink()
    for (path, names), file in zip(saved, _names_of_files(len(saved)), strict=True):
        if not are_held:
            path.rename(directory / file)
        files |= dict.fromkeys(names, file)
    if len(saved) > 1:
        index = {"metadata": metadata, "weight_map": files}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / f"{_WEIGHTS}.index.json").write_text(text)
    for path in main.iterdir():
        if ".safetensors" not in path.name:
            path.rename(directory / path.name)
    for directory_of_rank in directory.glob("rank-*"):
        shutil.rmtree(directory_of_rank)


def refuse_liger_here() -> None:
    """Refuses Liger's kernels if this machine cannot run them.

    Raises:
        EnvironmentFailure: the library is not installed, or there is no GPU for the kernels
            (with `TRITON_INTERPRET=1` Triton interprets them on a CPU).
    """
    if importlib.util.find_spec("liger_kernel") is None:
        fix = 'pip install "rlctl[liger]", or set it to false'
        raise EnvironmentFailure("Liger's kernels are not installed", where=_LIGER, fix=fix)
    if not (torch.cuda.is_available() or _interprets()):
        message = "Liger's kernels need a GPU, and torch found none"
        raise EnvironmentFailure(message, where=_LIGER, fix=_NO_LIGER)


def run_liger(model: Any) -> None:
    """Makes `model`, and later copies of it, use Liger's kernels; call `refuse_liger_here` first.

    Other models in the process keep their norms and feed-forward layers. The rotary embedding is a
    function that all models of an architecture share: it becomes Liger's for them too, on GPUs.

    Raises:
        UsageError: the library has no kernels for the architecture, or none for its activation.
    """
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if model.config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(f"Liger has no kernels for {type(model).__name__}", where=_LIGER, fix=_NO_LIGER)
    architecture = sys.modules[type(model).__module__]
    before = dict(vars(architecture))
    without_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    patches._apply_liger_kernel_to_instance(model=model, **without_loss)
    # The library also replaces the architecture's classes: restore them for later models.
    for name, value in before.items():
        if isinstance(value, type):
            setattr(architecture, name, value)
    plain = before.get(_ROTARY)
    if plain and plain is not getattr(architecture, _ROTARY):
        setattr(architecture, _ROTARY, _on_gpus(getattr(architecture, _ROTARY), plain))
    _refuse_other_activation(model)


def _on_gpus(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` on GPUs, else `plain`: a reward model of the same architecture may be on a CPU."""

    @wraps(plain)
    def rotary(q: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel if q.is_cuda or _interprets() else plain)(q, *args, **kwargs)

    return rotary


def _refuse_other_activation(model: Any) -> None:
    """Refuses activations that the kernels do not compute, because the library does not check them."""
    config = model.config.get_text_config()
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    for kind in {module._get_name() for module in model.modules()} & _ACTIVATIONS.keys():
        if activation not in _ACTIVATIONS[kind]:
            computed = f"Liger's kernel computes {_ACTIVATIONS[kind][0]}"
            message = f"{type(model).__name__} uses the activation {activation}, and {computed}"
            raise UsageError(message, where=_LIGER, fix=_NO_LIGER)


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
