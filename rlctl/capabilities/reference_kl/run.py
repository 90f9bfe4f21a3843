"""The KL to a reference policy: in the loss a term, in the reward a penalty per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlctl.algos.kl import kl_loss
from rlctl.train.capability import Capability
from rlctl.train.terms import KeptTokens, Term

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.run_spec.run_spec import RunSpec


@dataclass(frozen=True)
class ReferenceKLTerm(Term):
    """coefficient · KL(π_θ ‖ π_ref) of each token by a KL estimator.

    It is relative to π_rollout in both modes, because the tokens were sampled from it.
    """

    coefficient: float
    estimator: str
    shares: ClassVar[tuple[str, ...]] = ("kl_loss",)

    @property
    def kl_estimator(self) -> str:
        """See `Term`."""
        return self.estimator

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`; `kl_loss`: before the coefficient."""
        reference = tokens.column("ref_log_probs")
        rollout = tokens.column("rollout_log_probs")
        kl = tokens.share_of(kl_loss(self.estimator, tokens.log_probs, reference, rollout, tokens.unit))
        return self.coefficient * kl, {"kl_loss": kl.detach()}

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """`actor/kl_loss` and its coefficient."""
        return {"actor/kl_loss": sums["kl_loss"] / num_updates, "actor/kl_coef": self.coefficient}


class ReferenceKL(Capability):
    """See the module."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """The KL in the loss."""
        actor = self._spec.actor
        if not actor.use_kl_loss:
            return ()
        return (ReferenceKLTerm(actor.kl_loss_coef, actor.kl_loss_type),)


def capability(spec: RunSpec) -> Capability:
    """The KL of a spec."""
    return ReferenceKL(spec)
