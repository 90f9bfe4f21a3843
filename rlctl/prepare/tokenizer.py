"""A model's tokenizer and what is to be known of it, before any weight is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from rlctl.data.render import Renderer
from rlctl.data.schema import Message, Row
from rlctl.errors import RlctlError, UsageError
from rlctl.prepare.findings import DataFinding

_PROBE = Row("probe", (Message("user", "How much is 2 + 2?"),), "4")


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> tuple[Any, int | None]:
    """The model's tokenizer, single-threaded since workers are parallel already, and the model's context.

    The context is `max_position_embeddings`, in tokens; None where the config has none.

    Raises:
        UsageError: there is no such model, or its tokenizer cannot be read.
        EnvironmentFailure: the hub cannot be reached and the model is not in the cache.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rlctl.engine.model import load_reader

    try:
        tokenizer, config = load_reader(model, trust_remote_code=trust_remote_code)
    except RlctlError:
        raise
    except Exception as error:  # the tokenizers library and tokenizers' own code raise anything
        raise UsageError(f"the tokenizer cannot be read: {error}", where=model) from error
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return tokenizer, positions if isinstance(positions, int) else None


def tokenizer_sha256(tokenizer: Any) -> str:
    """Fingerprint of everything that decides which ids a text becomes."""
    if tokenizer.is_fast:
        text = tokenizer.backend_tokenizer.to_str()
    else:
        text = json.dumps([tokenizer.get_vocab(), type(tokenizer).__name__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def template_findings(renderer: Renderer) -> list[DataFinding]:
    """What is unusual about a model's chat template, seen on one plain question."""
    tokenizer = renderer.tokenizer
    if not tokenizer.chat_template:
        what = "the tokenizer has no chat template: messages are joined by blank lines, roles are lost"
        return [DataFinding("no-template", "warning", what, 1, fix="use the instruct model's tokenizer")]
    try:
        text = renderer.text(_PROBE)
        renderer.check_start(_PROBE, renderer.encode([text])[0])
    except UsageError as error:
        return [DataFinding("template", "error", f"a plain question: {error.what}", 1, fix=error.fix or "")]
    found = []
    if text == renderer.text(_PROBE, generation_prompt=False):
        what = "the chat template adds no generation prompt: nothing tells the model that its turn begins"
        fix = "fine for a model trained so; else add `{% if add_generation_prompt %}…` to the template"
        found.append(DataFinding("no-generation-prompt", "warning", what, 1, fix=fix))
    start = tokenizer.bos_token
    if start and renderer.adds_start and text.startswith(start):
        what = f"both the tokenizer and its chat template put {start} first"
        fix = "rlctl adds none twice; elsewhere encode rendered prompts with add_special_tokens=False"
        found.append(DataFinding("start-token", "info", what, 1, fix=fix))
    return found
