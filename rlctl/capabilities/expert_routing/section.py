"""Mixtures of experts in a spec: `actor.routing_replay` and `actor.router_aux_loss_coef`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlctl.capabilities.base import CapabilitySection, Problems
from rlctl.errors import Problem

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

REPLAY = "actor.routing_replay"


class ExpertRoutingSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Whether experts are replayed, or balanced by a loss."""
        return spec.actor.routing_replay or spec.actor.router_aux_loss_coef > 0

    def problems(self, spec: RunSpec) -> Problems:
        """The engine must report the experts that are replayed, as one record of each response."""
        if self.is_on(spec) and spec.model.compile_layers:
            message = f"{REPLAY} and actor.router_aux_loss_coef read what routers choose, within each layer"
            yield Problem("error", "model.compile_layers", message, "leave it out")
        if spec.actor.router_aux_loss_coef and spec.engine.sequence_parallel > 1:
            message = "the routing of rows that ranks share is not collected"
            fix = "write 0, or set engine.sequence_parallel: 1"
            yield Problem("error", "actor.router_aux_loss_coef", message, fix)
        if not spec.actor.routing_replay:
            return
        if not spec.rollout_engine.reports_experts:
            message = f"rollout.name: {spec.rollout.name} does not report which experts compute a token"
            yield Problem("error", REPLAY, message, "set rollout.name: hf or vllm, or leave it out")
        if spec.rollout.in_flight:
            message = (
                "the experts of a response that several versions sampled, or read again, are not one record"
            )
            yield Problem("error", REPLAY, f"rollout.in_flight: {message}", "set one of them to false")

    def asks_of_sampler(self, spec: RunSpec) -> Mapping[str, Any]:
        """The experts, for replay."""
        return {"with_experts": spec.actor.routing_replay}


SECTION = ExpertRoutingSection()
