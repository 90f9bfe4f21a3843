"""How far weights may be apart where only the order of the gradients' sums differs, on any processor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

#: Relative error of one float32 operation.
UNIT = torch.finfo(torch.float32).eps / 2
#: How much larger than the error of its own sum a gradient's is, after the sums of a few layers.
LAYERS = 8.0


def assert_same_steps(
    got: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    lrs: Iterable[float],
    num_terms: int,
) -> None:
    """Compares weights after AdamW steps whose gradients differ by rounding only.

    A gradient that sums n terms is off by about √n·u of their size. AdamW divides each gradient by its own
    size: of N gradients the smallest is about 1/N of the usual one, and the mean of 1/size is about log N. So
    a share of N·√n·u of a step is allowed to one weight, and of log N·√n·u to the mean of all.

    Args:
        lrs: learning rate of each step.
        num_terms: tokens of a batch.
    """
    gaps = {name: (got[name].detach() - tensor.detach()).abs() for name, tensor in wanted.items()}
    num_weights = sum(gap.numel() for gap in gaps.values())
    moved = sum(lrs)
    share = LAYERS * math.sqrt(num_terms) * UNIT
    largest = max(gaps, key=lambda name: float(gaps[name].max()))
    allowed = moved * min(2.0, share * num_weights)
    assert float(gaps[largest].max()) <= allowed, (largest, float(gaps[largest].max()), allowed)
    mean = sum(float(gap.double().sum()) for gap in gaps.values()) / num_weights
    allowed = moved * share * max(1.0, math.log(num_weights))
    assert mean <= allowed, (mean, allowed)
