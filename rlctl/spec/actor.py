"""Spec sections `actor`, `critic` and `ref`: policy update, value model for `gae`, reference of the KL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlctl.registry import KL_ESTIMATORS
from rlctl.spec.algorithm import KLNames
from rlctl.spec.base import NullWord, Section
from rlctl.spec.parts import Registered

AggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

Beta = Annotated[float, Field(ge=0, lt=1)]


class ActorSpec(Section):
    """Loss and optimizer of the policy."""

    ppo_mini_batch_size: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Prompts per optimizer step, over all ranks; null: the whole batch."""
    ppo_micro_batch_size_per_gpu: int = Field(default=8, ge=1)
    """Sequences per forward pass on one rank. Changes memory and speed, never the result."""
    ppo_max_token_len_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Tokens per forward pass on one rank, instead of a number of sequences. Responses of similar length are
    batched together, which reduces padding. null: off."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    """PPO clip: π_θ/π_old is kept in [1 − clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Lower half of the clip; null: `clip_ratio`."""
    clip_ratio_high: Annotated[float | None, NullWord] = Field(default=None, gt=0)
    """Upper half of the clip ("clip-higher"); null: `clip_ratio`."""
    clip_ratio_c: Annotated[float | None, NullWord] = Field(default=None, gt=1)
    """Dual clip: bounds π_θ/π_old where the advantage is negative (3.0 is usual); null: none.
    For `dppo` the bound of every ratio."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: sharpness of the gate for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: sharpness of the gate for negative advantages."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: the divergence that `clip_ratio` bounds, total variation or KL (of the sampled token)."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Entropy bonus: the loss gets −entropy_coeff × mean entropy."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Its coefficient."""
    kl_loss_type: Annotated[str, Registered(KL_ESTIMATORS), KLNames] = "k3"
    """Estimator of that KL; `unbiased` is k3 weighted by π_θ/π_rollout of the token (DeepSeek-V3.2),
    `sequence` by the product up to the token."""
    loss_agg_mode: AggMode = "token-mean"
    """How token losses become one number; denominators count the whole mini-batch on all ranks."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW."""
    lr_ess_scaling: bool = False
    """Multiply each update's rate by √(effective sample size of the raw weights): VCPO; experimental."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or decay to zero at the last step."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""


class CriticSpec(Section):
    """Model, loss and optimizer of the critic, which has a separate training engine."""

    enable: Annotated[bool | None, NullWord] = None
    """null: trained exactly when `algorithm.adv_estimator` is `gae`."""
    path: Annotated[str | None, NullWord] = None
    """Causal language model that initialises the critic; null: the policy's."""
    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate; the schedule is `actor.lr_scheduler_type`."""
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
    """PPO's value clip: the loss bounds the change of a value by this."""
    loss_agg_mode: AggMode = "token-mean"
    """How token losses become one number."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""


class RefSpec(Section):
    """The reference policy; built only with `use_kl_in_reward` or `use_kl_loss`."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id; null: the initial policy (under LoRA its base model, without a second copy)."""
