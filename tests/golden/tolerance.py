"""How far a figure may be from the stored one: the rounding of the sum that it is.

A figure is a mean of float32 terms. Their rounding is a share of the size of the terms, not of the figure,
which may be any smaller where terms of either sign cancel. So a difference is taken relative to the figure or
to the size of its terms, whichever is larger. Another processor sums in another order, has other kernels and
another exp, as `ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE` shows: then
rounding of log-probs, which grows in weights of whole sequences, makes differences of up to 3e-5.
"""

from __future__ import annotations

import math

#: Largest relative difference of two commits on one machine, and of two processors; tests allow the latter.
COMMITS, PROCESSORS = 1e-6, 1e-4
#: Part of a figure's name → size of the terms whose sum or mean it is; the first that fits counts.
_SIZES = {
    # AdamW steps as far for a gradient that is mostly rounding as for any other, 0.002 in these runs
    **{"change/": 10.0},
    **{"chi2": 1.0, "max_deviation": 1.0, "advantages/mean": 1.0, "entropy": 1.0},
    **{"pg_loss": 0.1, "kl": 0.1, "log_ppl_diff": 0.1, "vf_": 0.1, "grad_norm": 0.1},
}
#: Of others: shares, which are counts of tokens, and quantities that do not cancel.
_SMALLEST = 0.01

Figure = float | list[float]


def distance(now: Figure | None, golden: Figure, name: str) -> float:
    """The difference of two figures, relative to what may be rounded; infinite where they cannot be compared.

    Of lists, the largest difference. None: there is no such figure now.
    """
    if isinstance(golden, list):
        if not isinstance(now, list) or len(now) != len(golden):
            return math.inf
        return max((distance(a, b, name) for a, b in zip(now, golden, strict=True)), default=0.0)
    if not isinstance(now, float | int) or math.isnan(now) != math.isnan(golden):
        return math.inf
    if now == golden or math.isnan(golden):
        return 0.0
    size = next((size for part, size in _SIZES.items() if part in name), _SMALLEST)
    return abs(now - golden) / max(abs(golden), size)
