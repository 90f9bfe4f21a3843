"""The test of the sampler's log-probs in a spec: it is always on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.capabilities.base import CapabilitySection

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec


class SamplerTestSection(CapabilitySection):
    """See the module."""

    def is_on(self, spec: RunSpec) -> bool:
        """Always: it costs a few sums."""
        return True


SECTION = SamplerTestSection()


def guarantee_ends(spec: RunSpec) -> str:
    """Why the test has no guarantee in runs of this spec; empty: it has one.

    What is scored must not depend on what was drawn. Where groups that are ready first are trained on, or
    groups are filtered by their rewards, long or uninteresting responses are seen later or never.
    """
    if spec.rollout.in_flight:
        return "rollout.in_flight trains on the groups that are ready first"
    if spec.algorithm.filter_groups.enable:
        return "algorithm.filter_groups drops groups by their rewards before they are scored"
    return ""
