"""The account of episodes that were sampled and not trained on, in a spec: it is always on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.capabilities.base import CapabilitySection

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


class DroppedEpisodesSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Always: a step that drops nothing pays one sum."""
        return True


SECTION = DroppedEpisodesSection()
