"""The reference policy: a model that answers with log-probs and never learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlctl.engine.deepspeed import keeping_buffers, sharded
from rlctl.engine.log_probs import PolicyModule, policy_output

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs
    from rlctl.engine.ranks import Ranks
    from rlctl.engine.sequence_parallel import SequenceParallel


class FrozenPolicy:
    """A `ReferencePolicy` with weights of its own.

    Under ZeRO-3 its weights are cut up among the ranks like the actor's; otherwise every rank holds
    all of them.

    Args:
        model: Hugging Face causal language model, which is kept and changed; under ZeRO-3 perhaps read by a
            `PartitionedLoading`.
        ranks: the processes of the run.
        zero_stage: 0–3, the actor's.
        dtype: arithmetic of the forward pass.
        temperature: sampling temperature, at which log-probs are taken.
        sequence: ranks that run each row together; None: each rank runs its own rows.
    """

    def __init__(
        self,
        model: Any,
        ranks: Ranks,
        *,
        zero_stage: int,
        dtype: torch.dtype,
        temperature: float,
        sequence: SequenceParallel | None = None,
    ) -> None:
        is_sharded = zero_stage == 3
        model.requires_grad_(False).eval()
        with keeping_buffers(model):
            placed = model.to(device=ranks.device, dtype=dtype)
            whole = not is_sharded
            policy = PolicyModule(placed, temperature, share_prompts=whole, probe=whole, sequence=sequence)
            policy.eval()
            self._policy: Callable[..., tuple[Tensor, ...]] = sharded(policy, dtype) if is_sharded else policy

    @torch.no_grad()
    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`; the caller cuts the batch into micro-batches."""
        return policy_output(self._policy, inputs).log_probs
