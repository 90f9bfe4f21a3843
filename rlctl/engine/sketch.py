"""Sketches of outer products: few numbers that preserve inner products.

The gradient of log π(y) with respect to the output head's weight is (e_y − π) ⊗ h / temperature: vocabulary ×
hidden numbers per token. TensorSketch (Pham and Pagh 2013) reduces it to K numbers without forming it, as the
convolution of the count sketches of both factors. E[s(a) · s(b)] = a · b, with a variance of at most
11/K |a|² |b|² (Avron, Nguyen and Woodruff 2014, lemma 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

#: Numbers per sketch.
SKETCH_SIZE = 1024


@dataclass(frozen=True, slots=True)
class OuterSketch:
    """For each factor (D,): the index (of K) to which an entry is added, and its sign."""

    rows: Tensor
    row_signs: Tensor
    columns: Tensor
    column_signs: Tensor

    @staticmethod
    @lru_cache(maxsize=2)
    def of(num_rows: int, num_columns: int, device: torch.device) -> OuterSketch:
        """Returns the same sketch on every rank and in every step."""
        draw = torch.Generator().manual_seed(0)
        found = []
        for size in (num_rows, num_columns):
            found.append(torch.randint(SKETCH_SIZE, (size,), generator=draw).to(device))
            found.append((torch.randint(2, (size,), generator=draw) * 2.0 - 1.0).to(device))
        return OuterSketch(*found)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """(N, K) float32 sketches of (N, rows) ⊗ (N, columns)."""
        left = _counted(left.float(), self.rows, self.row_signs)
        right = _counted(right.float(), self.columns, self.column_signs)
        product: Tensor = torch.fft.irfft(torch.fft.rfft(left) * torch.fft.rfft(right), n=SKETCH_SIZE)
        return product


def _counted(values: Tensor, places: Tensor, signs: Tensor) -> Tensor:
    empty = torch.zeros(len(values), SKETCH_SIZE, device=values.device)
    return empty.index_add_(1, places, values * signs)
