"""Fits of temperature and truncation against transformers' own processors, and truth that is known."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlctl.mismatch.settings_fit import RankedLogits, fit_reported
from rlctl.mismatch.variants import Cut, SamplingSettings

WARPERS = {"top_p": TopPLogitsWarper, "top_k": lambda k: TopKLogitsWarper(int(k)), "min_p": MinPLogitsWarper}
SETTINGS = [
    SamplingSettings(1.0),
    SamplingSettings(0.6),
    SamplingSettings(1.0, Cut("top_p", 0.9)),
    SamplingSettings(0.7, Cut("top_k", 5)),
    SamplingSettings(1.3, Cut("min_p", 0.1)),
    SamplingSettings(0.8, Cut("top_p", 0.63)),
]


def drawn_from(
    settings: SamplingSettings, count: int = 600
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (N, V), tokens drawn from them under `settings`, and their log-probs by transformers."""
    draw = torch.Generator().manual_seed(5)
    logits = 2.5 * torch.randn(count, 30, generator=draw)
    scores = logits / settings.temperature
    if settings.cut.kind != "none":
        scores = WARPERS[settings.cut.kind](settings.cut.value)(None, scores)
    log_probs = scores.log_softmax(-1)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=draw)
    return logits, tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_log_probs_are_those_of_transformers(settings: SamplingSettings) -> None:
    logits, tokens, expected = drawn_from(settings)
    found = RankedLogits(logits, tokens).log_probs(settings)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_reported_is_found(settings: SamplingSettings) -> None:
    logits, tokens, reported = drawn_from(settings)
    found = fit_reported(RankedLogits(logits, tokens), reported, SamplingSettings(1.0))
    assert found.temperature == pytest.approx(settings.temperature, rel=0.03)
    assert found.cut.is_like(settings.cut)
    assert found.temperature == pytest.approx(settings.temperature, rel=1e-4)


def test_equal_logits_and_impossible_tokens_do_no_harm() -> None:
    ranked = RankedLogits(torch.zeros(4, 6), torch.tensor([0, 1, 5, 2]))
    torch.testing.assert_close(ranked.log_probs(SamplingSettings(1.0)), torch.full((4,), 1 / 6).log())
    reported = torch.full((4,), -torch.inf)
    assert fit_reported(ranked, reported, SamplingSettings(1.0)) == SamplingSettings(1.0)
