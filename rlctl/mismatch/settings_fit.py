"""Fits temperature and truncation to the engine's reported log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from rlctl.mismatch.variants import AGREE, Cut, SamplingSettings

_TOP_P = [round(0.5 + 0.01 * i, 2) for i in range(50)] + [0.995, 0.999]
_TOP_K = [1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 200, 256, 512, 1000]
_MIN_P = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3]
#: Errors are clamped to this, so that a single outlier does not determine the fit.
_LARGEST_ERROR = 5.0


class RankedLogits:
    """Logits (N, V) before any temperature, sorted, and the rank of the sampled `tokens` (N,) among them.

    `cuts` are truncations to try besides the usual values, such as the requested one.
    """

    def __init__(self, logits: Tensor, tokens: Tensor, cuts: Iterable[Cut] = ()) -> None:
        logits = logits.float()
        self._chosen = logits.gather(1, tokens[:, None])
        self._rank = (logits > self._chosen).sum(1, keepdim=True)
        self._sorted = logits.sort(dim=1, descending=True).values
        grid = {Cut()} | {cut for cut in cuts if cut.kind != "none"}
        grid |= {Cut("top_p", p) for p in _TOP_P} | {Cut("min_p", m) for m in _MIN_P}
        grid |= {Cut("top_k", k) for k in _TOP_K if k < logits.shape[1]}
        #: `none` first, then by kind and value
        self.cuts = sorted(grid, key=lambda cut: (cut.kind != "none", cut.kind, cut.value))

    def log_probs(self, settings: SamplingSettings) -> Tensor:
        """(N,) of the sampled tokens; a token that is cut off is treated as the last one kept."""
        log_probs, log_masses = self._at(settings.temperature, [settings.cut])
        return log_probs - log_masses[:, 0]

    def errors(self, reported: Tensor, temperature: float, cuts: Sequence[Cut] | None = None) -> Tensor:
        """Mean |log-prob − reported| for every cut, (K,); `reported` is (N,)."""
        log_probs, log_masses = self._at(temperature, cuts or self.cuts)
        gaps = log_probs[:, None] - log_masses - reported[:, None]
        return gaps.abs().nan_to_num(_LARGEST_ERROR).clamp(max=_LARGEST_ERROR).mean(0)

    def _at(self, temperature: float, cuts: Sequence[Cut]) -> tuple[Tensor, Tensor]:
        """Log-probs (N,), and log of the mass that each of K truncations keeps (N, K)."""
        scaled = self._sorted / temperature
        falling = -scaled
        total = scaled.logsumexp(1, keepdim=True)
        cumulative = (scaled - total).exp().cumsum(1)
        kinds = groupby(cuts, key=lambda cut: cut.kind)
        last = torch.cat([_last_kept(list(group), falling, cumulative) for _, group in kinds], dim=1)
        mass = cumulative.gather(1, torch.maximum(last, self._rank).clamp(max=scaled.shape[1] - 1))
        log_mass = torch.where(last >= scaled.shape[1] - 1, 0.0, mass.clamp(max=1.0).log())
        return (self._chosen / temperature - total).squeeze(1), log_mass


def _last_kept(cuts: Sequence[Cut], falling: Tensor, cumulative: Tensor) -> Tensor:
    """(N, K) rank, from 0, of the least likely token that each of K truncations of one kind keeps.

    `falling` are the negated logits (N, V), ascending; `cumulative` (N, V) is the total probability of each
    token and all more likely ones.
    """
    size = falling.shape[1]
    values = falling.new_tensor([cut.value for cut in cuts]).expand(len(falling), len(cuts))
    if cuts[0].kind == "top_p":
        return torch.searchsorted(cumulative, values.contiguous()).clamp(max=size - 1)
    if cuts[0].kind == "min_p":
        return torch.searchsorted(falling, falling[:, :1] - values.log(), right=True) - 1
    last = values.long() - 1 if cuts[0].kind == "top_k" else torch.full_like(values, size - 1).long()
    return last.clamp(max=size - 1)


def fit_reported(ranked: RankedLogits, reported: Tensor, asked: SamplingSettings) -> SamplingSettings:
    """The simplest settings that explain the reported log-probs (N,) about as well as the best fit.

    Preferred, in this order: the requested temperature without truncation, the raw distribution, and the
    requested settings.
    """
    temperature = _best(lambda t: float(ranked.errors(reported, t).min()), asked.temperature)
    best = float(ranked.errors(reported, temperature).min())
    enough = 1.1 * best + AGREE

    def error(settings: SamplingSettings) -> float:
        return float(ranked.errors(reported, settings.temperature, [settings.cut]))

    temperatures = (asked.temperature, 1.0, _rounded(temperature), temperature)
    plain = [SamplingSettings(value) for value in temperatures]
    for simple in (*plain[:2], asked, *plain[2:]):
        if error(simple) <= enough:
            return simple
    for value in temperatures:
        errors = ranked.errors(reported, value)
        if float(errors.min()) <= enough:
            return SamplingSettings(value, _chosen_cut(ranked.cuts, errors <= enough, asked.cut))
    raise AssertionError("the best fit is as good as itself")


def _best(loss: Callable[[float], float], asked: float) -> float:
    """The temperature with the smallest loss: a grid, then a bounded search around the best grid point."""
    from scipy.optimize import minimize_scalar

    grid = sorted({*np.geomspace(0.2, 5.0, 15).tolist(), 1.0, asked, 1.0 / asked, asked * asked})
    losses = [loss(value) for value in grid]
    index = int(np.argmin(losses))
    low = grid[max(index - 1, 0)]
    high = grid[min(index + 1, len(grid) - 1)]
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-5})
    return float(found.x) if found.fun < losses[index] else grid[index]


def _chosen_cut(cuts: Sequence[Cut], good: Tensor, asked: Cut) -> Cut:
    """The truncation to report among those that fit: the requested one, otherwise the middle one of the first
    kind that fits."""
    fitting = [cut for cut, fits in zip(cuts, good.tolist(), strict=True) if fits]
    if asked in fitting:
        return asked
    for kind in ("top_p", "top_k", "min_p"):
        of_kind = [cut for cut in fitting if cut.kind == kind]
        if of_kind:
            return of_kind[len(of_kind) // 2]
    return fitting[0]


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
