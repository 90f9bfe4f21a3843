"""`data`: prompts in, and how many at a time."""

from __future__ import annotations

from pydantic import Field

from rlctl.spec.base import Section, StrList


class DataSpec(Section):
    """Training and validation prompts (Parquet in verl's row schema)."""

    train_files: StrList = Field(default=[])
    """Parquet files, directories, or patterns such as `data/train-*.parquet`; empty together with
    `model.path: embedded` means the built-in task."""
    val_files: StrList = Field(default=[])
    """Validation prompts, same schema; empty: no validation (the built-in task brings its own)."""
    train_batch_size: int = Field(default=128, ge=1)
    """Prompts per batch; each is answered `rollout.n` times."""
    max_prompt_length: int = Field(default=512, ge=1)
    """Tokens; what happens to longer prompts is said by `filter_overlong_prompts`."""
    max_response_length: int = Field(default=512, ge=1)
    """Tokens sampled at most."""
    filter_overlong_prompts: bool = True
    """Leave out prompts over `max_prompt_length` (counted and shown); false: refuse to start."""
    shuffle: bool = True
    """Reshuffle the prompts every epoch, from `trainer.seed`."""
