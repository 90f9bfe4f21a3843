"""The gap's statistics by their definitions; layouts; which token a shifted report is of."""

from __future__ import annotations

import pytest
import torch

from rlctl.algos.segments import Segments
from rlctl.mismatch import score
from rlctl.mismatch.score import EngineSample, VariantScorer, measure, parts_of
from rlctl.mismatch.variants import OWN, Cut, SamplingSettings, ScoringVariant
from tests.unit.mismatch.planted import MODEL


def test_statistics_are_what_they_are_called() -> None:
    draw = torch.Generator().manual_seed(0)
    trainer, engine = -2 * torch.rand(2, 16, generator=draw)
    lengths = [7, 3, 1, 0, 5]
    gap = measure(trainer, engine, Segments(torch.tensor(lengths)))
    log_ratio = (trainer - engine).double()
    ratio = log_ratio.exp()
    rows = torch.stack([part.sum() for part in log_ratio.split(lengths) if len(part)]).exp()
    assert gap.mean == pytest.approx(float(log_ratio.mean()), rel=1e-5)
    assert gap.abs_mean == pytest.approx(float(log_ratio.abs().mean()), rel=1e-5)
    assert gap.std == pytest.approx(float(log_ratio.std(unbiased=False)), rel=1e-5)
    assert gap.abs_max == pytest.approx(float(log_ratio.abs().max()), rel=1e-5)
    assert gap.k3 == pytest.approx(float((ratio - 1 - log_ratio).mean()), rel=1e-4)
    assert gap.ess_token == pytest.approx(float(ratio.sum() ** 2 / (16 * ratio.square().sum())), rel=1e-5)
    assert gap.ess_sequence == pytest.approx(float(rows.sum() ** 2 / (4 * rows.square().sum())), rel=1e-5)
    assert (gap.num_tokens, gap.num_nonfinite) == (16, 0)


def test_the_gap_is_divided_by_position_and_by_probability() -> None:
    engine = torch.tensor([0.05, 0.3, 0.95, 0.95, 0.95, 0.3, 0.3, 1.0]).log()
    engine[7] = torch.nan
    gap, unit = torch.tensor([0.5, -0.2, 0.0, 0.0, 0.1, 0.1, 0.1, 0.0]), Segments(torch.tensor([5, 3]))
    found = {(part.by, part.low): part for part in parts_of(engine + gap, engine, unit)}
    assert {key: part.num_tokens for key, part in found.items()} == {
        ("position", 1.0): 6, ("position", 5.0): 1,
        ("probability", 0.0): 1, ("probability", 0.1): 3, ("probability", 0.9): 3,
    }  # fmt: skip
    assert found["probability", 0.1].abs_mean == pytest.approx(0.4 / 3, rel=1e-5)
    assert found["position", 5.0].share == pytest.approx(0.01 / 0.32, rel=1e-4)
    assert found["position", 5.0].high == 9.0
    assert found["probability", 0.9].high is None
    assert parts_of(engine[:0], engine[:0], Segments(torch.tensor([0, 0]))) == ()


def test_nothing_to_compare_is_no_gap() -> None:
    nothing = measure(torch.zeros(6), torch.full((6,), torch.nan), Segments(torch.tensor([3, 3])))
    assert (nothing.abs_mean, nothing.num_tokens, nothing.num_nonfinite) == (0.0, 0, 2)


def test_what_the_model_reads() -> None:
    sample = EngineSample(
        [[5], [5, 6, 4]], torch.tensor([7, 8, 9]), torch.zeros(3), Segments(torch.tensor([2, 1]))
    )
    scorer = VariantScorer(MODEL, sample, {OWN: sample.prompts})
    inputs = scorer._inputs(ScoringVariant(SamplingSettings(1.0)), torch.tensor([True, False, True]))
    assert inputs.token_ids.tolist() == [5, 7, 8, 5, 6, 4, 9]
    assert inputs.scored.int().tolist() == [0, 1, 0, 0, 0, 0, 1]
    assert inputs.lengths.tolist() == [3, 4]


def test_log_probs_in_pieces_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = EngineSample(
        [[5], [5, 6, 4], [3]], torch.tensor([7, 8, 9, 2]), torch.zeros(4), Segments(torch.tensor([2, 1, 1]))
    )
    variant = ScoringVariant(SamplingSettings(0.7, Cut("top_k", 5)))
    whole = VariantScorer(MODEL, sample, {OWN: sample.prompts}).log_probs(variant)
    monkeypatch.setattr(score, "MAX_LOGITS", MODEL.config.vocab_size // 2 + 1)
    pieces = VariantScorer(MODEL, sample, {OWN: sample.prompts})
    assert len(list(pieces._pieces(variant))) == 2
    torch.testing.assert_close(pieces.log_probs(variant), whole)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_report_is_of_another_token(shift: int) -> None:
    truth, unit = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), Segments(torch.tensor([4, 2]))
    reported = torch.zeros_like(truth)
    for token, (place, length) in enumerate(zip([0, 1, 2, 3, 0, 1], [4] * 4 + [2] * 2, strict=True)):
        if 0 <= place + shift < length:
            reported[token] = truth[token + shift]
    moved, has_one = EngineSample([[1], [1]], truth.long(), reported, unit).shifted(shift)
    assert torch.equal(moved[has_one], truth[has_one])
    assert int(has_one.sum()) == 4
