"""Statistics of the difference between two log-probs of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.correction import correct
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, WeightRule
from rlctl.algos.statistics import correction_metrics

#: Mean |log-ratio| up to which two float32 computations of one distribution agree.
AGREE = 1e-5
_TOKEN, _SEQUENCE = (CorrectionRules(WeightRule(level)) for level in ("token", "sequence"))
_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"


@dataclass(frozen=True, slots=True)
class Gap:
    """Statistics of r = log π_trainer − log π_engine, in nats, over response tokens."""

    #: mean, abs_mean, std, abs_max: of r
    mean: float
    abs_mean: float
    std: float
    abs_max: float
    k3: float  # mean of ρ − 1 − log ρ, an estimate of KL(engine ‖ trainer)
    ess_token: float  # effective sample size of ρ_t over tokens, as a fraction
    ess_sequence: float  # the same of Π ρ_t over sequences
    num_tokens: int  # tokens compared
    num_nonfinite: int  # sequences excluded because of a NaN or infinite log-prob

    @property
    def agrees(self) -> bool:
        """Whether the log-probs agree, so that there is nothing to explain."""
        return self.abs_mean <= AGREE


def measure(trainer: Tensor, engine: Tensor, mask: Tensor) -> Gap:
    """The gap between two (B, T) float32 log-probs of the same tokens, where `mask` (B, T) bool is True."""
    correction = correct(trainer, engine, mask, _TOKEN)
    by_token = correction_metrics(correction.sums.to_host(), _TOKEN)
    by_sequence = correction_metrics(correct(trainer, engine, mask, _SEQUENCE).sums.to_host(), _SEQUENCE)
    counted = mask & ~correction.nonfinite[:, None]
    log_ratio = (trainer - engine)[counted].double()
    if not len(log_ratio):
        log_ratio = torch.zeros(1, dtype=torch.float64)
    return Gap(
        mean=float(log_ratio.mean()),
        # Clamped like every log-ratio, so that one token of probability 0 does not dominate the mean.
        abs_mean=float(log_ratio.abs().clamp(max=LOG_RATIO_CLAMP).mean()),
        std=float(log_ratio.std(unbiased=False)),
        abs_max=float(log_ratio.abs().max()),
        k3=by_token["rollout_corr/k3_kl"],
        ess_token=by_token[_ESS],
        ess_sequence=by_sequence[_ESS],
        num_tokens=int(counted.sum()),
        num_nonfinite=int(correction.nonfinite.sum()),
    )
