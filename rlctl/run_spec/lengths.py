"""Lengths of prompts and responses that a plan assumes: a log-normal distribution, cut at the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

#: Mean response, as a share of the limit, if nothing is known; mean prompt, as a share of its limit.
MEAN_RESPONSE, _MEAN_PROMPT = 0.4, 0.5
#: Standard deviation of the logarithm of a response's length.
_SPREAD = 0.7
#: Number of responses, at equal steps of probability, that stand for all.
_QUANTILES = 64


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and responses of one step."""

    prompt: float  # mean of prompts
    response: float  # mean of responses
    limit: int  # of a response

    @classmethod
    def of(cls, max_prompt: int, max_response: int, mean_response: float | None = None) -> Lengths:
        """Lengths of a run with these limits; `mean_response` is known, or None."""
        mean = MEAN_RESPONSE * max_response if mean_response is None else mean_response
        return cls(_MEAN_PROMPT * max_prompt, max(1.0, min(mean, float(max_response))), max_response)

    @cached_property
    def responses(self) -> tuple[float, ...]:
        """Lengths of `_QUANTILES` responses in ascending order, whose mean is that of all."""
        scores = [NormalDist().inv_cdf((place + 0.5) / _QUANTILES) for place in range(_QUANTILES)]

        def cut(median: float) -> list[float]:
            return [min(median * math.exp(_SPREAD * score), float(self.limit)) for score in scores]

        low = 0.0
        high = self.limit * math.exp(_SPREAD * scores[-1])
        for _ in range(60):  # bisection: the mean rises with the median
            middle = (low + high) / 2
            low, high = (middle, high) if sum(cut(middle)) < self.response * _QUANTILES else (low, middle)
        return tuple(cut(high))

    def longest(self, count: float) -> float:
        """The longest of `count` responses."""
        at_most = max(self.responses)
        if at_most >= self.limit or count <= _QUANTILES:
            return at_most
        median = (self.responses[_QUANTILES // 2 - 1] + self.responses[_QUANTILES // 2]) / 2
        score = NormalDist().inv_cdf(1.0 - 0.5 / count)
        return min(median * math.exp(_SPREAD * score), float(self.limit))

    @property
    def total(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt + self.response

    @property
    def attended(self) -> float:
        """Mean number of positions that a token attends to, itself included, with causal attention."""
        squares = sum((self.prompt + length) ** 2 for length in self.responses) / _QUANTILES
        return squares / (2 * self.total)

    @property
    def context(self) -> float:
        """Mean length of a sequence while it is sampled, over all of its decoding steps."""
        squares = sum(length**2 for length in self.responses) / _QUANTILES
        return self.prompt + squares / (2 * self.response)
