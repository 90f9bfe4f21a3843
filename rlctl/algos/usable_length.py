"""Up to which length products of ratios are useful as weights.

With χ² = E[ρ²] − 1 of a token, and independent tokens, E[(Π ρ)²] = (1 + χ²)^T. The effective sample size of
sequence weights, 1 / E[(Π ρ)²] of the sample, is therefore half of it at

    T* = ln 2 / ln(1 + χ²),

about ln 2 / σ² for log-ratios of a small standard deviation σ. Tokens are not independent, so that
`PrefixSums` measures the same on a run's own sequences: the effective sample size of the products over their
first T tokens, of those that have so many. The first formula follows from the definition; 1 / E[w²] is the
effective sample size of weights of mean 1 in importance sampling. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

#: Share of the sample that weights must keep.
HALF = 0.5
#: Fewest sequences of which an effective sample size is given.
_FEWEST = 16
#: Log-ratios, and sums of them, are clamped to ±this before `exp`, as in the correction.
_CLAMP = 20.0


def usable_length(chi2: float) -> float:
    """T* in tokens, of a token's χ²; ∞: the ratios do not vary.

    Raises:
        ValueError: χ² is NaN.
    """
    if math.isnan(chi2):
        raise ValueError("χ² is NaN")
    return math.log(2.0) / math.log1p(chi2) if chi2 > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Prefix:
    """Products over the first tokens of a run's sequences."""

    length: int  # number of tokens
    num_sequences: int  # those that have so many
    ess: float  # effective sample size of the products over the number of sequences


@dataclass(frozen=True, slots=True)
class UsableLength:
    """What sequence weights are good for in a run.

    Attributes:
        predicted: T*, tokens, from the tokens' χ²; ∞: their ratios do not vary.
        prefixes: by length, doubling.
        typical: median length of the sequences, tokens.
    """

    predicted: float
    prefixes: tuple[Prefix, ...]
    typical: int

    @property
    def measured(self) -> int | None:
        """The longest prefix up to which every one keeps half of the sample; None: there is none."""
        kept = None
        for prefix in self.prefixes:
            if prefix.ess < HALF:
                return kept
            kept = prefix.length
        return kept

    @property
    def is_exceeded(self) -> bool:
        """Whether half of the sequences are longer than the weights are useful."""
        limits = [self.predicted]
        if self.prefixes and self.prefixes[-1].ess < HALF:
            limits.append(self.measured or 1)
        return self.typical > max(limits)

    @property
    def text(self) -> str:
        """In words."""
        about = "any length" if math.isinf(self.predicted) else f"about {max(self.predicted, 1):,.0f} tokens"
        said = f"sequence weights keep half of the sample up to {about} (ln 2 / ln(1 + χ²))"
        if self.prefixes:
            last = self.prefixes[-1]
            is_open = self.measured == last.length
            told = f"{self.measured or 0:,} tokens{' or more' if is_open else ''}"
            said += f", up to {told} as measured on prefixes"
        said += f"; responses have {self.typical:,}"
        return said + ("" if not self.is_exceeded else f": {ADVICE}")


#: What helps where responses are longer.
ADVICE = "token weights, a geometric mean (biased), or a smaller gap"


@dataclass(slots=True)
class PrefixSums:
    """Collects the log-ratios of sequences, step by step."""

    _sums: dict[int, list[float]] = field(default_factory=dict)  # length → number, Σw, Σw²
    _lengths: list[int] = field(default_factory=list)
    _tokens: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # number, Σρ, Σρ²

    def add(self, log_ratio: NDArray[np.floating], lengths: NDArray[np.integer]) -> None:
        """Adds sequences.

        Args:
            log_ratio: (M,) log π_train − log π_rollout of their tokens, nats, one sequence after the other.
            lengths: (S,) tokens of each; a sequence with a NaN or an infinite log-ratio is left out.
        """
        for own in np.split(np.asarray(log_ratio, np.float64), np.cumsum(lengths)[:-1]):
            if len(own) and np.isfinite(own).all():
                self._add_one(own)

    def _add_one(self, own: NDArray[np.float64]) -> None:
        self._lengths.append(len(own))
        ratios = np.exp(np.clip(own, -_CLAMP, _CLAMP))
        for place, value in enumerate((float(len(own)), float(ratios.sum()), float((ratios**2).sum()))):
            self._tokens[place] += value
        running = np.exp(np.clip(np.cumsum(own), -_CLAMP, _CLAMP))
        length = 1
        while length <= len(own):
            weight = float(running[length - 1])
            sums = self._sums.setdefault(length, [0.0, 0.0, 0.0])
            for place, value in enumerate((1.0, weight, weight**2)):
                sums[place] += value
            length *= 2

    def result(self) -> UsableLength | None:
        """The figures; None: no sequence has finite log-ratios."""
        if not self._lengths:
            return None
        count = self._tokens[0]
        mean = self._tokens[1]
        square = self._tokens[2]
        chi2 = max(count * square / mean**2 - 1.0, 0.0)  # of ρ with mean 1, as effective sample sizes are
        prefixes = [
            Prefix(length, int(number), total**2 / (number * squares))
            for length, (number, total, squares) in sorted(self._sums.items())
            if number >= _FEWEST
        ]
        return UsableLength(usable_length(chi2), tuple(prefixes), int(np.median(self._lengths)))
