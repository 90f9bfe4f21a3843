"""Score centering: subtracts the expected score under the sampler, see `rlctl.algos.score_centering`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlctl.algos.score_centering import expected_score
from rlctl.algos.segments import ratio
from rlctl.train.capability import Capability
from rlctl.train.terms import KeptTokens, Term, total

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules, WeightRule
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.run_spec.run_spec import RunSpec


@dataclass(frozen=True)
class CenteringTerm(Term):
    """A · E_μ[w · ∇ log π] of each token, as part of the policy gradient; `rule`: the weight w."""

    rule: WeightRule
    counts: ClassVar[tuple[str, ...]] = ("listed_mass",)
    scales_with_weights: ClassVar[bool] = True
    vanishes_without_advantage: ClassVar[bool] = True

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`; `listed_mass`: probability of what the sampler listed, of all M tokens."""
        _, rollout_log_probs = tokens.batch.column("most_likely").padded()
        expected = expected_score(tokens.forward("most_likely"), rollout_log_probs[tokens.keep], self.rule)
        share = tokens.share_of(tokens.column("advantages") * expected) / tokens.mean_weight
        return share, {"listed_mass": total(rollout_log_probs.exp().sum(-1))}

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """`rollout_corr/listed_mass` per token."""
        return {"rollout_corr/listed_mass": ratio(sums["listed_mass"], sums["tokens"])}


class ScoreCentering(Capability):
    """See the module."""

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """The expected score, with the weight that the correction has."""
        return (CenteringTerm(rules.weight),)


def capability(spec: RunSpec) -> Capability:
    """The same for every spec."""
    return ScoreCentering()
