"""Bounds of the total variation: the truth of the whole vocabulary is inside, and they close with it."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlctl.algos.total_variation import total_variation_bounds


def policies(noise: float, vocabulary: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(int(10 * noise))
    logits = 2 * torch.randn(300, vocabulary, generator=draw, dtype=torch.float64)
    other = logits + noise * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
    return other.log_softmax(-1), logits.log_softmax(-1)


@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 5, 20, 40])
def test_the_truth_is_inside_for_every_token(noise: float, count: int) -> None:
    trained, sampled = policies(noise)
    truth = 0.5 * (trained.exp() - sampled.exp()).abs().sum(-1)
    listed, ids = sampled.topk(count, -1)
    lower, upper = total_variation_bounds(trained.gather(1, ids), listed)
    assert (lower <= truth + 1e-12).all()
    assert (truth <= upper + 1e-12).all()
    assert (lower >= 0).all()
    assert (upper <= 1).all()
    if count == 40:
        torch.testing.assert_close(lower, truth, atol=1e-9, rtol=0)
        torch.testing.assert_close(upper, truth, atol=1e-9, rtol=0)
    elif noise:
        assert (upper - lower).mean() > 0


def test_longer_lists_never_widen_the_interval() -> None:
    trained, sampled = policies(1.0)
    widths = []
    for count in (1, 4, 16, 40):
        listed, ids = sampled.topk(count, -1)
        lower, upper = total_variation_bounds(trained.gather(1, ids), listed)
        widths.append(upper - lower)
    for wide, narrow in itertools.pairwise(widths):
        assert (narrow <= wide + 1e-12).all()


def test_padding_is_no_token() -> None:
    """A list of two tokens, padded by a token whose probability under the trainer is not 0."""
    trained = torch.tensor([[0.5, 0.3, 0.5]]).log()
    sampled = torch.tensor([[0.6, 0.2, 0.0]]).log()
    lower, upper = total_variation_bounds(trained, sampled)
    assert lower.tolist() == pytest.approx([0.1])
    assert upper.tolist() == pytest.approx([0.3])
