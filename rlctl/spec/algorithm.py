"""Spec section `algorithm`: advantages, and the correction between rollout and training policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.registry import ADVANTAGE_ESTIMATORS, CORRECTION_WEIGHTS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.base import NullWord, OpenMapping, Section
from rlctl.spec.parts import Registered


def _number_as_text(value: object) -> object:
    """Converts a threshold given as a number to text; text such as `0.6_1.6,2.5` stays unchanged."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _kl_name(value: object) -> object:
    """Translates verl's aliases of the KL estimators."""
    return (
        {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(value, value) if isinstance(value, str) else value
    )


def _dialect_name(value: object) -> object:
    """Translates the earlier name of dialect `rlctl`, which older specs and logs contain."""
    return "rlctl" if value == "guide" else value


KLNames = BeforeValidator(_kl_name)
Threshold = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]


class RolloutCorrectionSpec(Section):
    """Importance and rejection sampling (IS, RS) between the rollout and the training policy."""

    dialect: Annotated[Literal["rlctl", "verl"], BeforeValidator(_dialect_name)] = "rlctl"
    """Which meaning the RS names and the default bound have: rlctl's (`guide` is an alias), or verl 0.9's."""
    rollout_is: Annotated[Annotated[str, Registered(CORRECTION_WEIGHTS)] | None, NullWord] = "sequence"
    """The IS weight; null: no weight is applied (it is still measured)."""
    rollout_is_params: OpenMapping = Field(default={})
    """Parameters of the weight, if it has its own."""
    rollout_is_threshold: Threshold = "2.0"
    """One number c, or `lo_hi`. Under `clip` one number means [1/c, c]."""
    rollout_is_bound: Annotated[Literal["clip", "truncate", "mask"] | None, NullWord] = None
    """Outside the threshold; null: `clip` (rlctl), `truncate` for one number and `mask` for two (verl)."""
    rollout_is_batch_normalize: bool = True
    """Divide the weights by their mean over the mini-batch (self-normalised IS)."""
    rollout_rs: Annotated[str | None, NullWord] = None
    """Rejection criteria, comma separated; all must pass. null: reject nothing. One can be
    `path/to/file.py:function`."""
    rollout_rs_params: OpenMapping = Field(default={})
    """Parameters of the criteria that have their own; each goes to those that declare it."""
    rollout_rs_threshold: Annotated[Threshold | None, NullWord] = None
    """One threshold per criterion, comma separated, in the same order."""
    bypass_mode: bool = True
    """Use the rollout's log-probs as π_old (no extra pass); false: decoupled."""
    loss_type: Annotated[str, Registered(POLICY_LOSSES)] = "reinforce"
    """Policy loss. In `bypass_mode` the ratio of a loss that has one is the correction, π_θ/π_rollout."""
    loss_params: OpenMapping = Field(default={})
    """Parameters of the loss, if it has its own."""
    loss_denominator: Literal["before_rejection", "after_rejection"] = "before_rejection"
    """Whether rejected samples count in the loss's denominator (weight zero) or not (mean over survivors)."""
    measure_grad_error: bool = False
    """Log `rollout_corr/grad_error`: how far the gradient is from that of the expected reward, estimated with
    an interval from sketches of the output head's gradients."""
    max_nonfinite_fraction: float = Field(default=0.1, ge=0, le=1)
    """Stop when more than this fraction of a batch's sequences has NaN or infinite log-probs."""


class KLCtrlSpec(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` adjusts the coefficient to keep the KL near `target_kl`."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Coefficient; the initial one of `adaptive`."""
    target_kl: float = Field(default=0.1, gt=0)
    """Target of `adaptive`, in nats per token."""
    horizon: int = Field(default=10_000, ge=1)
    """Responses over which `adaptive` may change the coefficient by at most a fifth."""


def _score_name(value: object) -> object:
    """Translates verl's aliases of the grader's score."""
    return {"acc": "score", "seq_reward": "score"}.get(value, value) if isinstance(value, str) else value


class FilterGroupsSpec(Section):
    """Dynamic sampling: train only on groups with differing rewards; sample more prompts for the rest."""

    enable: bool = False
    """Sample further prompts in place of groups whose rewards are all equal (DAPO)."""
    metric: Annotated[Literal["score"], BeforeValidator(_score_name)] = "score"
    """What must differ within a group: the graders' score (`acc` and `seq_reward` are verl's aliases)."""
    max_num_gen_batches: int = Field(default=0, ge=0)
    """Rounds of sampling per batch, at most; then dead groups fill it up. 0: until there are enough."""
    curriculum: bool = False
    """Draw a prompt at its turn with the probability that rewards will differ, by its last group; then divide
    its advantages by that probability."""
    curriculum_floor: float = Field(default=0.2, gt=0, le=1)
    """Smallest such probability: the largest factor of an advantage is its inverse."""


class AlgorithmSpec(Section):
    """Advantage estimation, and the correction of off-policy data."""

    adv_estimator: Annotated[str, Registered(ADVANTAGE_ESTIMATORS)] = "rloo"
    """`gae` trains a critic; `remax` compares with a greedy response; `reinforce_plus_plus` with the batch;
    the others compare the responses of one prompt."""
    adv_params: OpenMapping = Field(default={})
    """Parameters of the estimator, if it has its own."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token (`gae`, `reinforce_plus_plus`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef × KL to the reference policy from every token's reward."""
    kl_penalty: Annotated[str, Registered(KL_ESTIMATORS), KLNames] = "k1"
    """Estimator of that KL: k1 = log π − log π_ref, k2 = ½ k1², k3 = π_ref/π − 1 + k1."""
    kl_ctrl: KLCtrlSpec = KLCtrlSpec()
    filter_groups: FilterGroupsSpec = FilterGroupsSpec()
    rollout_correction: RolloutCorrectionSpec = RolloutCorrectionSpec()

    def estimator_needs(self, what: str) -> bool:
        """Whether the advantage estimator reads the batch field `what`, e.g. `values` or `group_ids`."""
        return what in ADVANTAGE_ESTIMATORS.part(self.adv_estimator).needs
