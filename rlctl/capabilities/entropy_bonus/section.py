"""The entropy bonus in a spec: `actor.entropy_coeff`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.capabilities.base import CapabilitySection

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


class EntropyBonusSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Whether the loss has an entropy bonus."""
        return spec.actor.entropy_coeff > 0

    def teaches_without_advantage(self, spec: RunSpec) -> bool:
        """The bonus reads every token."""
        return True


SECTION = EntropyBonusSection()
