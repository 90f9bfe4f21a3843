"""What a replay found, as plain records: no torch here, so that reports can hold and draw them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlctl.what_if.settings import Setting


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """A figure and its sampling interval, which holds 90 % of its resamples.

    It shows how much the figure depends on which responses were sampled. It does not hold the error of the
    model behind the figure, and is no 90 % confidence interval of the truth.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """What one setting does to the replayed responses."""

    setting: Setting  # what was tried
    same_as: tuple[str, ...]  # other settings that do the same to these responses
    #: raw_ess, applied_ess: effective sample size over number, before and after bound and rejection, in
    #: tokens at token level and for settings without a weight, else in sequences
    raw_ess: IntervalEstimate
    applied_ess: IntervalEstimate
    #: kept_tokens, kept_sequences: share that survives rejection (a sequence: with all of its tokens)
    kept_tokens: float
    kept_sequences: float
    max_weight: float  # the largest weight that reaches the loss
    at_bound: float  # share of weights the bound changes
    saturated: float  # share of sequences whose product of ratios is only the clamp e^±20
    #: relative mean-squared error of the gradient at its own best scale, in [0, 1]; None where no advantage
    #: differs from zero
    error: IntervalEstimate | None
    #: bias, variance: bias² and noise relative to the useful signal; error = s/(1 + s) of their sum s
    bias: IntervalEstimate | None
    variance: IntervalEstimate | None
    plain_error: float | None  # the same error without rescaling (may exceed 1)

    def figures(self) -> tuple[str, ...]:
        """Every figure to six digits; equal for settings that do the same to these responses."""
        estimates = (self.raw_ess, self.applied_ess, self.error, self.bias, self.variance)
        values = [value for one in estimates if one for value in (one.value, one.low, one.high)]
        values += [self.kept_tokens, self.kept_sequences, self.max_weight, self.at_bound, self.saturated]
        return tuple(f"{value:.6g}" for value in values)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting whose sampling interval of the error ends lowest, or the run's own."""

    name: str  # of the setting
    #: the setting as `key=value` for `rlctl train`; empty where the run should stay as it is
    overrides: tuple[str, ...]
    why: str  # the criterion and its figures in one sentence
    #: whether it beats the run's own setting in at least 95 % of resamples and by at least 5 %; None where
    #: the run's own setting is unknown
    decisive: bool | None


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A whole replay."""

    outcomes: tuple[SettingOutcome, ...]  # one per different rule, smallest error first
    recommended: Recommendation | None  # None where nothing can be recommended, see `notes`
    plainest: str | None  # the setting with the smallest `plain_error`
    #: num_steps, num_groups, num_sequences, num_tokens: what was replayed
    num_steps: int
    num_groups: int
    num_sequences: int
    num_tokens: int
    groups_per_batch: float  # prompt groups of the mini-batch that errors are stated for
    trust: float  # weight of the data in bias and signal, the rest being the prior's
    notes: tuple[str, ...]  # what had to be assumed or left out

    def outcome(self, name: str) -> SettingOutcome:
        """By any of its names.

        Raises:
            KeyError: there is none.
        """
        for outcome in self.outcomes:
            if name == outcome.setting.name or name in outcome.same_as:
                return outcome
        raise KeyError(name)

    def with_notes(self, *notes: str) -> Tradeoff:
        """The same with further notes, put first."""
        return replace(self, notes=(*notes, *self.notes))

    def as_document(self) -> dict[str, Any]:
        """For JSON: plain types, no infinities."""
        rows = []
        for outcome in self.outcomes:
            row: dict[str, Any] = {"name": outcome.setting.name, "family": outcome.setting.family}
            row["overrides"] = list(outcome.setting.overrides)
            fields = asdict(outcome)
            del fields["setting"]
            rows.append(row | fields)
        counts = ("num_steps", "num_groups", "num_sequences", "num_tokens", "groups_per_batch", "trust")
        rest = {name: getattr(self, name) for name in ("plainest", *counts)}
        chosen = asdict(self.recommended) if self.recommended else None
        return rest | {"recommended": chosen, "notes": list(self.notes), "settings": rows}

    def frontier(self) -> tuple[SettingOutcome, ...]:
        """Settings no other one beats in both bias and variance, by variance."""
        points = [
            (one.variance.value, one.bias.value, one) for one in self.outcomes if one.bias and one.variance
        ]
        best, found = math.inf, []
        for _, bias, outcome in sorted(points, key=lambda point: point[:2]):
            if bias < best:
                best = bias
                found.append(outcome)
        return tuple(found)
