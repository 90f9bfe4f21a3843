"""`rollout`: how responses are sampled."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.spec.base import NullWord, Section


class ValKwargs(Section):
    """Sampling of responses to validation prompts."""

    n: int = Field(default=1, ge=1)
    """Responses per prompt; above 1 pass@k and maj@n are logged too."""
    temperature: float = Field(default=0.0, ge=0)
    """Softmax temperature; 0: the likeliest token, which takes n = 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""


class RolloutSpec(Section):
    """Sampling of responses."""

    name: Literal["hf"] = "hf"
    """Engine: `hf` is Hugging Face generation inside the trainer's process."""
    n: int = Field(default=8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; log-probs of rollout and trainer are both taken at it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 every ratio is biased by the mass cut off."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from the k likeliest tokens; -1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens below this share of the likeliest one's probability."""
    max_num_seqs: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Sequences generated at once on one rank; null: all of the batch."""
    dtype: Annotated[Literal["fp32", "bf16", "int8"] | None, NullWord] = None
    """Precision of the sampling copy; null: `engine.dtype`. `int8`: weights rounded to 8 bits per row."""
    staleness: int = Field(default=0, ge=0)
    """Train every batch on responses sampled this many batches ago, to study off-policyness."""
    val_kwargs: ValKwargs = ValKwargs()
