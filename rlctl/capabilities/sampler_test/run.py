"""Tests during training whether the sampler drew its tokens with the log-probs that it reports.

See `rlctl.algos.sampler_test` for the test and what its guarantee needs. π_train is the policy before any
update on the batch: π_old in decoupled mode; in bypass mode π_θ of the first mini-batch's passes. Responses
that were drawn and not trained on count as tokens that were not scored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlctl.algos.sampler_test import Wealth, num_scored, sampler_sums, unit_mean, with_unscored
from rlctl.capabilities.sampler_test.section import guarantee_ends
from rlctl.train.capability import Capability

if TYPE_CHECKING:
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.capability import StepRecord

LOG_WEALTH, GUARANTEED = "rollout_corr/log_wealth", "rollout_corr/log_wealth_guaranteed"
Z, MEAN = "rollout_corr/unit_mean_z", "rollout_corr/unit_mean"
CUT = "rollout_corr/unit_mean_cut"


class SamplerTest(Capability):
    """See the module."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._wealth = Wealth()
        self._is_guaranteed = not guarantee_ends(spec)

    def updated(self, record: StepRecord) -> dict[str, float]:
        """Bets on the tokens of one batch."""
        batch = record.batch
        spec = self._spec
        bypass = spec.algorithm.rollout_correction.bypass_mode
        num_groups = spec.ppo_mini_batch_size if bypass else spec.data.train_batch_size
        tested = batch.units.episode.spread(batch.group_ids < num_groups)
        log_ratio = (record.before_updates - batch.rollout_log_probs)[tested]
        sampled = record.graded.episodes
        drawn = sampled.num_sampled[sampled.tokens.group_ids < num_groups]
        [num_drawn] = record.ranks.sum([float(drawn.sum())])
        sums = record.data_ranks.all_reduce(sampler_sums(log_ratio))
        failed = record.metrics.get("episode/num_failed", 0.0) and spec.environment.is_multi_turn
        if failed or record.metrics.get("rollout/restarted_episodes"):
            self._is_guaranteed = False  # what was open is sampled again: the shorter ones were kept
        sums = with_unscored(sums, max(int(num_drawn) - num_scored(sums), 0))
        found = unit_mean(sums)
        self._wealth = self._wealth.after(sums)
        metrics = {LOG_WEALTH: self._wealth.log_value, GUARANTEED: float(self._is_guaranteed)}
        return (
            metrics
            if found.z is None
            else metrics | {MEAN: 1.0 + found.gap, Z: found.z, CUT: float(found.is_cut)}
        )

    def state(self) -> dict[str, Any]:
        """The wealth, and whether its guarantee still holds."""
        stakes = [None if stake == float("-inf") else stake for stake in self._wealth.log_stakes]
        batches = self._wealth.num_batches
        return {"log_stakes": stakes, "num_batches": batches, "is_guaranteed": self._is_guaranteed}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after `state`."""
        stakes = tuple(float("-inf") if stake is None else float(stake) for stake in state["log_stakes"])
        self._wealth = replace(self._wealth, log_stakes=stakes, num_batches=int(state["num_batches"]))
        self._is_guaranteed = self._is_guaranteed and bool(state["is_guaranteed"])


def capability(spec: RunSpec) -> Capability:
    """The test of a spec's run."""
    return SamplerTest(spec)
