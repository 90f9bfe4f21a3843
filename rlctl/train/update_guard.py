"""Guardrails before an optimizer update: do its samples still speak for the policy they are to move?

Judged by two figures that diagnosis reads too, here of one mini-batch and before its step, from sums
already added up over ranks, so that every rank judges alike. An update that is acted on also halves the
learning rate of those after it: the next batch would start with a step as large as the one that led here.
`WINDOW` updates that are well undo one halving.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.statistics import correction_metrics
from rlctl.diagnose.thresholds import KL, RAW_ESS, WINDOW
from rlctl.spec.trainer import GuardrailsSpec

#: |KL| in nats per token, and raw effective sample size, where diagnosis raises its gravest alarm.
DRIFT_LIMIT = KL.tiers[-1][1]
ESS_FLOOR = RAW_ESS.tiers[-1][1]
#: The learning rate is never scaled below this by what lies behind: a gap that does not come from the
#: updates would bring the run to a standstill.
LEAST_SCALE = 1 / 16


@dataclass(frozen=True, slots=True)
class UpdateDecision:
    """What the guardrails make of one update.

    Attributes:
        ess: raw effective sample size of the mini-batch, in [0, 1].
        drift: |KL| of the trained policy from the one that sampled, nats per token. In decoupled mode that is
            π_old's: how far π_θ may leave π_old is the clip's matter, and PPO is meant to go there.
        is_low: the first is under its floor.
        has_drifted: the second is over its limit.
        lr_scale: factor of the learning rate.
        skip: the update is to be withheld.
    """

    ess: float = 1.0
    drift: float = 0.0
    is_low: bool = False
    has_drifted: bool = False
    lr_scale: float = 1.0
    skip: bool = False


class UpdateGuard:
    """Judges updates, one after the other.

    Args:
        spec: `trainer.guardrails`.

    Attributes:
        floor: raw effective sample size under which an update is far off-policy.
        scale: factor the next update's learning rate starts from; all there is to remember.
    """

    def __init__(self, spec: GuardrailsSpec) -> None:
        self.floor = ESS_FLOOR if spec.ess_floor is None else spec.ess_floor
        self.scale = 1.0
        self._is_on, self._acts = spec.mode != "off", spec.mode == "act"
        self._on_low_ess, self._on_drift = spec.on_low_ess, spec.on_drift

    def check_update(self, correction: CorrectionSums[float], rules: CorrectionRules) -> UpdateDecision:
        """Judge the next update.

        Args:
            correction: sums of its whole mini-batch over all ranks.
            rules: by which they were made.
        """
        if not self._is_on or not correction.finite_tokens:
            return UpdateDecision()
        measured = correction_metrics(correction, rules)
        ess, drift = measured[RAW_ESS.key], abs(measured[KL.key])
        is_low, has_drifted = ess < self.floor, drift > DRIFT_LIMIT
        if not self._acts:
            return UpdateDecision(ess, drift, is_low, has_drifted)
        acts_on = {self._on_low_ess} if is_low else set()
        acts_on |= {self._on_drift} if has_drifted else set()
        lr_scale = self.scale * (ess / self.floor if "scale_lr" in acts_on else 1.0)
        if acts_on - {"warn"}:
            self.scale = max(self.scale / 2.0, LEAST_SCALE)
        else:
            self.scale = min(self.scale * 2.0 ** (1.0 / WINDOW), 1.0)
        return UpdateDecision(ess, drift, is_low, has_drifted, lr_scale, "skip_step" in acts_on)
