"""Mixtures of experts: the load-balancing loss, and the replay of the experts that the sampler used.

See `rlctl.routing` for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rlctl.errors import RunFailure, known
from rlctl.prefix import body_of
from rlctl.routing import REPLAY, Mixture, RouteRanks, balance_loss, foreign_routes
from rlctl.train.capability import Capability
from rlctl.train.terms import KeptTokens, Term

if TYPE_CHECKING:
    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.batch import TokenBatch
    from rlctl.engine.ranks import Ranks
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.capability import Probe

_LIVE = "actor/live_routed_tokens"


@dataclass(frozen=True)
class BalanceTerm(Term):
    """The load-balancing loss over all sampled tokens of the mini-batch, rejected ones included.

    `expert_counts`: (E,) number of them that go to each expert.
    """

    coefficient: float
    expert_counts: Tensor | None = None
    shares: ClassVar[tuple[str, ...]] = ("router_aux_loss",)
    asks: ClassVar[Mapping[str, bool]] = {"routing": True}
    reads_mini_batch: ClassVar[bool] = True

    def of_mini_batch(self, joined: Callable[[str], Tensor], ranks: Ranks) -> Term:
        """Counts the tokens of each expert."""
        routing = joined("routing")
        own = routing[:, routing.shape[1] // 2 :].double().sum(0)
        return replace(self, expert_counts=torch.tensor(ranks.sum(own.tolist()), device=own.device))

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`; `router_aux_loss`: before the coefficient."""
        routing = known(tokens.output.routing)
        counts = known(self.expert_counts)
        balance = balance_loss(routing, counts, tokens.num_all_tokens)
        return self.coefficient * balance, {"router_aux_loss": balance.detach()}

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """`actor/router_aux_loss`."""
        return {"actor/router_aux_loss": sums["router_aux_loss"] / num_updates}


class ExpertRouting(Capability):
    """See the module."""

    def __init__(self, spec: RunSpec) -> None:
        self._actor = spec.actor

    def check_policy(self, model: Any) -> None:
        """With replay the model must report its experts."""
        if self._actor.routing_replay:
            Mixture.of(body_of(model), REPLAY)

    def check_probe(self, probe: Probe) -> None:
        """The experts that an engine records must be those that the trainer's routers choose.

        Raises:
            RunFailure: they are not, in some layer (it names the replica).
        """
        if not self._actor.routing_replay:
            return
        with RouteRanks() as routes:
            probe.log_probs(probe.batch)
        fault = foreign_routes(_of_all_ranks(routes.sums, probe.ranks))
        if fault:
            who = f" of {probe.replica}" if probe.replica else ""
            raise RunFailure(
                f"routing replay{who}: {fault}",
                where=REPLAY,
                fix="set it to false, or use an engine that records the experts of this model's layers",
            )

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """The load-balancing loss."""
        coefficient = self._actor.router_aux_loss_coef
        return (BalanceTerm(coefficient),) if coefficient else ()

    def token_sums(self, batch: TokenBatch) -> Sums:
        """The number of tokens whose experts the engine did not report.

        The last one of a sequence, which is not read, does not count.
        """
        experts = batch.columns.get("experts")
        if experts is None:
            return {}
        is_live = (experts < 0).flatten(1).all(1)
        is_last = batch.sequences.places + 1 == batch.sequences.spread(batch.lengths)
        return {_LIVE: (is_live & ~is_last).double().sum()}

    def token_metrics(self, sums: HostSums) -> dict[str, float]:
        """`actor/live_routed_tokens`."""
        return {_LIVE: sums[_LIVE]} if _LIVE in sums else {}


def _of_all_ranks(own: Tensor | None, ranks: Ranks) -> Tensor:
    """`RouteRanks.sums` over all ranks; () without any (all ranks call this)."""
    shapes = [sums.shape for sums in ranks.exchange([own]) if sums is not None]
    shape = shapes[0] if shapes else torch.Size((0, 0, 2))
    sums = torch.zeros(shape, dtype=torch.float64) if own is None else own
    return torch.tensor(ranks.sum(sums.flatten().tolist()), dtype=torch.float64).view(shape)


def capability(spec: RunSpec) -> Capability:
    """What a spec asks of the experts."""
    return ExpertRouting(spec)
