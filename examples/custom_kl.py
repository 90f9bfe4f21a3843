"""A KL estimator: actor.use_kl_loss=true actor.kl_loss_type=examples/custom_kl.py:half_square"""

from torch import Tensor

from rlctl.parts import KL_ESTIMATORS, Segments


@KL_ESTIMATORS.register(label="Half squared log-ratio", formula="½ (log π_θ − log π_ref)²")
def half_square(
    log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor, unit: Segments
) -> Tensor:
    """(m,), one value per token of the loss, with gradient through `log_probs`."""
    return 0.5 * (log_probs - ref_log_probs).square()
