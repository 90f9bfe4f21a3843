"""The KL to a reference policy in a spec: `actor.use_kl_loss`, `algorithm.use_kl_in_reward`, `ref`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.capabilities.base import CapabilitySection

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


class ReferenceKLSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Whether a KL to the reference policy is in the loss or in the reward."""
        return spec.needs_reference

    def teaches_without_advantage(self, spec: RunSpec) -> bool:
        """The KL in the loss reads every token."""
        return spec.actor.use_kl_loss


SECTION = ReferenceKLSection()
