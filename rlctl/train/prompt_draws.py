"""State of dynamic sampling: position in the data, and the measured difficulty of prompts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlctl.algos.advantages import spread_probability
from rlctl.errors import RunFailure


@dataclass
class PromptDraws:
    """Position in the prompts, and their measured scores; the same on every rank.

    Attributes:
        position: prompts drawn so far, over all epochs, skipped ones included.
        low, high: smallest and largest mean score of a group so far.
        measured: row → mean score of its last group, and number of graded responses in it.
    """

    position: int = 0
    low: float = math.inf
    high: float = -math.inf
    measured: dict[int, tuple[float, int]] = field(default_factory=dict)

    def note(self, row: int, mean: float, count: int) -> None:
        """Records the mean score of a prompt's group."""
        self.low, self.high = min(self.low, mean), max(self.high, mean)
        self.measured[row] = (mean, count)

    def chance(self, row: int, n: int, floor: float) -> float:
        """Probability of drawing a prompt at its turn: that its group has spread, at least `floor`."""
        if row not in self.measured or self.high <= self.low:
            return 1.0
        mean, count = self.measured[row]
        rate = ((mean - self.low) / (self.high - self.low) * count + 1.0) / (count + 2.0)
        return max(floor, spread_probability(rate, n))

    def save(self, path: Path) -> None:
        """Writes the state as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PromptDraws:
        """Reads a file that `save` wrote.

        Raises:
            RunFailure: the file cannot be read.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            measured = {int(row): (float(mean), int(n)) for row, (mean, n) in given.pop("measured").items()}
            return cls(**given, measured=measured)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"the state of dynamic sampling cannot be read: {error}"
            raise RunFailure(what, where=str(path)) from error
