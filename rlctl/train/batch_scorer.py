"""Runs models over a batch before the updates, in forward passes without gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rlctl.batch import ModelInputs, TokenBatch
from rlctl.errors import RunFailure
from rlctl.train.deal import in_passes

if TYPE_CHECKING:
    from rlctl.engine.ranks import Ranks
    from rlctl.run_spec.run_spec import RunSpec


@dataclass(frozen=True)
class BatchScorer:
    """Scores batches of a run.

    Attributes:
        ranks: those over which sums count each token once.
        timer: records the seconds of a phase.
    """

    spec: RunSpec
    ranks: Ranks
    timer: Callable[[str], AbstractContextManager[None]]

    def score(
        self, phase: str, model: Callable[[ModelInputs], Tensor], batch: TokenBatch, failure: RunFailure
    ) -> Tensor:
        """(M, …): what `model` computes, timed as `phase`.

        Raises:
            RunFailure: `failure`, if a number is NaN or infinite.
        """
        spec = self.spec
        sizes = spec.actor.ppo_micro_batch_size_per_gpu, spec.pass_tokens
        if phase == "values":
            sizes = spec.critic_micro_batch_size, spec.critic_max_token_len
        with self.timer(phase):
            outputs = in_passes(model, batch, *sizes, self.ranks)
        if not outputs.isfinite().all():
            raise failure
        return outputs
