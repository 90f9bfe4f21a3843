"""Stepwise search for the changes of the scoring variant that together close the gap.

Forward: the change that explains most is accepted, and the others are tried again on top of it. Backward:
changes that the others make unnecessary are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rlctl.mismatch.score import VariantScorer
from rlctl.mismatch.variants import AGREE, OWN, Factor, SamplingSettings, ScoringVariant

FACTORS: tuple[Factor, ...] = get_args(Factor)
#: A change is accepted if it removes this fraction of the remaining mean |log-ratio|. Each of two equal and
#: independent causes removes 29 %, each of three 18 %, and a temperature fitted to noise a few percent.
_MATERIAL = 0.2
#: A change is removed if the gap grows at most by this factor without it.
_SLACK = 1.1
#: Fitted settings that leave more than this fraction of the gap are rejected.
_CONFIRMED = 0.3


@dataclass(frozen=True, slots=True)
class Taken:
    """One change that explains a part of the gap, on top of the previous ones."""

    factor: Factor
    before: ScoringVariant
    after: ScoringVariant


@dataclass(frozen=True, slots=True)
class Explanation:
    """Result of a search over scoring variants."""

    start: ScoringVariant  # the trainer's own
    variant: ScoringVariant  # the one closest to the engine
    taken: tuple[Taken, ...]  # the changes between both; those that explain most come first


class Search:
    """Finds the changes that close the gap between the engine and the trainer.

    `asked` are the requested sampling settings; the trainer applies their temperature, and if `is_exact`
    their truncation.
    """

    def __init__(self, scorer: VariantScorer, asked: SamplingSettings, is_exact: bool) -> None:
        self._scorer = scorer
        self._asked = asked
        self._start = ScoringVariant(asked if is_exact else SamplingSettings(asked.temperature))

    def explain(self) -> Explanation:
        """Runs the search."""
        variant = self._found(FACTORS)
        fitted = variant.sampling != self._start.sampling
        if fitted and self._left(variant) > _CONFIRMED * self._left(self._start):
            # Free parameters fit a part of any gap, in particular of a gap caused by other weights.
            variant = self._found(tuple(factor for factor in FACTORS if factor != "sampling"))
        variant = self._pruned(variant)
        return Explanation(self._start, variant, self._in_order(variant))

    def _found(self, factors: tuple[Factor, ...]) -> ScoringVariant:
        """Forward search: accepts the best change as long as one helps."""
        variant = self._start
        for _ in range(2 * len(factors)):  # a factor may be changed again, to another value
            if self._scorer.gap(variant).agrees:
                break
            better = self._best(
                variant, [other for factor in factors for other in self._changes(variant, factor)]
            )
            if better is None:
                break
            variant = better
        return variant

    def _changes(self, base: ScoringVariant, factor: Factor) -> list[ScoringVariant]:
        """Variants that differ from `base` in this factor and might explain the remaining gap."""
        values: Sequence[Any] = (1, -1)
        if factor == "sampling":
            values = [self._scorer.fitted(base, self._asked)]
        elif factor == "prompt":
            values = [name for name in self._scorer.prompts if name != OWN]
        return [base.changed(factor, value) for value in values if value != getattr(base, factor)]

    def _best(self, base: ScoringVariant, others: list[ScoringVariant]) -> ScoringVariant | None:
        """The variant with the smallest gap, if it is materially smaller; among similar ones the first."""
        left = [(self._left(other), other) for other in others]
        limit = (1.0 - _MATERIAL) * self._left(base)
        smallest = min((gap for gap, _ in left), default=limit)
        if smallest >= limit:
            return None
        return next(other for gap, other in left if gap <= smallest * _SLACK + AGREE / 10)

    def _left(self, variant: ScoringVariant) -> float:
        """Mean |log-ratio| under a variant."""
        return self._scorer.gap(variant).abs_mean

    def _pruned(self, variant: ScoringVariant) -> ScoringVariant:
        """Backward search: removes changes that the others make unnecessary, fitted and fine ones first."""
        for factor in reversed(FACTORS):
            without = variant.with_factor(factor, self._start)
            if self._left(without) <= self._left(variant) * _SLACK + AGREE / 10:
                variant = without
        return variant

    def _in_order(self, variant: ScoringVariant) -> tuple[Taken, ...]:
        """The changes, ordered by what they explain, each on top of the previous ones."""
        left = [f for f in FACTORS if getattr(variant, f) != getattr(self._start, f)]
        taken: list[Taken] = []
        now = self._start
        while left:
            factor = min(left, key=lambda factor: self._left(now.with_factor(factor, variant)))
            left.remove(factor)
            after = now.with_factor(factor, variant)
            taken.append(Taken(factor, now, after))
            now = after
        return tuple(taken)
