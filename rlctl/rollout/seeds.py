"""Seeds of what a run samples: independent of how a batch is distributed over ranks, and of their order."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def step_seed(seed: int, step: int, purpose: str = "train") -> int:
    """An independent 63-bit seed for every step and purpose of a run."""
    return derived_seed(seed, step, purpose)


def turn_seed(step_seed: int, group: int, member: int, turn: int = 0) -> int:
    """The seed of one turn of one episode; the same for any distribution of the batch over ranks."""
    return derived_seed(step_seed, group, member, turn)


def turn_seeds(step_seed: int, numbers: Sequence[tuple[int, int]]) -> list[int]:
    """The seeds of the first turns of many episodes, by group and member; see `turn_seed`."""
    texts = [b"%d/%d/%d/0" % (step_seed, group, member) for group, member in numbers]
    digests = b"".join([digest.digest() for digest in map(hashlib.sha256, texts)])
    return [number >> 1 for number in struct.unpack(f">{4 * len(numbers)}Q", digests)[::4]]


def derived_seed(*parts: int | str) -> int:
    """An independent 63-bit seed for every combination of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
