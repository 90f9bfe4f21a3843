"""Spec sections `algorithm`, `actor`, `critic` and `ref`.

They are the advantages and the correction between rollout and training policy, the policy update, the value
model for `gae`, and the reference of the KL.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.algos.rules import AggMode, ResponseUnit
from rlctl.capabilities.teacher.keys import TeacherSpec
from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, KL_ESTIMATORS, LOSS_TERMS, POLICY_LOSSES
from rlctl.run_spec.base import Aliases, KLNames, NullWord, OpenMapping, Registered, Section


def _number_as_text(value: object) -> object:
    """Converts a threshold given as a number to text; text such as `0.6_1.6,2.5` stays unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Threshold = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]


Beta = Annotated[float, Field(ge=0, lt=1)]

#: Prefix of the keys of `RolloutCorrectionSpec`.
CORRECTION = "algorithm.rollout_correction."
#: Name of such a key → names of those that have no effect while it is null.
READ_WITH = {
    "rollout_is": ("rollout_is_threshold", "rollout_is_bound"),
    "rollout_rs": ("rollout_rs_threshold",),
}


class RolloutCorrectionSpec(Section):
    """Importance and rejection sampling (IS, RS) between the rollout and the training policy."""

    dialect: Annotated[Literal["rlctl", "verl"], Aliases({"guide": "rlctl"})] = "rlctl"
    """Whose names of rejection criteria and default bound: those of rlctl (alias `guide`) or of verl 0.9."""
    rollout_is: Annotated[Annotated[str, Registered(CORRECTION_WEIGHTS)] | None, NullWord] = None
    """Importance-sampling weight; null: no weight is applied, but ratios are still measured."""
    rollout_is_params: OpenMapping = Field(default={})
    """Parameters that the weight declares."""
    rollout_is_threshold: Threshold = "2.0"
    """Bounds of the weight: `lo_hi`, or one number c, which means [1/c, c]; with `truncate`, at most c."""
    rollout_is_bound: Annotated[Literal["clip", "truncate", "mask"] | None, NullWord] = None
    """Treatment of weights outside the bounds. `clip`: set to the nearer bound; `truncate`: limited to the
    upper bound; `mask`: set to 0. null: `clip` in dialect rlctl; in verl `truncate` for one number, `mask`
    for two."""
    rollout_is_batch_normalize: bool = True
    """Divide the weights by their mean over the mini-batch (self-normalised importance sampling)."""
    rollout_rs: Annotated[str | None, NullWord] = None
    """Rejection criteria, comma separated; a sample must pass all of them. A criterion can also be
    `path/to/file.py:function`. null: nothing is rejected."""
    rollout_rs_params: OpenMapping = Field(default={})
    """Parameters of the criteria; each is passed to the criteria that declare it."""
    rollout_rs_threshold: Annotated[Threshold | None, NullWord] = None
    """Thresholds of the criteria in `rollout_rs`, comma separated, in the same order."""
    bypass_mode: bool = False
    """Use the rollout log-probs as π_old, without an extra forward pass; false: decoupled mode, in which the
    trainer computes π_old before the updates."""
    loss_type: Annotated[str, Registered(POLICY_LOSSES)] = "ppo_clip"
    """Policy loss. In bypass mode, its ratio, if it has one, is π_θ/π_rollout and acts as the correction."""
    loss_params: OpenMapping = Field(default={})
    """Parameters that the loss declares."""
    loss_denominator: Literal["before_rejection", "after_rejection"] = "before_rejection"
    """Denominator of the loss: all samples (rejected ones have weight 0), or only those not rejected."""
    score_centering: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Subtract the expected score under the sampler from the score of every token (arXiv 2609.20807),
    computed from this many most likely tokens, which the rollout engine reports at each position; the paper
    uses 128. null: off."""
    max_nonfinite_fraction: float = Field(default=0.1, ge=0, le=1)
    """Stop the run if more than this fraction of the sequences has NaN or infinite log-probs."""


class KLCtrlSpec(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Type of the coefficient; `adaptive`: adjusted to keep the KL near `target_kl`."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL penalty in the reward; with `adaptive` its initial value."""
    target_kl: float = Field(default=0.1, gt=0)
    """Target KL of `adaptive`, in nats per token."""
    horizon: int = Field(default=10_000, ge=1)
    """Number of responses over which `adaptive` changes the coefficient by at most 20 %."""


