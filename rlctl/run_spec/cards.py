"""The GPUs of `cards.toml`, whose speed is known. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
#: Share of the peak FLOP/s that large products reach on an H100, assumed where `products` is not published.
_REACHED = 0.80


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU; speeds are peak figures except `flops`; `source` names where they are published."""

    name: str  # as in `--machine 8xNAME`
    words: tuple[str, ...]  # words of the driver's name, all of which must occur
    others: tuple[str, ...]  # words of the names of other cards, which must not occur
    peak: float  # FLOP/s of dense matrix products in bf16 with sums in float32
    flops: float  # of these, what large products reach
    bandwidth: float  # bytes/s between the GPU and its memory
    memory: float  # bytes that the driver reports
    link: float  # bytes/s to another GPU of the same machine, in one direction
    bus: float  # bytes/s to the host, in one direction
    host: float  # bytes of host memory that machines have per GPU
    has_fp8: bool  # whether it multiplies numbers of 8 bits
    source: str

    def is_named(self, driver_name: str) -> bool:
        """Whether the driver reports it under this name."""
        found = set(re.findall(r"[a-z0-9]+", driver_name.lower()))
        return found.issuperset(self.words) and found.isdisjoint(self.others)


def _read() -> dict[str, Card]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: Card(
            name,
            tuple(map(str.lower, entry["match"])),
            tuple(map(str.lower, entry.get("not", ()))),
            entry["tflops"] * 1e12,
            entry.get("products", _REACHED * entry["tflops"]) * 1e12,
            entry["bandwidth"] * 1e9,
            entry["memory"] * GIB,
            entry["link"] * 1e9,
            entry["bus"] * 1e9,
            entry["host"] * GIB,
            entry.get("fp8", False),
            entry["source"],
        )
        for name, entry in table.items()
    }


#: Short name → card.
CARDS = _read()


def card_named(driver_name: str) -> Card | None:
    """The card that the driver reports under this name; None: its speed is not known."""
    found = [card for card in CARDS.values() if card.is_named(driver_name)]
    return max(found, key=lambda card: len(card.words), default=None)
