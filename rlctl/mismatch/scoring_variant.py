"""Hypotheses: in which ways an engine may have computed other log-probs than the trainer does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

#: A factor in the state it has in the trainer.
OWN = "trainer"

#: What two sides may differ in. Of changes that explain as much the first is named: from the coarse to the
#: fine, and last what is fitted.
Factor = Literal["prompt", "shift", "positions", "weights", "dtype", "steps", "attention", "rows", "sampling"]

#: Name of each mistake with positions, and what it does.
POSITION_MISTAKES: Mapping[str, str] = {
    "jump": "the response's positions go on from the padded width of the prompt, not from its length",
    "padding seen": "attention reads the prompts' padding",
    "counted": "position ids count the padding to the left of a prompt",
}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a distribution is truncated before it is drawn from, and renormalised."""

    kind: Literal["none", "top_p", "top_k", "min_p"] = "none"  # `none`, or the processor's name
    value: float = 0.0  # its parameter; 0 for `none`

    def __str__(self) -> str:
        """As settings are written, e.g. `top_p 0.9`."""
        return "no truncation" if self.kind == "none" else f"{self.kind} {self.value:.3g}"

    def is_like(self, other: Cut) -> bool:
        """Equal, as far as samples can show."""
        near = abs(self.value - other.value) <= (0 if self.kind == "top_k" else 0.025)
        return self.kind == other.kind and near


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """A distribution derived from logits: divided by `temperature`, then cut."""

    temperature: float
    cut: Cut = Cut()

    def __str__(self) -> str:
        """As settings are written, e.g. `temperature 0.7, top_p 0.9`."""
        cut = "" if self.cut.kind == "none" else f", {self.cut}"
        return f"temperature {self.temperature:.3g}{cut}"

    def is_like(self, other: SamplingSettings) -> bool:
        """Equal, as far as samples can show."""
        near = abs(self.temperature / other.temperature - 1.0) <= 0.03
        return near and self.cut.is_like(other.cut)


@dataclass(frozen=True, slots=True)
class ScoringVariant:
    """One way to compute log-probs of the engine's tokens with the trainer's model."""

    sampling: SamplingSettings  # of which distribution
    prompt: str = OWN  # which rendering of the prompts is read
    shift: int = 0  # reported log-prob t belongs to response token t + shift
    positions: str = OWN  # as in the trainer, or one of `POSITION_MISTAKES`
    weights: str = OWN  # which weights
    dtype: str = OWN  # precision they are cast to
    steps: str = OWN  # one pass over the response, or token by token with a cache (`decode`)
    attention: str = OWN  # kernel
    rows: str = OWN  # all at once with padding, or one by one without (`single`)

    def changed(self, factor: Factor, value: Any) -> ScoringVariant:
        """This variant with one factor changed."""
        change: dict[str, Any] = {factor: value}
        return replace(self, **change)

    def with_factor(self, factor: Factor, other: ScoringVariant) -> ScoringVariant:
        """This variant with one factor as in `other`."""
        return self.changed(factor, getattr(other, factor))
