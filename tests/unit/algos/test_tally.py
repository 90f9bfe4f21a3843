"""Sums that merge."""

from __future__ import annotations

import pytest
import torch

from rlctl.algos.tally import Tally, TallyBuilder


def tally_of(values: list[list[float]], centre: float = 0.0) -> Tally:
    """One family; each row's values summed as distances from `centre`."""
    builder = TallyBuilder()
    rows = [torch.tensor(row, dtype=torch.float64) for row in values]
    counts = torch.tensor([float(len(row)) for row in rows], dtype=torch.float64)
    total = torch.stack([(row - centre).sum() for row in rows])
    squares = torch.stack([(row - centre).square().sum() for row in rows])
    high = torch.stack([row.max() if len(row) else torch.tensor(9e9).double() for row in rows])
    low = torch.stack([row.min() if len(row) else torch.tensor(-9e9).double() for row in rows])
    builder.family("x", counts, total, squares, high, low, counts > 0)
    return Tally(builder.sums, builder.maxima)


@pytest.mark.parametrize("centre", [0.0, 1.0])
def test_parts_add_up_to_the_whole(centre: float) -> None:
    rows = [[1.0, 2.0, 4.0], [], [0.5], [1.5, 3.0]]
    flat = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    on_device = (tally_of(rows[:1], centre) + tally_of(rows[1:], centre)).to_host()
    on_host = tally_of(rows[:3], centre).to_host() + tally_of(rows[3:], centre).to_host()
    for merged in (on_device, on_host, tally_of(rows, centre).to_host()):
        found = merged.moments("x", centre)
        assert found.mean == pytest.approx(flat.mean().item())
        assert found.std == pytest.approx(flat.std(correction=0).item())
        assert found.sample_std == pytest.approx(flat.std().item())
        assert (found.max, found.min) == (4.0, 0.5)
        assert found.ess == pytest.approx((flat.sum() ** 2 / (len(flat) * flat.square().sum())).item())


def test_nothing_has_figures_too() -> None:
    found = tally_of([[], []]).to_host().moments("x")
    assert [found.mean, found.std, found.sample_std, found.ess, found.max, found.min] == [0.0] * 6


def test_raw_and_truncated_effective_sample_size_tell_different_stories() -> None:
    """The design page's example: log w ~ N(0, 3²), 64 weights, truncated at 2."""
    ess = []
    for seed in range(200):
        weights = (torch.randn(64, generator=torch.Generator().manual_seed(seed)).double() * 3).exp()
        ess.append(
            [tally_of([w.tolist()]).to_host().moments("x").ess for w in (weights, weights.clamp(max=2))]
        )
    raw, truncated = torch.tensor(ess).median(0).values.tolist()
    assert raw < 0.1
    assert truncated == pytest.approx(0.63, abs=0.04)
