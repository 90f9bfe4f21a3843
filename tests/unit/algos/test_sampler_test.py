"""The test of the sampler's log-probs: exact on an enumerated policy, its rate of false alarms, its power."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlctl.algos.sampler_test import (
    BETS,
    TOLERANCE,
    Wealth,
    critical_z,
    sampler_sums,
    unit_mean,
    with_unscored,
)

VOCABULARY = 3


def policies(seed: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (length, V, V) of the next token given its place and the last one: of sampler and trainer."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64)
    other = logits + noise * torch.randn(logits.shape, generator=draw, dtype=torch.float64)
    return logits.log_softmax(-1), other.log_softmax(-1)


def on_host(log_ratio: torch.Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in sampler_sums(log_ratio).items()}


def wealth_of(*batches: torch.Tensor, unscored: int = 0) -> float:
    wealth = Wealth()
    for batch in batches:
        wealth = wealth.after(with_unscored(on_host(batch), unscored))
    return math.exp(wealth.log_value)


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_expected_wealth_of_an_honest_sampler_is_at_most_one(noise: float, length: int) -> None:
    """Over all sequences, each with its probability under the sampler, for every prefix, two batches."""
    sampler, trainer = policies(1, noise)
    entries = []
    for tokens in itertools.product(range(VOCABULARY), repeat=length):
        before = (0, *tokens)
        places = range(length)
        reported = torch.stack([sampler[t, before[t], tokens[t]] for t in places])
        trained = torch.stack([trainer[t, before[t], tokens[t]] for t in places])
        entries.append((float(reported.sum().exp()), trained - reported))
    mean = sum(
        p * q * wealth_of(first, second) for (p, first), (q, second) in itertools.product(entries, repeat=2)
    )
    assert mean <= 1.0 + 1e-12
    assert mean > 0.99  # it is not small for another reason


def test_a_cut_vocabulary_lowers_the_expectation_and_shows_in_z() -> None:
    """With the sampler restricted to part of the vocabulary, E[ρ] is the trainer's mass on it."""
    trained = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    sampled = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    support = sampled > 0
    ratio = trained[support] / sampled[support]
    assert float((sampled[support] * ratio).sum()) == pytest.approx(0.95)
    draws = torch.multinomial(sampled, 20_000, replacement=True, generator=torch.Generator().manual_seed(0))
    found = unit_mean(on_host((trained.log() - sampled.log())[draws]))
    assert found.gap == pytest.approx(-0.05, abs=0.005)
    assert found.z < -20
    assert found.is_cut


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [100, 3000])
def test_an_honest_sampler_is_hardly_ever_called_cut(spread: float, size: int) -> None:
    """z is skewed: the more ρ varies, the lower it falls without any fault."""
    draw = torch.Generator().manual_seed(size)
    logs = spread * torch.randn(1000, size, generator=draw) - spread**2 / 2
    found = [unit_mean(on_host(row)) for row in logs]
    assert [each.spread for each in found] == pytest.approx([spread] * 1000, rel=0.4)
    assert sum(each.is_cut for each in found) <= 3  # 1 in 10,000 is expected


@pytest.mark.parametrize(("missing", "is_cut"), [(2e-4, False), (5e-3, True)])
def test_rounding_is_no_cut_however_many_tokens_there_are(missing: float, is_cut: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    ratio = 1.0 - missing + 0.001 * torch.randn(100_000, generator=draw, dtype=torch.float64)
    found = unit_mean(on_host(ratio.log()))
    assert found.z < -30
    assert found.is_cut is is_cut


def test_without_a_critical_value_nothing_is_called_cut() -> None:
    """ρ that vary this much are dominated by values that a dump does not hold."""
    draw = torch.Generator().manual_seed(0)
    found = [unit_mean(on_host(3.0 * torch.randn(1000, generator=draw) - 4.5)) for _ in range(100)]
    assert min(each.z for each in found) < -6.0
    assert not any(each.is_cut for each in found)
    assert critical_z(3.0) is None


@pytest.mark.parametrize("stale", [0.0, 0.4, 1.0])
def test_an_honest_sampler_is_never_accused(stale: float) -> None:
    """100 runs of 40 batches, looked at after each: by Ville at most 1 in 100 exceeds 100."""
    draw = torch.Generator().manual_seed(int(10 * stale))
    alarms = 0
    for _ in range(100):
        wealth = Wealth()
        for _ in range(40):
            logits = 2 * torch.randn(64, 20, generator=draw)
            sampler = logits.log_softmax(-1)
            tokens = torch.multinomial(sampler.exp(), 1, generator=draw)
            noise = stale * torch.randn(logits.shape, generator=draw)
            trained = (logits + noise).log_softmax(-1)
            wealth = wealth.after(on_host((trained - sampler).gather(1, tokens).squeeze(1)))
            if wealth.log_value > math.log(100):
                alarms += 1
                break
    assert alarms <= 4  # P(more) < 0.004 at a rate of 1 in 100


@pytest.mark.parametrize("clean", [0, 300])
def test_log_probs_of_other_weights_are_found_early_and_late(clean: int) -> None:
    draw = torch.Generator().manual_seed(3)
    wealth, steps = Wealth(), None
    for step in range(clean + 60):
        logits = 2 * torch.randn(128, 20, generator=draw)
        honest = logits.log_softmax(-1)
        tokens = torch.multinomial(honest.exp(), 1, generator=draw)
        other = (logits + 0.4 * torch.randn(logits.shape, generator=draw)).log_softmax(-1)
        reported = honest if step < clean else other
        trained = other if step < clean else honest
        wealth = wealth.after(on_host((trained - reported).gather(1, tokens).squeeze(1)))
        if step < clean:
            assert wealth.log_value < math.log(100)
        elif wealth.log_value > math.log(1e6):
            steps = step - clean
            break
    assert steps is not None
    assert steps < 30


def test_tokens_that_were_not_scored_only_lower_the_wealth() -> None:
    ratio = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)
    assert wealth_of(ratio, unscored=50) < wealth_of(ratio)
    lost = wealth_of(torch.cat([ratio, torch.full((50,), -math.inf, dtype=torch.float64)]))
    assert wealth_of(ratio, unscored=50) == pytest.approx(lost, rel=1e-12)


def test_the_wealth_is_the_mean_over_bets_and_starts() -> None:
    batches = [torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)]
    products = [
        [math.prod(1 + bet * (math.exp(x) - 1 - TOLERANCE) for x in batch.tolist()) for bet in BETS]
        for batch in batches
    ]
    both = sum(a * b for a, b in zip(*products, strict=True)) / len(BETS)
    last = sum(products[1]) / len(BETS)
    assert wealth_of(*batches) == pytest.approx(both / 2 + last / 6 + 1 / 3, rel=1e-12)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_every_log_ratio_gives_a_finite_wealth(value: float) -> None:
    assert 0.0 < wealth_of(torch.tensor([value, 0.1])) < math.inf


def test_equal_log_probs_leave_nothing_to_test() -> None:
    assert unit_mean(on_host(torch.zeros(5))).z is None
    assert unit_mean(on_host(torch.zeros(0))).z is None
    assert wealth_of(torch.zeros(1000)) <= 1.0
