"""A term of the loss in one file, with a column that it reads and a metric: do not unlearn what was easy.

    rlctl train --preset rloo-seq-is actor.terms=[examples/custom_term.py:remember]

The term penalises a token for becoming less likely than it was when it was sampled, in proportion to that
probability. The rollouts have its column; its metrics are `actor/terms/remember` and
`actor/terms/remember/forgotten`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.parts import LOSS_TERMS, KeptTokens, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENT = 0.1


def confidence(batch: TokenBatch) -> Tensor:
    """Probability of the token when it was sampled."""
    return batch.rollout_log_probs.exp()


@LOSS_TERMS.register(
    label="penalty for forgetting confident tokens",
    formula="0.1 · π_rollout · max(log π_rollout − log π_θ, 0)",
    source="an example",
    columns={"confidence": confidence},
    metrics={"forgotten": "share of the tokens that are less likely than when they were sampled"},
    experimental=True,
)
def remember(tokens: KeptTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """(m,) value per kept token, with gradient through `tokens.log_probs`, and the metrics per token."""
    loss = (tokens.column("rollout_log_probs") - tokens.log_probs).clamp(min=0.0)
    values = COEFFICIENT * tokens.column("confidence") * loss
    return values, {"forgotten": (loss.detach() > 0.0).float()}
