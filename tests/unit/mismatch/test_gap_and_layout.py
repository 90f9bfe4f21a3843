"""The gap's statistics by their definitions; layouts; which token a shifted report is of."""

from __future__ import annotations

import pytest
import torch

from rlctl.mismatch.score import EngineSample, lay_out, measure, parts_of


def test_statistics_are_what_they_are_called() -> None:
    draw = torch.Generator().manual_seed(0)
    trainer, engine = -2 * torch.rand(2, 5, 7, generator=draw)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [0], [5]])
    gap = measure(trainer, engine, mask)
    log_ratio = (trainer - engine)[mask].double()
    ratio = log_ratio.exp()
    rows = torch.where(mask, trainer - engine, 0.0).double().sum(1)[mask.any(1)].exp()
    assert gap.mean == pytest.approx(float(log_ratio.mean()), rel=1e-5)
    assert gap.abs_mean == pytest.approx(float(log_ratio.abs().mean()), rel=1e-5)
    assert gap.std == pytest.approx(float(log_ratio.std(unbiased=False)), rel=1e-5)
    assert gap.abs_max == pytest.approx(float(log_ratio.abs().max()), rel=1e-5)
    assert gap.k3 == pytest.approx(float((ratio - 1 - log_ratio).mean()), rel=1e-4)
    assert gap.ess_token == pytest.approx(float(ratio.sum() ** 2 / (16 * ratio.square().sum())), rel=1e-5)
    assert gap.ess_sequence == pytest.approx(float(rows.sum() ** 2 / (4 * rows.square().sum())), rel=1e-5)
    assert (gap.num_tokens, gap.num_nonfinite) == (16, 0)


def test_the_gap_is_divided_by_position_and_by_probability() -> None:
    engine = torch.tensor([[0.05, 0.3, 0.95, 0.95, 0.95], [0.3, 0.3, 1.0, 1.0, 1.0]]).log()
    engine[1, 2:] = torch.nan  # padding
    mask = engine.isfinite()
    gap = torch.tensor([[0.5, -0.2, 0.0, 0.0, 0.1], [0.1, 0.1, 0.0, 0.0, 0.0]])
    found = {(part.by, part.low): part for part in parts_of(engine + gap, engine, mask)}
    assert {key: part.num_tokens for key, part in found.items()} == {
        ("position", 1.0): 6, ("position", 5.0): 1,
        ("probability", 0.0): 1, ("probability", 0.1): 3, ("probability", 0.9): 3,
    }  # fmt: skip
    assert found["probability", 0.1].abs_mean == pytest.approx(0.4 / 3, rel=1e-5)
    assert found["position", 5.0].share == pytest.approx(0.01 / 0.32, rel=1e-4)
    assert found["position", 5.0].high == 9.0
    assert found["probability", 0.9].high is None
    assert parts_of(engine, engine, torch.zeros_like(mask)) == ()


def test_nothing_to_compare_is_no_gap() -> None:
    nothing = measure(torch.zeros(2, 3), torch.full((2, 3), torch.nan), torch.ones(2, 3, dtype=torch.bool))
    assert (nothing.abs_mean, nothing.num_tokens, nothing.num_nonfinite) == (0.0, 0, 2)


def test_layout_is_the_trainers() -> None:
    responses, mask = torch.tensor([[7, 8], [9, 0]]), torch.tensor([[True, True], [True, False]])
    layout = lay_out([[5], [5, 6, 4]], responses, mask, mask, pad_id=0)
    assert layout.input_ids.tolist() == [[0, 0, 5, 7, 8], [5, 6, 4, 9, 0]]
    assert layout.attention_mask.int().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert layout.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_report_is_of_another_token(shift: int) -> None:
    truth = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]])
    mask = truth != 0
    reported = torch.zeros_like(truth)
    for row in range(2):
        for token in range(4):
            if 0 <= token + shift < 4:
                reported[row, token] = truth[row, token + shift]
    moved, has_one = EngineSample(1, [[1], [1]], truth.long(), mask, reported, mask).shifted(shift)
    assert torch.equal(moved[has_one], truth[has_one])
    assert int(has_one.sum()) == 4
