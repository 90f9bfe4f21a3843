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
    """Sequences per forward pass on one rank. Affects memory and speed, not the result."""
    ppo_max_token_len_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Token budget per forward pass on one rank, instead of a number of sequences. Responses of similar
    length are batched together, which reduces padding. null: no token budget."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    clip_ratio: float = Field(default=0.2, gt=0, lt=1)
    """PPO clip: π_θ/π_old is clipped to [1 − clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Annotated[float | None, NullWord] = Field(default=None, gt=0, lt=1)
    """Lower side of the clip, to 1 − clip_ratio_low; null: `clip_ratio`."""
    clip_ratio_high: Annotated[float | None, NullWord] = Field(default=None, gt=0)
    """Upper side of the clip, to 1 + clip_ratio_high ("clip-higher"); null: `clip_ratio`."""
    clip_ratio_c: Annotated[float | None, NullWord] = Field(default=None, gt=1)
    """Dual clip: upper bound of π_θ/π_old for negative advantages (3.0 is usual); null: none.
    For `dppo`: upper bound of every ratio."""
    tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: sharpness of the gate for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: sharpness of the gate for negative advantages."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """`dppo`: divergence that `clip_ratio` bounds, total variation or KL (both of the sampled token)."""
    entropy_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus: entropy_coeff × mean entropy is subtracted from the loss."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL in the loss."""
    kl_loss_type: Annotated[str, Registered(KL_ESTIMATORS), KLNames] = "k3"
    """Estimator of the KL in the loss; `unbiased` is k3 weighted by the token's π_θ/π_rollout
    (DeepSeek-V3.2), `sequence` is k3 weighted by the product of these ratios up to the token."""
    loss_agg_mode: AggMode = "token-mean"
    """Aggregation of token losses over the mini-batch on all ranks: mean over tokens, or mean over sequences
    of each sequence's sum, mean, or sum divided by `data.max_response_length` (`…-sum-norm`)."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW."""
    lr_ess_scaling: bool = False
    """Multiply the learning rate of each update by √(effective sample size of the raw weights), as in VCPO;
    experimental."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or linear or cosine decay to 0 at the last step."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warm-up."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0: no clipping."""


class CriticSpec(Section):
    """Model, loss and optimizer of the critic, which has a separate training engine."""

    enable: Annotated[bool | None, NullWord] = None
    """Whether a critic is trained; null: if `algorithm.adv_estimator` needs values, as `gae` does."""
    path: Annotated[str | None, NullWord] = None
    """Directory or hub id of the causal language model that initialises the critic; null: the policy's
    model."""
    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate of the critic; the schedule is that of `actor.lr_scheduler_type`."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of linear warm-up."""
    ppo_epochs: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Passes over each batch; null: `actor.ppo_epochs`."""
    ppo_mini_batch_size: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Prompts per optimizer step, over all ranks; null: that of the actor."""
    ppo_micro_batch_size_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Sequences per forward pass on one rank; null: that of the actor."""
    ppo_max_token_len_per_gpu: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Token budget per forward pass on one rank, instead of a number of sequences; null: that of the
    actor."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """PPO's value clip: a value that has moved by more than this towards its return gets no further
    gradient."""
    loss_agg_mode: AggMode = "token-mean"
    """Aggregation of token losses to one number, as in `actor.loss_agg_mode`."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay of AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Maximum global gradient norm; 0: no clipping."""


class RefSpec(Section):
    """The reference policy; built only with `use_kl_in_reward` or `use_kl_loss`."""

    path: Annotated[str | None, NullWord] = None
    """Directory or hub id of the reference; null: the initial policy (with LoRA its base model, without a
    copy)."""
