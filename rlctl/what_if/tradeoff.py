"""What a replay found, as plain records: no torch here, so that reports can hold and draw them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlctl.what_if.settings import Setting


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """A figure and its sampling interval, which holds 90 % of its resamples.

    It says how much the figure depends on which responses were sampled. It does not hold the error of the
    model behind the figure, and is no 90 % confidence interval of the truth.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """What one setting does to the replayed responses.

    Attributes:
        setting: what was tried.
        same_as: other settings that do the same to these responses.
        raw_ess, applied_ess: effective sample size over number, before and after bound and rejection,
            in tokens at token level and for settings without a weight, else in sequences.
        kept_tokens, kept_sequences: share that survives rejection (a sequence: with all of its tokens).
        max_weight: the largest weight that reaches the loss.
        at_bound: share of weights the bound changes.
        saturated: share of sequences whose product of ratios is only the clamp e^±20.
        error: relative mean-squared error of the gradient at its own best scale, in [0, 1]; None
            where no advantage differs from zero.
        bias, variance: bias² and noise relative to the useful signal; error = s/(1 + s) of their sum s.
        plain_error: the same error without rescaling (may exceed 1).
    """

    setting: Setting
    same_as: tuple[str, ...]
    raw_ess: IntervalEstimate
    applied_ess: IntervalEstimate
    kept_tokens: float
    kept_sequences: float
    max_weight: float
    at_bound: float
    saturated: float
    error: IntervalEstimate | None
    bias: IntervalEstimate | None
    variance: IntervalEstimate | None
    plain_error: float | None

    def figures(self) -> tuple[str, ...]:
        """Every figure to six digits; equal for settings that do the same to these responses."""
        estimates = (self.raw_ess, self.applied_ess, self.error, self.bias, self.variance)
        values = [value for one in estimates if one for value in (one.value, one.low, one.high)]
        values += [self.kept_tokens, self.kept_sequences, self.max_weight, self.at_bound, self.saturated]
        return tuple(f"{value:.6g}" for value in values)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting whose sampling interval of the error ends lowest, or the run's own.

    Attributes:
        name: of the setting.
        overrides: the setting as `key=value` for `rlctl train`; empty where the run should stay as it is.
        why: the criterion and its figures in one sentence.
        decisive: whether it beats the run's own setting in at least 95 % of resamples and by at least 5 %;
            None where the run's own setting is unknown.
    """

    name: str
    overrides: tuple[str, ...]
    why: str
    decisive: bool | None


@dataclass(frozen=True, slots=True)
class Tradeoff:
    """A whole replay.

    Attributes:
        outcomes: one per different rule, smallest error first.
        recommended: None where nothing can be recommended, see `notes`.
        plainest: the setting with the smallest `plain_error`.
        num_steps, num_groups, num_sequences, num_tokens: what was replayed.
        groups_per_batch: prompt groups of the mini-batch that errors are stated for.
        trust: weight of the data in bias and signal, the rest being the prior's.
        notes: what had to be assumed or left out.
    """

    outcomes: tuple[SettingOutcome, ...]
    recommended: Recommendation | None
    plainest: str | None
    num_steps: int
    num_groups: int
    num_sequences: int
    num_tokens: int
    groups_per_batch: float
    trust: float
    notes: tuple[str, ...]

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
        rest = {name: getattr(self, name) for name in _SCALARS}
        chosen = asdict(self.recommended) if self.recommended else None
        return rest | {"recommended": chosen, "notes": list(self.notes), "settings": rows}

    def frontier(self) -> tuple[SettingOutcome, ...]:
        """Settings no other one beats in both bias and variance, by variance."""
        judged = [outcome for outcome in self.outcomes if outcome.bias and outcome.variance]
        judged.sort(key=_point)
        best, found = math.inf, []
        for outcome in judged:
            if (bias := _point(outcome)[1]) < best:
                best = bias
                found.append(outcome)
        return tuple(found)


_SCALARS = (
    "plainest",
    "num_steps",
    "num_groups",
    "num_sequences",
    "num_tokens",
    "groups_per_batch",
    "trust",
)


def _point(outcome: SettingOutcome) -> tuple[float, float]:
    """(variance, bias)."""
    if outcome.variance is None or outcome.bias is None:
        return math.inf, math.inf
    return outcome.variance.value, outcome.bias.value
