"""Sums that merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import pytest
import torch

from rlctl.algos.metric_sums import Additive, Moments, V, moments_of


@dataclass(frozen=True, slots=True)
class Sums(Additive, Generic[V]):
    n: V
    of: dict[str, Moments[V]]
    absent: V | None = None


def sums_of(values: list[float]) -> Sums[torch.Tensor]:
    x = torch.tensor(values, dtype=torch.float64)
    return Sums(torch.tensor(float(len(values))).double(), {"x": moments_of(x, x > -1e9)})


@pytest.mark.parametrize("shift", [0.0, 1e-6, 1.0, -3.0])
def test_parts_add_up_to_the_whole(shift: float) -> None:
    rows = [[1.0, 2.0, 4.0], [-2e9], [0.5], [1.5, 3.0]]
    rows = [[x + shift for x in row] for row in rows]
    flat = torch.tensor([x for row in rows for x in row if x > -1e9], dtype=torch.float64)
    parts = [sums_of(row) for row in rows]
    on_device = (parts[0] + parts[1] + parts[2] + parts[3]).to_host()
    at_once = Sums.merged(parts).to_host()
    hosts = [part.to_host() for part in parts]
    on_host = hosts[0] + hosts[1] + hosts[2] + hosts[3]
    for merged in (on_device, at_once, on_host):
        found: Moments[float] = merged.of["x"]
        assert merged.n == 7.0
        assert found.count == len(flat)
        assert found.mean == pytest.approx(flat.mean().item())
        assert found.mean_square == pytest.approx(flat.square().mean().item())
        assert found.std == pytest.approx(flat.std(correction=0).item())
        assert found.sample_std == pytest.approx(flat.std().item())
        assert (found.max, found.min) == (4.0 + shift, 0.5 + shift)
        assert found.ess == pytest.approx((flat.sum() ** 2 / (len(flat) * flat.square().sum())).item())


@pytest.mark.parametrize("factor", [1e-7, 0.4, 1.0, 3.0, 1e6])
def test_moments_of_divided_values(factor: float) -> None:
    values = torch.tensor([0.5, 1.0, 1.25, 2.0], dtype=torch.float64) * factor
    everything = torch.ones(4, dtype=torch.bool)
    found = moments_of(values, everything).to_host().divided(factor)
    expected = moments_of(values / factor, everything).to_host()
    for name in ("mean", "std", "sample_std", "ess", "max", "min"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9), name


def test_nothing_has_figures_too() -> None:
    found = moments_of(torch.ones(2), torch.zeros(2) > 0).to_host()
    assert [found.mean, found.std, found.sample_std, found.ess, found.max, found.min] == [0.0] * 6


def test_raw_and_truncated_effective_sample_size_differ() -> None:
    """The design page's example: log w ~ N(0, 3²), 64 weights, truncated at 2."""
    ess = []
    for seed in range(200):
        weights = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 3).exp()
        ess.append([sums_of(w.tolist()).to_host().of["x"].ess for w in (weights, weights.clamp(max=2))])
    raw, truncated = torch.tensor(ess).median(0).values.tolist()
    assert raw < 0.1
    assert truncated == pytest.approx(0.63, abs=0.04)
