"""`rollout_correction.auto`: after every batch, chooses the weight, the learning rate and fresh responses.

All decisions depend only on logged metrics, so a resumed run reads its log and decides as the uninterrupted
run would. The main rank decides for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rlctl.algos.auto_correction import CANDIDATES, AutoChoice, CandidateMoments, averaged, choose
from rlctl.train.gradient_sketches import logged_moments
from rlctl.train.schedule import is_sync_due

if TYPE_CHECKING:
    from rlctl.train.run import Run
    from rlctl.train.settings import UpdateSettings

_DISCARDED = "rollout_corr/auto_discarded"
#: Squared cosine of the expected and the true gradient below which responses sampled ahead are too old.
TOO_OLD = 0.5


class AutoCorrection:
    """Sets the correction weight of every batch; without `rollout_correction.auto` it does nothing.

    Args:
        run: its `history` holds the logged metrics of earlier steps (only the main rank's is used).

    Attributes:
        choice: the weight and the learning-rate factor of the next batch.
    """

    def __init__(self, run: Run) -> None:
        spec = run.spec
        self._run, self._is_on = run, spec.algorithm.rollout_correction.auto
        self._ahead = max(spec.rollout.staleness, spec.rollout.max_staleness)
        self._num_groups = float(spec.ppo_mini_batch_size)
        self._means: dict[str, CandidateMoments] = {}
        self._last_discard = 0
        self.choice = AutoChoice()
        if self._is_on:
            for metrics in run.history:
                self._add(metrics)
                self.choice = choose(self._means, self._num_groups, self.choice)
                self._discarded(int(metrics["step"]), bool(metrics.get(_DISCARDED)))
            self.choice = self._shared(self.choice)

    def adjusted(self, settings: UpdateSettings) -> UpdateSettings:
        """The settings of the next batch."""
        if not self._is_on:
            return settings
        rules = replace(settings.rules, weight=CANDIDATES[self.choice.name])
        return replace(settings, rules=rules, auto_lr_scale=self.choice.lr_scale)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Chooses for the next batch; discards responses that were sampled ahead if they are too old.

        Args:
            step: the batch's number.
            metrics: of this step, over all ranks.

        Returns:
            What was in effect in this step, and whether responses were discarded after it.
        """
        if not self._is_on:
            return {}
        self._add(metrics)
        own = {
            "rollout_corr/auto_rule": float(list(CANDIDATES).index(self.choice.name)),
            "rollout_corr/auto_lr_scale": self.choice.lr_scale,
        }
        self.choice = self._shared(choose(self._means, self._num_groups, self.choice))
        is_stale = self._run.ranks.max(float(self._run.ranks.is_main and self._is_too_old(step))) > 0.0
        if is_stale:
            self._run.stream.discard()
        self._discarded(step, is_stale)
        return own | {_DISCARDED: float(is_stale)}

    def _is_too_old(self, step: int) -> bool:
        """Whether waiting responses are too old, newer weights can sample, and the last discard is past."""
        has_new_weights = is_sync_due(self._run.spec, step)
        return (
            has_new_weights and self.choice.lr_scale < TOO_OLD and step - self._last_discard > self._ahead > 0
        )

    def _discarded(self, step: int, is_stale: bool) -> None:
        """The moments of older responses say nothing about those that replace them."""
        if is_stale:
            self._last_discard, self._means = step, {}

    def _add(self, metrics: Mapping[str, float]) -> None:
        found = {name: logged_moments(name, metrics) for name in CANDIDATES}
        batch = {name: moments for name, moments in found.items() if moments is not None}
        self._means = averaged(self._means, batch)

    def _shared(self, own: AutoChoice) -> AutoChoice:
        """The main rank's choice."""
        ranks, names = self._run.ranks, list(CANDIDATES)
        place = ranks.max(float(names.index(own.name)) if ranks.is_main else 0.0)
        return AutoChoice(names[int(place)], ranks.max(own.lr_scale if ranks.is_main else 0.0))
