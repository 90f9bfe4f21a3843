"""The error that a batch shows of its own gradient, against the exact one of enumerated worlds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.gradient_error import MINI, RULES, N, sampled
from rlctl.algos import gradient_error as gradient_error_module
from rlctl.algos.gradient_error import gradient_error
from rlctl.bench.corrections import BenchPlace


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.1, 0.5, 1.0])
def test_the_interval_holds_the_exact_error(size: float) -> None:
    """The stated coverage is 90 %, lowered by the sampling error of 100 draws. If no interval can be
    computed, the report states this."""
    rng, hits, vacuous, widths = np.random.default_rng(0), [], 0, []
    for seed in (0, 1):
        world = BenchPlace("KL", size=size, horizon=4).world(seed)
        for rule in RULES.values():
            factors = [world.token_factors(rule, N, prompt) for prompt in range(world.num_prompts)]
            truth = world.moments(rule, N).error(MINI)
            for groups in (64, 256):
                for _ in range(7):
                    found = gradient_error(*sampled(rng, world, factors, groups), MINI)
                    hits.append(found.low <= truth <= found.high)
                    vacuous += found.is_undetermined
                    if not found.is_undetermined:
                        widths.append(found.high - found.low)
    assert np.mean(hits) >= 0.85
    if size < 0.3:
        assert vacuous < 0.3 * len(hits)
        assert np.mean(widths) < 0.2


@pytest.mark.slow
def test_the_estimate_tends_to_the_exact_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_error_module, "_DRAWS", 2)  # of the interval
    rng, world = np.random.default_rng(1), BenchPlace("KL", size=0.5, horizon=3).world(0)
    for rule in RULES.values():
        factors = [world.token_factors(rule, N, prompt) for prompt in range(world.num_prompts)]
        found = gradient_error(*sampled(rng, world, factors, 3000), MINI)
        assert found.estimate == pytest.approx(world.moments(rule, N).error(MINI), abs=0.02)


def test_uneven_weights_and_no_gradient_are_said_to_say_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(100, 50, generator=draw)
    assert gradient_error(noise, noise, ess=0.2, num_groups=8).is_undetermined
    one = noise.clone()
    one[0] *= 100
    assert gradient_error(noise, one, ess=0.9, num_groups=8).is_undetermined
    pure = gradient_error(noise, noise, ess=0.9, num_groups=8)
    assert pure.high == 1.0  # no signal: the gradient may be useless
    same = torch.ones(100, 50) + 0.01 * noise
    assert gradient_error(same, 3 * same, ess=1.0, num_groups=8).high < 0.01
