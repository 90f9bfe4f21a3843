"""Terms of the loss from users' files in a spec: `actor.terms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.capabilities.base import CapabilitySection
from rlctl.registry import LOSS_TERMS

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


class OwnTermsSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Whether the loss has further terms."""
        return bool(spec.actor.terms)

    def teaches_without_advantage(self, spec: RunSpec) -> bool:
        """Unless every term says that it does not."""
        parts = [LOSS_TERMS.part(name) for name in spec.actor.terms]
        return not all(part.vanishes_without_advantage for part in parts)


SECTION = OwnTermsSection()
