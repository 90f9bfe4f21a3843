"""The entropy bonus: −entropy_coeff × entropy of the next-token distribution at every kept token.

Source: Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlctl.train.capability import Capability
from rlctl.train.terms import KeptTokens, Term

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.run_spec.run_spec import RunSpec


@dataclass(frozen=True)
class EntropyTerm(Term):
    """−coefficient · H(π_θ) of each token. `actor/entropy` is logged with or without a bonus."""

    coefficient: float
    asks: ClassVar[Mapping[str, bool]] = {"entropy_grad": True}

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`."""
        return -self.coefficient * tokens.share_of(tokens.forward("entropy")), {}

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """None of its own."""
        return {}


class EntropyBonus(Capability):
    """See the module."""

    def __init__(self, coefficient: float) -> None:
        self._coefficient = coefficient

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """The bonus."""
        return (EntropyTerm(self._coefficient),)


def capability(spec: RunSpec) -> Capability:
    """The bonus of a spec."""
    return EntropyBonus(spec.actor.entropy_coeff)
