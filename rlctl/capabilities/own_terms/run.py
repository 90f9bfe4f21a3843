"""Terms of the loss from users' files: `actor.terms`, with the columns that they read and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rlctl.algos.segments import ratio
from rlctl.batch import declare_column
from rlctl.errors import RunFailure, UsageError
from rlctl.registry import LOSS_TERMS, Part
from rlctl.train.capability import Capability
from rlctl.train.terms import KeptTokens, Term, total

if TYPE_CHECKING:
    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.batch import TokenBatch
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.batch_scorer import BatchScorer

_KEY = "actor.terms"


@dataclass(frozen=True)
class OwnTerm(Term):
    """A registered term; its name in metrics is that of its function."""

    part: Part

    @property
    def label(self) -> str:
        """Name of the function."""
        return self.part.name.rpartition(":")[2]

    @property
    def counts(self) -> tuple[str, ...]:  # type: ignore[override]
        """Sums of the value and of every metric, and the number of tokens."""
        metrics = (f"{self._sum}/{name}" for name in self.part.metrics)
        return (self._sum, *metrics, f"{self._sum}.tokens")

    @property
    def _sum(self) -> str:
        return f"actor/terms/{self.label}"

    @property
    def asks(self) -> Mapping[str, bool]:  # type: ignore[override]
        """The entropy with gradient, if the term needs it."""
        return {"entropy_grad": True} if "entropy" in self.part.needs else {}

    @property
    def vanishes_without_advantage(self) -> bool:  # type: ignore[override]
        """As registered."""
        return self.part.vanishes_without_advantage

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`.

        Raises:
            RunFailure: the function returns no tensor with one value per kept token, none with gradient, or
                other metrics than it is registered with.
        """
        returned = self.part.function(tokens)
        values, metrics = returned if isinstance(returned, tuple) else (returned, {})
        shape = tuple(tokens.log_probs.shape)
        LOSS_TERMS.check_returned(self.part.name, values, shape)
        LOSS_TERMS.check_gradient(self.part.name, values, tokens.log_probs, "tokens.log_probs")
        if set(metrics) != set(self.part.metrics):
            raise RunFailure(
                f"loss term {self.part.name} returned the metrics {sorted(metrics)}",
                where=_KEY,
                fix=f"return those that it is registered with: {sorted(self.part.metrics)}",
            )
        sums = {self._sum: total(values), f"{self._sum}.tokens": tokens.keep.sum()}
        for name, column in metrics.items():
            LOSS_TERMS.check_returned(f"{self.part.name} ({name})", column, shape)
            sums[f"{self._sum}/{name}"] = total(column)
        return tokens.share_of(values), sums

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """The mean value, and the mean of every metric, over the kept tokens."""
        count = sums[f"{self._sum}.tokens"]
        return {name: ratio(sums[name], count) for name in self.counts if not name.endswith(".tokens")}


class OwnTerms(Capability):
    """See the module.

    Raises:
        UsageError: a column has the name of another one.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._parts = [LOSS_TERMS.part(name) for name in spec.actor.terms]
        for term in self._parts:
            for name, function in term.columns.items():
                description = (function.__doc__ or f"column of {term.name}").strip().partition("\n")[0]
                try:
                    declare_column(name, description)
                except ValueError as error:
                    raise UsageError(str(error), where=f"{_KEY}: {term.name}") from error

    @property
    def dumped(self) -> tuple[str, ...]:
        """The columns of all terms."""
        return tuple(name for term in self._parts for name in term.columns)

    def scored(self, scorer: BatchScorer, batch: TokenBatch, unrouted: TokenBatch) -> TokenBatch:
        """Adds the columns that the terms read.

        Raises:
            RunFailure: a function returns no tensor with one value per sampled token.
        """
        for term in self._parts:
            for name, function in term.columns.items():
                values = function(batch)
                LOSS_TERMS.check_returned(f"{term.name} (column {name})", values, tuple(batch.turns.shape))
                batch = batch.with_columns(**{name: values})
        return batch

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """All of them, in the order of the spec."""
        return tuple(map(OwnTerm, self._parts))


def capability(spec: RunSpec) -> Capability:
    """The terms of a spec."""
    return OwnTerms(spec)
