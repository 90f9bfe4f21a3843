"""Which corrections are exact if weights change inside a response: `benchmarks/studies/in_flight_bias.py`."""

from __future__ import annotations

import pytest
import torch

from benchmarks.studies.in_flight_bias import CACHES, EXACT, SETTINGS, VERSIONS, Bias, World

#: float32 weights and a product of up to four ratios.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [World(seed, lr=0.05) for seed in range(2)]


@pytest.fixture(scope="module")
def biases(worlds: list[World]) -> dict[str, list[Bias]]:
    found = [world.biases(cache) for world in worlds for cache in CACHES]
    return {name: [one[name] for one in found] for name in SETTINGS}


def test_every_response_has_its_probability(worlds: list[World]) -> None:
    """With either cache, although with stale ones no policy has these probabilities."""
    for world in worlds:
        for cache in CACHES:
            chances = world.units.episode.sum(world.sampled_with(cache)).exp()
            assert float(chances.sum()) == pytest.approx(1.0, abs=1e-12)


@torch.no_grad()
def test_a_kept_cache_changes_later_tokens_only_after_the_weights_changed(worlds: list[World]) -> None:
    places = worlds[0].units.episode.places
    for world in worlds:
        fresh, stale = (world.sampled_with(cache) for cache in CACHES)
        first = VERSIONS.index(1)
        assert torch.allclose(fresh[places < first], stale[places < first], atol=1e-12)
        assert float((fresh - stale)[places >= first].abs().max()) > 1e-2
        # with the cache recomputed, a token has the probability that its version gives it
        for version in set(VERSIONS):
            own = torch.tensor(VERSIONS)[places] == version
            assert torch.allclose(fresh[own], world.log_probs(world.models[version])[own], atol=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_these_are_exact_whatever_the_versions_and_the_cache(
    biases: dict[str, list[Bias]], name: str
) -> None:
    """In decoupled mode π_old is one policy for all tokens: the trained one before its first update."""
    assert max(one.error for one in biases[name]) < ROUNDING


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in EXACT])
def test_all_others_are_biased(biases: dict[str, list[Bias]], name: str) -> None:
    assert min(one.error for one in biases[name]) > 1000 * ROUNDING
