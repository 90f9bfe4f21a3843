"""Terms of the actor's loss beside the policy gradient: values per kept token, sums and metrics.

The loss is Σ_t c_t · (policy gradient_t + Σ_terms coefficient · value_t) over the kept tokens t, with one
coefficient c_t per token for all terms. A term is defined where its capability is (`rlctl.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlctl.algos.segments import HostSums, Segments, Sums
from rlctl.errors import known

if TYPE_CHECKING:
    from rlctl.batch import TokenBatch, TokenLists
    from rlctl.engine.protocol import PolicyOutput
    from rlctl.engine.ranks import Ranks


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """A micro-batch as a term sees it: of its M sampled tokens those m that the correction kept.

    Attributes:
        batch: the micro-batch, of M sampled tokens.
        output: of the policy for the M tokens.
        keep: (M,) bool, the kept tokens.
        unit: the m kept tokens of each response.
        coefficients: (m,) c_t of the loss.
        log_probs: (m,) log π_θ, with gradient.
        weights: (m,) normalised importance weights; None: none multiply the loss.
        mean_weight: divisor that normalised them; 1.0 if it is applied to the gradient afterwards.
        num_all_tokens: sampled tokens of the mini-batch over all ranks, rejected ones included.
    """

    batch: TokenBatch
    output: PolicyOutput
    keep: Tensor
    unit: Segments
    coefficients: Tensor
    log_probs: Tensor
    weights: Tensor | None
    mean_weight: float
    num_all_tokens: float

    def column(self, name: str) -> Tensor:
        """(m, …): a column of the batch at the kept tokens."""
        values: Tensor = self.batch.column(name)[self.keep]
        return values

    def lists(self, name: str) -> TokenLists:
        """(m): a column of lists at the kept tokens."""
        values: TokenLists = self.batch.column(name)[self.keep]
        return values

    def forward(self, name: str) -> Tensor:
        """(m, …): a field of the policy's output at the kept tokens, with gradient if it was asked for."""
        values: Tensor = known(getattr(self.output, name))[self.keep]
        return values

    def share_of(self, values: Tensor, *, is_weighted: bool = False) -> Tensor:
        """() Σ_t c_t · values_t: their share of the loss.

        `is_weighted`: times the importance weights, if weights multiply the loss.
        """
        if is_weighted and self.weights is not None:
            values = values * self.weights
        return (self.coefficients * values).sum()


@dataclass(frozen=True)
class Term:
    """Base of the terms.

    Attributes:
        shares: names of those of its sums that are shares of the loss: they scale with its denominators.
        counts: names of its other sums.
        asks: options of the policy's forward pass, see `TrainEngine.policy`.
        scales_with_weights: whether it is proportional to the importance weights, as the policy gradient is,
            so that their mean may also divide its gradient after all passes. Otherwise the mean must be known
            before; a term may still multiply by `KeptTokens.weights`, which are divided by it already.
        vanishes_without_advantage: whether a token with advantage 0 has no gradient.
        kl_estimator: the estimator that it calls, named if it returns NaN; None: it calls none.
        reads_mini_batch: whether `of_mini_batch` must be called, after a pass over the whole mini-batch.
    """

    shares: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[Mapping[str, bool]] = {}
    scales_with_weights: ClassVar[bool] = False
    vanishes_without_advantage: ClassVar[bool] = False
    reads_mini_batch: ClassVar[bool] = False

    @property
    def kl_estimator(self) -> str | None:
        """See the class."""
        return None

    def of_mini_batch(self, joined: Callable[[str], Tensor], ranks: Ranks) -> Term:
        """The term with what it needs to know of a whole mini-batch.

        Args:
            joined: field of `PolicyOutput` → its values (M, …) for this rank's tokens, without gradient.
        """
        raise NotImplementedError

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """() this micro-batch's share of the loss, with gradient, and its `shares` and `counts`."""
        raise NotImplementedError

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """Metrics of a batch, from the sums over its `num_updates` updates, those of the loss included."""
        raise NotImplementedError


def total(values: Tensor) -> Tensor:
    """() the sum of the finite values, without gradient."""
    values = values.detach()
    return torch.where(values.isfinite(), values, 0.0).sum()


def asked_of_policy(terms: tuple[Term, ...]) -> dict[str, Any]:
    """Options of the policy's forward pass that some term asks for."""
    asked: dict[str, Any] = {}
    for term in terms:
        asked |= term.asks
    return asked
