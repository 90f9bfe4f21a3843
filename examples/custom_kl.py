"""A KL estimator: actor.use_kl_loss=true actor.kl_loss_type=examples/custom_kl.py:half_square"""

from torch import Tensor

from rlctl.registry import KL_ESTIMATORS


@KL_ESTIMATORS.register(label="Half squared log-ratio", formula="½ (log π_θ − log π_ref)²")
def half_square(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    """(B, T), with gradient through `log_probs`; values outside the mask are ignored."""
    return 0.5 * (log_probs - ref_log_probs).square()
