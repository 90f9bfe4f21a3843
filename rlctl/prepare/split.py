"""Training or test: decided by what a row asks, not by where it stands.

The same question is on the same side in every run, whatever is added, removed or reordered around it,
and exact duplicates never end up on both sides.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HASH_RANGE = 1 << 64


def row_hash(question: str, seed: int) -> int:
    """A number in [0, 2⁶⁴), evenly spread."""
    return int.from_bytes(blake2b(f"{seed}\n{question}".encode(), digest_size=8).digest(), "big")


def limit_for_fraction(fraction: float) -> int:
    """Rows hashing below this are test rows.

    Raises:
        UsageError: the fraction is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise UsageError(
            f"{fraction:g} is no share of the rows", where="--val-fraction", fix="0 up to below 1"
        )
    return int(fraction * HASH_RANGE)


def limit_for_size(hashes: NDArray[np.uint64], size: int) -> int:
    """The limit below which `size` of the rows hash: more only where duplicates tie for the last place."""
    if size == 0 or not len(hashes):
        return 0
    last = min(size, len(hashes)) - 1
    return int(np.partition(hashes, last)[last]) + 1
