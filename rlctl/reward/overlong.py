"""The soft penalty for responses near the length limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13), times a factor.

    Attributes:
        max_length: L_max, tokens.
        buffer_length: L_cache, tokens before L_max over which the penalty grows; at least 1.
        factor: penalty at L_max and beyond, where the paper has 1.
    """

    max_length: int
    buffer_length: int
    factor: float

    def of(self, lengths: Tensor) -> Tensor:
        """Penalties (B,) float32, from 0 down to −factor, for response lengths (B,) in tokens."""
        excess = (lengths - (self.max_length - self.buffer_length)).float() / self.buffer_length
        return -self.factor * excess.clamp(0.0, 1.0)
