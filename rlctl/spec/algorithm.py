"""`algorithm`: advantages and the correction between rollout and training policy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlctl.spec.base import NullWord, Section


def _number_as_text(value: object) -> object:
    """Thresholds may be written as a number or as text such as `0.6_1.6,2.5`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Threshold = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | float)]


class RolloutCorrectionSpec(Section):
    """Importance and rejection sampling (IS, RS) between the sampling and the trained policy."""

    dialect: Literal["guide", "verl"] = "guide"
    """Whose meaning the RS names and the default bound have: the reference guide's, or verl 0.9's."""
    rollout_is: Annotated[Literal["token", "sequence", "geometric"] | None, NullWord] = "sequence"
    """Level of the IS weight; null: none is applied (it is still measured)."""
    rollout_is_threshold: Threshold = "2.0"
    """One number c, or `lo_hi`. Under `clip` one number means [1/c, c]."""
    rollout_is_bound: Annotated[Literal["clip", "truncate", "mask"] | None, NullWord] = None
    """Outside the threshold; null: `clip` (guide), `truncate` for one number and `mask` for two (verl)."""
    rollout_is_batch_normalize: bool = True
    """Divide the weights by their mean over the mini-batch (self-normalised IS)."""
    rollout_rs: Annotated[str | None, NullWord] = None
    """Rejection criteria, comma separated; all must pass. null: reject nothing."""
    rollout_rs_threshold: Annotated[Threshold | None, NullWord] = None
    """One threshold per criterion, comma separated, in the same order."""
    bypass_mode: bool = True
    """Take the rollout's own log-probs for π_old (no extra pass); false: decoupled."""
    loss_type: Literal["reinforce", "ppo_clip"] = "reinforce"
    """Policy loss. With `bypass_mode` and `ppo_clip` the PPO ratio is itself the correction."""
    loss_denominator: Literal["before_rejection", "after_rejection"] = "before_rejection"
    """Whether rejected samples count in the loss's denominator (weight zero) or not (mean over survivors)."""
    max_nonfinite_fraction: float = Field(default=0.1, ge=0, le=1)
    """Stop when more than this fraction of a batch's sequences has NaN or infinite log-probs."""


class AlgorithmSpec(Section):
    """From rewards to advantages, and what is done about off-policyness."""

    adv_estimator: Literal["gae", "grpo", "rloo"] = "rloo"
    """`rloo` and `grpo` compare the responses of one prompt; `gae` needs a critic."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token (`gae`)."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's λ."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide GRPO's advantages by the group's standard deviation."""
    rollout_correction: RolloutCorrectionSpec = RolloutCorrectionSpec()
