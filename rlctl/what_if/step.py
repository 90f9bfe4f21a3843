"""The responses of one training step, independent of the dump's format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Step:
    """The B responses of one training step; token arrays concatenate the rows, N = Σ lengths."""

    number: int  # number of the step
    group_ids: NDArray[np.int64]  # (B,) int64, equal for responses to one prompt
    rewards: NDArray[np.float64]  # (B,), NaN where the grader failed
    lengths: NDArray[np.int64]  # (B,) int64, response tokens
    token_ids: NDArray[np.int64]  # (N,) int64
    #: rollout_log_probs, log_probs: (N,) float32, nats, of the sampling and the trained policy
    rollout_log_probs: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    #: (N,) bool, False for tokens the policy did not sample (tool output); None: all sampled
    mask: NDArray[np.bool_] | None = None
    #: (B,) from the dump; None: computed from the rewards
    advantages: NDArray[np.float64] | None = None
