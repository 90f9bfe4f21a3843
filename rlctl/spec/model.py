"""`model`: which policy is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from rlctl.spec.base import NullWord, Section

#: `model.path` (and `data.train_files`) of the built-in tiny model and its addition task.
EMBEDDED = "embedded"


class ModelSpec(Section):
    """The policy to train."""

    path: str = EMBEDDED
    """Hugging Face directory or hub id of a causal language model; `embedded` is a tiny model built here."""
    revision: Annotated[str | None, NullWord] = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run Python code shipped with the model. Off unless you trust its author."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of trainer and Hugging Face rollouts."""
