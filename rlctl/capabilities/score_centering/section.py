"""Score centering in a spec: `algorithm.rollout_correction.score_centering`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlctl.capabilities.base import CapabilitySection, Problems
from rlctl.errors import Problem

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec

KEY = "algorithm.rollout_correction.score_centering"


class ScoreCenteringSection(CapabilitySection):
    """See the module."""

    corrects = True

    def is_on(self, spec: RunSpec) -> bool:
        """Whether the expected score under the sampler is subtracted."""
        return spec.algorithm.rollout_correction.score_centering is not None

    def problems(self, spec: RunSpec) -> Problems:
        """The expected score is that of REINFORCE, with a weight that is a function of each token's ratio."""
        from rlctl.run_spec.resolve import correction_problems, correction_rules

        correction = spec.algorithm.rollout_correction
        if not self.is_on(spec):
            return
        if spec.rollout_engine.reports_kept == "never":
            message = f"rollout.name: {spec.rollout.name} does not report the most likely tokens"
            yield Problem("error", KEY, message, "use rollout.name: hf or vllm")
        if not correction.bypass_mode or correction.loss_type != "reinforce":
            message = "the expected score under the rollout policy is known for REINFORCE in bypass mode only"
            yield Problem("error", KEY, message, "set bypass_mode: true and loss_type: reinforce")
        if correction_problems(correction):
            return
        rules = correction_rules(correction)
        if rules.weight.level not in {None, "token"}:
            message = (
                f"{rules.weight.level} weights depend on other tokens too, so their expectation is not known"
            )
            fix = "set rollout_is: null, or rollout_is: token with rollout_is_bound: truncate"
            yield Problem("error", KEY, message, fix)
        if any(rule.scope == "token" for rule in rules.reject):
            message = (
                "a criterion that rejects single tokens removes their scores, not those of the listed tokens"
            )
            yield Problem("error", KEY, message, "reject whole sequences, or use rollout_is_bound: mask")

    def asks_of_sampler(self, spec: RunSpec) -> Mapping[str, Any]:
        """Its most likely tokens."""
        return {"num_most_likely": spec.algorithm.rollout_correction.score_centering}

    def num_listed_tokens(self, spec: RunSpec) -> tuple[int, int]:
        """Those that the sampler listed, also of the batches that wait."""
        return spec.algorithm.rollout_correction.score_centering or 0, spec.batches_ahead

    def remarks(self, spec: RunSpec) -> Iterator[str]:
        """What is subtracted."""
        count = spec.algorithm.rollout_correction.score_centering
        yield (
            f"Score centering: the expected score under π_rollout, computed from its {count} most likely "
            "tokens per position, is subtracted from every score."
        )

    def why_not_replayed(self, spec: RunSpec) -> str:
        """The listed tokens are not dumped."""
        return "score centering needs tokens that are not in the dump"


SECTION = ScoreCenteringSection()
