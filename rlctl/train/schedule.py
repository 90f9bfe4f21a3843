"""Learning rate as a function of the optimizer step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Literal


def lr_at(
    update: int,
    total_updates: int,
    *,
    peak: float,
    warmup: int,
    kind: Literal["constant", "linear", "cosine"],
) -> float:
    """Learning rate of optimizer update number `update` (from 0).

    Linear warm-up over the first `warmup` updates, reaching `peak` on the last of them; then hold,
    or decay to 0 at `total_updates`.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
