"""Spec section `algorithm`: advantages, and the correction between rollout and training policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.base import NullWord, OpenMapping, Section, aliases
from rlctl.spec.parts import Registered


def _number_as_text(value: object) -> object:
    """Converts a threshold given as a number to text; text such as `0.6_1.6,2.5` stays unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


#: verl's names of the KL estimators.
KLNames = aliases({"kl": "k1", "mse": "k2", "low_var_kl": "k3"})
Threshold = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]

#: Prefix of the keys of `RolloutCorrectionSpec`.
CORRECTION = "algorithm.rollout_correction."


class RolloutCorrectionSpec(Section):
    """Importance and rejection sampling (IS, RS) between the rollout and the training policy."""

    dialect: Annotated[Literal["rlctl", "verl"], aliases({"guide": "rlctl"})] = "rlctl"
    """Convention for the names of rejection criteria and the default bound: that of rlctl (alias `guide`) or
    of verl 0.9."""
    rollout_is: Annotated[Annotated[str, Registered(CORRECTION_WEIGHTS)] | None, NullWord] = "sequence"
    """Importance-sampling weight; null: no weight is applied, but ratios are still measured."""
    rollout_is_params: OpenMapping = Field(default={})
    """Parameters that the weight declares."""
    rollout_is_threshold: Threshold = "2.0"
    """Bounds of the weight: one number c or `lo_hi`. One number means [1/c, c]; with `truncate`, at most
    c."""
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
    bypass_mode: bool = True
    """Use the rollout log-probs as π_old, without an extra forward pass; false: decoupled mode, in which the
    trainer computes π_old before the updates."""
    loss_type: Annotated[str, Registered(POLICY_LOSSES)] = "reinforce"
    """Policy loss. In bypass mode, the ratio of a loss with a ratio is π_θ/π_rollout and acts as the
    correction."""
    loss_params: OpenMapping = Field(default={})
    """Parameters that the loss declares."""
    loss_denominator: Literal["before_rejection", "after_rejection"] = "before_rejection"
    """Denominator of the loss: all samples (rejected ones have weight 0), or only those that were not
    rejected."""
    score_centering: Annotated[int | None, NullWord] = Field(default=None, ge=1)
    """Subtract the expected score under the sampler from the score of every token (arXiv 2609.20807),
    computed from this many most likely tokens, which the rollout engine reports at each position; the paper
    uses 128. null: off."""
    auto: bool = False
    """Choose the weight of every batch by the estimated error of the gradient: none, or per token or per
    sequence, at most 2 or 5. Also multiplies the learning rate by the squared cosine between the expected and
    the true gradient, and discards responses sampled ahead if it is below ½. Needs `rollout_is: null`. In our
    study it was not better than the best fixed weight."""
    measure_grad_error: bool = False
    """Log `rollout_corr/grad_error`, the deviation of the gradient from that of the expected reward,
    estimated with an interval from sketches of the output head's gradients."""
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
    metric: Annotated[Literal["score"], aliases({"acc": "score", "seq_reward": "score"})] = "score"
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
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token (`gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the standard deviation of the group."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef × KL to the reference policy from the reward of every token."""
    kl_penalty: Annotated[str, Registered(KL_ESTIMATORS, without="rollout_log_probs"), KLNames] = "k1"
    """Estimator of the KL in the reward: k1 = log π − log π_ref, k2 = ½ k1², k3 = π_ref/π − 1 + k1."""
    kl_ctrl: KLCtrlSpec = KLCtrlSpec()
    filter_groups: FilterGroupsSpec = FilterGroupsSpec()
    rollout_correction: RolloutCorrectionSpec = RolloutCorrectionSpec()

    def estimator_needs(self, what: str) -> bool:
        """Whether the advantage estimator reads the batch field `what`, e.g. `values` or `group_ids`."""
        return what in ADVANTAGE_ESTIMATORS.part(self.adv_estimator).needs
