"""Error of a mini-batch's gradient relative to that of the expected reward; the weight with the smallest one.

x_j is the gradient of group j under the rule in use, y_j its gradient under exact sequence weights:
y_j = Σ_i W_i A_i ∇ log π(response i), W = Π ρ, E[y_j] = g = ∇ E_π[reward]. Groups are independent, so
averages over pairs j ≠ k are unbiased estimates (U-statistics, Hoeffding 1948) of

    |m|² = E[x_j · x_k]    m·g = E[x_j · y_k]    |g|² = E[y_j · y_k]    noise = E|x_j|² − |m|²

and give the relative mean-squared error of a mini-batch of n groups at its best learning rate,

    error = min_c E|c·x̄ − g|² / |g|² = 1 − (m·g)² / (|g|² (|m|² + noise / n)),

where 0 is exact and 1 is useless. It includes both the rule's bias and the noise. The interval is a bootstrap
over groups.

`rollout_correction.auto` averages these moments over batches for each candidate weight. The candidate with
the smallest error is used for the next batch. benchmarks/auto_correction.py compares this with fixed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from rlctl.algos.rules import WeightRule

#: Tail quantile of the interval that is reported as 90 %, and number of bootstrap samples. Resampling few
#: groups with large weights underestimates the spread: with quantiles of 5 and 95 % the interval contained
#: the true error in 60 to 90 % of the cases, on problems that can be enumerated.
_TAIL, _DRAWS = 0.01, 200
#: Exact weights are too uneven to estimate the gradient if the effective number of groups, by |y_j|², …
_FEWEST_GROUPS = 25.0
#: … or the effective sample size of the sequence weights is below this limit.
_LOWEST_ESS = 0.4
#: The weights that `auto` chooses from; the first one is used until there is an estimate.
CANDIDATES: dict[str, WeightRule] = {"none": WeightRule(None)} | {
    f"{level}_{upper}": WeightRule(level, "truncate", upper=float(upper))
    for level in ("token", "sequence")
    for upper in (2, 5)
}
#: Weight of the moments so far, at each new batch.
_DECAY = 0.9
#: Lowest factor of the learning rate.
_LOWEST = 0.1


@dataclass(frozen=True, slots=True)
class GradientError:
    """An estimate with its 90 % interval, all in [0, 1]; the interval [0, 1] means: undetermined."""

    estimate: float
    low: float
    high: float

    @property
    def is_undetermined(self) -> bool:
        """Whether the interval contains every possible error."""
        return self.low <= 0.0 and self.high >= 1.0


def gradient_error(used: Tensor, exact: Tensor, ess: float, num_groups: float) -> GradientError:
    """The error of a mini-batch of `num_groups` groups.

    Args:
        used, exact: (G, K) x_j and y_j of G ≥ 2 independent groups, or sketches that preserve inner products;
            the result does not depend on their scales.
        ess: effective sample size of the sequence weights W, in (0, 1].
        num_groups: groups per optimizer step.
    """
    used, exact = used.double(), exact.double()
    grams = (used @ used.T, used @ exact.T, exact @ exact.T)
    equal_weights = torch.ones(1, len(used), dtype=torch.float64, device=used.device)
    estimate = float(_errors(equal_weights, grams, num_groups))
    sizes = grams[2].diagonal()
    in_effect = float(sizes.sum() ** 2 / sizes.square().sum().clamp(min=1e-300))
    if in_effect < _FEWEST_GROUPS or ess < _LOWEST_ESS:
        return GradientError(estimate, 0.0, 1.0)
    draw = torch.Generator().manual_seed(0)
    picked = torch.randint(len(used), (_DRAWS, len(used)), generator=draw)
    counts = torch.zeros(_DRAWS, len(used), dtype=torch.float64)
    counts.scatter_add_(1, picked, torch.ones_like(picked, dtype=torch.float64))
    errors = _errors(counts.to(used.device), grams, num_groups)
    low, high = errors.quantile(torch.tensor([_TAIL, 1.0 - _TAIL], dtype=torch.float64, device=errors.device))
    return GradientError(estimate, min(float(low), estimate), max(float(high), estimate))


def _errors(counts: Tensor, grams: tuple[Tensor, Tensor, Tensor], num_groups: float) -> Tensor:
    """(D,): the error if group j occurs `counts[d, j]` times; a group is not paired with itself."""
    squares, total = counts.square(), counts.sum(1)
    pairs = total.square() - squares.sum(1)
    norm, inner, signal = (
        (((counts @ gram) * counts).sum(1) - squares @ gram.diagonal()) / pairs for gram in grams
    )
    noise = counts @ grams[0].diagonal() / total - norm
    spread = signal * (norm + noise / num_groups)
    error = 1.0 - inner.clamp(min=0.0).square() / spread.clamp(min=1e-300)
    # A squared norm whose estimate is negative is about 0: the gradient cannot be determined.
    return torch.where(spread > 0.0, error, 1.0).clamp(0.0, 1.0)


# --- choice of the correction weight ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CandidateMoments:
    """Moments of the group gradients x_j of one weight, scaled so that E|x|² = E|y|² = 1.

    The scales make batches comparable: large weights W in one batch do not dominate the averages.

    Attributes:
        norm: |E x|².
        inner: E x · E y.
        signal: |E y|².
    """

    norm: float
    inner: float
    signal: float

    @classmethod
    def of(cls, used: Tensor, exact: Tensor) -> CandidateMoments:
        """Estimates from G ≥ 2 independent groups; `used` and `exact` are (G, K)."""
        groups = len(used)
        used, exact = (
            x / x.square().sum(1).mean().sqrt().clamp(min=1e-30) for x in (used.double(), exact.double())
        )

        def over_pairs(x: Tensor, y: Tensor) -> float:
            return float(x.sum(0) @ y.sum(0) - (x * y).sum()) / (groups * (groups - 1))

        return cls(over_pairs(used, used), over_pairs(used, exact), over_pairs(exact, exact))

    def merit(self, num_groups: float) -> float:
        """(1 − error) · |E y|² of a mini-batch of `num_groups` groups, with the error of `gradient_error`.

        |E y|² is the same for all candidates, and its estimate may be negative: the order does not need it.
        """
        norm = max(self.norm, 0.0)
        return max(self.inner, 0.0) ** 2 / (norm + (1.0 - norm) / num_groups)

    @property
    def squared_cosine(self) -> float | None:
        """cos² of the angle between E x and E y, in [0.1, 1]; None if the moments do not define it."""
        if self.norm <= 0 or self.signal <= 0:
            return None
        return min(max(max(self.inner, 0.0) ** 2 / (self.norm * self.signal), _LOWEST), 1.0)


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The weight of the next batch and the factor of its learning rate."""

    name: str = next(iter(CANDIDATES))
    lr_scale: float = 1.0


def averaged(
    means: Mapping[str, CandidateMoments], batch: Mapping[str, CandidateMoments]
) -> dict[str, CandidateMoments]:
    """Moving averages of the moments of each candidate, after one more batch."""
    return {**means, **{name: _mixed(means.get(name, new), new) for name, new in batch.items()}}


def choose(means: Mapping[str, CandidateMoments], num_groups: float, last: AutoChoice) -> AutoChoice:
    """The candidate with the smallest error; its squared cosine scales the learning rate.

    Values that the moments do not determine are kept from the last choice.
    """
    merits = {name: moments.merit(num_groups) for name, moments in means.items()}
    best = max(merits, key=lambda name: merits[name]) if any(merits.values()) else last.name
    cosine = means[best].squared_cosine if best in means else None
    return AutoChoice(best, last.lr_scale if cosine is None else cosine)


def _mixed(old: CandidateMoments, new: CandidateMoments) -> CandidateMoments:
    pairs = zip(astuple(old), astuple(new), strict=True)
    return CandidateMoments(*(_DECAY * before + (1.0 - _DECAY) * now for before, now in pairs))
