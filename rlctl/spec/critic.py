"""`critic`: the value model that `gae` needs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlctl.spec.actor import AggMode, Beta
from rlctl.spec.base import NullWord, Section


class CriticSpec(Section):
    """Model, loss and optimizer of the critic, an engine of its own."""

    enable: Annotated[bool | None, NullWord] = None
    """null: trained exactly when `algorithm.adv_estimator` is `gae`."""
    path: Annotated[str | None, NullWord] = None
    """Causal language model whose body the critic starts from; null: the policy's own."""
    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate; its course over the run is `actor.lr_scheduler_type`'s."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    ppo_epochs: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Passes over each batch; null: `actor.ppo_epochs`."""
    ppo_mini_batch_size: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Prompts per optimizer step, over all ranks; null: the actor's."""
    ppo_micro_batch_size_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Sequences per forward pass on one rank; null: the actor's."""
    ppo_max_token_len_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Tokens per forward pass on one rank, instead of a number of sequences; null: the actor's."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """A new value may differ from the old one by this much before the loss stops rewarding it."""
    loss_agg_mode: AggMode = "token-mean"
    """How token losses become one number."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