class FilterGroupsSpec(Section):
    """Dynamic sampling: train only on groups with differing rewards; sample more prompts for the rest."""

    enable: bool = False
    """Replace groups with equal rewards by sampling further prompts (dynamic sampling, DAPO)."""
    metric: Annotated[Literal["score"], Aliases({"acc": "score", "seq_reward": "score"})] = "score"
    """Quantity that must differ within a group: the graders' score (verl's aliases: `acc`, `seq_reward`)."""
    max_num_gen_batches: int = Field(default=0, ge=0)
    """Maximum number of sampling rounds per batch, after which groups with equal rewards complete the batch.
    0: sample until the batch is full."""
    curriculum: bool = False
    """Skip prompts at random: each is drawn with the probability that its rewards differ, estimated from its
    last group, and its advantages are divided by that probability."""
    curriculum_floor: float = Field(default=0.2, gt=0, le=1)
    """Minimum of that probability; its inverse is the largest factor of an advantage."""


class AlgorithmSpec(Section):
    """Advantage estimation, and the correction of off-policy data."""

    adv_estimator: Annotated[str, Registered(ADVANTAGE_ESTIMATORS)] = "rloo"
    """Advantage estimator. `gae` trains a critic; `remax` uses a greedy response as the baseline;
    `reinforce_plus_plus` the batch; the others compare the responses of one prompt."""
    adv_params: OpenMapping = Field(default={})
    """Parameters that the estimator declares."""
    unit: ResponseUnit = "episode"
    """What is one response where a formula speaks of a sequence: weights and criteria of whole sequences,
    `seq-mean-…` and GSPO. Episodes of one sequence, such as a single answer, are the same either way."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor (`gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of GAE."""
    gamma_per: Literal["token", "turn"] = "token"
    """Where `gamma` and `lam` apply: at every token, or at the first token of each turn after the first."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the standard deviation of the group."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef × KL to the reference policy from the reward of every token."""
    kl_penalty: Annotated[str, Registered(KL_ESTIMATORS, without="rollout_log_probs"), KLNames] = "k1"
    """Estimator of the KL in the reward: k1 = log π − log π_ref, k2 = ½ k1², k3 = π_ref/π − 1 + k1. Only k1
    has the gradient of the KL there."""
    kl_ctrl: KLCtrlSpec = KLCtrlSpec()
    teacher: TeacherSpec = TeacherSpec()
    filter_groups: FilterGroupsSpec = FilterGroupsSpec()
    rollout_correction: RolloutCorrectionSpec = RolloutCorrectionSpec()

    def estimator_needs(self, what: str) -> bool:
        """Whether the advantage estimator reads the batch field `what`, e.g. `values` or `group_ids`."""
        return what in ADVANTAGE_ESTIMATORS.part(self.adv_estimator).needs


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
    terms: list[Annotated[str, Registered(LOSS_TERMS)]] = Field(default=[])
    """Further terms of the loss: functions of your files, `file.py:function`, of the kept tokens."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(default=0.001, ge=0)
    """Coefficient of the KL in the loss."""
    kl_loss_type: Annotated[str, Registered(KL_ESTIMATORS), KLNames] = "k3"
    """Estimator of the KL in the loss; `unbiased` is k3 weighted by the token's π_θ/π_rollout
    (DeepSeek-V3.2), `sequence` is k3 weighted by the product of these ratios up to the token."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts (Switch Transformer), over the response
    tokens of the mini-batch. 0: none, as in verl; TRL takes that of the model's config, often 0.001."""
    routing_replay: bool = False
    """Mixtures of experts: π_θ and π_old compute each token with the experts that computed it in the rollout
    engine (R3, arXiv 2510.11370); their weights are the trained router's. `vllm` reports them on GPUs."""
    loss_agg_mode: AggMode = "token-mean"
    """Aggregation of token losses over the mini-batch on all ranks: mean over tokens, or mean over sequences
    of each sequence's sum, mean, or sum divided by `data.max_response_length` (`…-sum-norm`)."""
    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW."""
    lr_ess_scaling: bool = False
    """Multiply the rate of each update by √(effective sample size of raw weights), as VCPO; experimental."""
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
    """Directory or hub id of the model that initialises the critic; null: the policy's model."""
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
    """Token budget per forward pass on one rank, instead of sequences; null: that of the actor."""
    cliprange_value: float = Field(default=0.5, gt=0)
    """PPO's value clip: a value that has moved further than this towards its return gets no gradient."""
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
    """Directory or hub id of the reference; null: the initial policy (with LoRA its base, not copied)."""
