"""Results of a replay as plain records. Imports no torch, because reports load them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rlctl.algos.usable_length import UsableLength
from rlctl.what_if.settings import Setting


class IntervalEstimate(NamedTuple):
    """A value and its sampling interval, which contains 90 % of its resamples.

    The interval shows how much the value depends on which responses were sampled. It does not include the
    error of the model used for the estimate, and is not a 90 % confidence interval of the true value.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """Results of one setting on the replayed responses."""

    setting: Setting
    #: raw_ess, applied_ess: effective sample size divided by the number of samples, before and after bound
    #: and rejection. Samples are tokens at token level and for settings without a weight, otherwise sequences
    raw_ess: float
    applied_ess: float
    #: kept_tokens, kept_sequences: share that is not rejected (a sequence: with all of its tokens)
    kept_tokens: float
    kept_sequences: float
    max_weight: float  # the largest weight that reaches the loss
    at_bound: float  # share of weights that the bound changes
    #: relative mean-squared error of the gradient at its best scale, in [0, 1]; None if no advantage differs
    #: from zero or there is only one prompt group
    error: IntervalEstimate | None
    same_as: tuple[str, ...] = ()  # other settings with the same results, to three decimals

    @property
    def figures(self) -> tuple[str, ...]:
        """All values to three decimals; equal for settings with the same results on these responses."""
        values = [self.raw_ess, self.applied_ess, self.kept_tokens, self.kept_sequences, self.max_weight]
        return tuple(f"{value:.3f}" for value in (*values, self.at_bound, *(self.error or ())))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting whose sampling interval of the error has the smallest upper end, or the run's own."""

    name: str  # name of the setting
    #: the setting as `key=value` for `rlctl train`; empty if the run's setting should not change
    overrides: tuple[str, ...]
    why: str  # the criterion and its values in one sentence


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """Result of a whole replay."""

    outcomes: tuple[SettingOutcome, ...]  # one per different rule, smallest error first
    recommended: Recommendation | None  # None if nothing can be recommended, see `notes`
    #: num_steps, num_groups, num_sequences, num_tokens: numbers of replayed items; a sequence is an episode
    num_steps: int
    num_groups: int
    num_sequences: int
    num_tokens: int
    groups_per_batch: float  # prompt groups of the mini-batch that the errors apply to
    notes: tuple[str, ...]  # assumptions and omissions
    usable_length: UsableLength | None = None  # of sequence weights; None: no log-ratio is finite

    def as_document(self) -> dict[str, Any]:
        """Converts to plain types for JSON."""
        settings = [
            {
                "name": outcome.setting.name,
                "family": outcome.setting.family,
                "overrides": outcome.setting.overrides,
            }
            | {key: value for key, value in asdict(outcome).items() if key not in {"setting", "error"}}
            | {"error": outcome.error and outcome.error._asdict()}
            for outcome in self.outcomes
        ]
        document = asdict(replace(self, outcomes=()))
        del document["outcomes"]
        usable = self.usable_length
        if usable is not None:
            known = {"predicted": usable.predicted if math.isfinite(usable.predicted) else None}
            document["usable_length"] |= known | {"measured": usable.measured, "text": usable.text}
        return document | {"settings": settings}
