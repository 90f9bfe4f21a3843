"""Hypotheses about how an engine's computation of log-probs may differ from the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

#: Value of a factor that is the same as in the trainer.
OWN = "trainer"

#: Factors in which the two sides may differ. Among changes that explain the same amount, the first is
#: reported: coarse factors come first, the fitted one last.
Factor = Literal["prompt", "shift", "positions", "weights", "dtype", "steps", "attention", "rows", "sampling"]

#: Errors in the treatment of positions: name → effect.
POSITION_MISTAKES: Mapping[str, str] = {
    "jump": "the response's positions start at the padded width of the prompt, not from its length",
    "padding seen": "attention reads the prompts' padding",
    "counted": "position ids count the padding to the left of a prompt",
}


@dataclass(frozen=True, slots=True)
class Cut:
    """Truncation of a distribution before sampling, with renormalisation."""

    kind: Literal["none", "top_p", "top_k", "min_p"] = "none"  # `none`, or the processor's name
    value: float = 0.0  # its parameter; 0 for `none`

    def __str__(self) -> str:
        """As settings are written, e.g. `top_p 0.9`."""
        return "no truncation" if self.kind == "none" else f"{self.kind} {self.value:.3g}"

    def is_like(self, other: Cut) -> bool:
        """Whether both are equal within the precision of an estimate from samples."""
        near = abs(self.value - other.value) <= (0 if self.kind == "top_k" else 0.025)
        return self.kind == other.kind and near


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """A distribution derived from logits: divided by `temperature`, then truncated."""

    temperature: float
    cut: Cut = Cut()

    def __str__(self) -> str:
        """As settings are written, e.g. `temperature 0.7, top_p 0.9`."""
        cut = "" if self.cut.kind == "none" else f", {self.cut}"
        return f"temperature {self.temperature:.3g}{cut}"

    def is_like(self, other: SamplingSettings) -> bool:
        """Whether both are equal within the precision of an estimate from samples."""
        near = abs(self.temperature / other.temperature - 1.0) <= 0.03
        return near and self.cut.is_like(other.cut)


@dataclass(frozen=True, slots=True)
class ScoringVariant:
    """One way to compute log-probs of the engine's tokens with the trainer's model."""

    sampling: SamplingSettings  # distribution of the log-probs
    prompt: str = OWN  # rendering of the prompts
    shift: int = 0  # reported log-prob t belongs to response token t + shift
    positions: str = OWN  # as in the trainer, or one of `POSITION_MISTAKES`
    weights: str = OWN  # name of the weights
    dtype: str = OWN  # precision of the model
    steps: str = OWN  # one pass over the response, or token by token with a cache (`decode`)
    attention: str = OWN  # kernel
    rows: str = OWN  # all at once with padding, or one by one without (`single`)

    def changed(self, factor: Factor, value: Any) -> ScoringVariant:
        """This variant with one factor changed."""
        return replace(self, **{factor: value})

    def with_factor(self, factor: Factor, other: ScoringVariant) -> ScoringVariant:
        """This variant with one factor as in `other`."""
        return self.changed(factor, getattr(other, factor))
