"""The reference policy: a model that computes log-probs and is never trained."""

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
    """A `ReferencePolicy` with separate weights.

    Under ZeRO-3 its weights are partitioned among the ranks like the actor's; otherwise every rank holds
    all of them.

    Args:
        model: Hugging Face causal language model, modified in place; under ZeRO-3 it may come from
            `PartitionedLoading`.
        ranks: the processes of the run.
        zero_stage: 0–3, as for the actor.
        dtype: dtype of the forward pass.
        temperature: sampling temperature, at which log-probs are computed.
        sequence: this rank's sequence-parallel group; None: each rank processes its own rows.
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
        """See `ReferencePolicy.log_probs`; the caller splits the batch into micro-batches."""
        return policy_output(self._policy, inputs).log_probs
