import math

import pytest
import torch

from rlctl.rollout.hf import RecordingSampler, draw, uniforms
from rlctl.rollout.protocol import Request, Requests, Sampling
from rlctl.rollout.seeds import step_seed, turn_seed

ALMOST_ONE = math.nextafter(1.0, 0.0)


def drawn(probs: list[float], uniforms: list[float]) -> list[int]:
    log_probs = torch.tensor(probs).log().expand(len(uniforms), -1)
    return draw(log_probs, torch.tensor(uniforms, dtype=torch.float64)[:, None]).squeeze(1).tolist()


def test_draw_inverts_the_cdf() -> None:
    uniforms = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, ALMOST_ONE]
    assert drawn([0.25, 0.5, 0.25], uniforms) == [0, 0, 1, 1, 2, 2]


def test_draw_never_lands_on_probability_zero() -> None:
    uniforms = [0.0, 0.5 - 2**-54, 0.5, ALMOST_ONE]
    assert set(drawn([0.0, 0.5, 0.0, 0.0, 0.5, 0.0], uniforms)) == {1, 4}
    assert drawn([0.0, 1.0], [0.0, ALMOST_ONE]) == [1, 1]
    assert drawn([1.0, 0.0], [0.0, ALMOST_ONE]) == [0, 0]


def test_draw_on_a_large_vocabulary_keeps_to_the_support() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 151_936, generator=generator) * 4
    logits[torch.rand(logits.shape, generator=generator) < 0.99] = -torch.inf
    log_probs = logits.log_softmax(-1)
    for uniform in (0.0, 1e-12, 0.3, 0.999999, ALMOST_ONE):
        tokens = draw(log_probs, torch.full((64, 1), uniform, dtype=torch.float64))
        assert log_probs.gather(1, tokens).isfinite().all()


def test_draw_frequencies_are_the_distribution() -> None:
    probs = torch.tensor([0.4, 0.0, 0.3, 0.15, 0.1, 0.04, 0.009, 0.001])
    num_draws = 200_000
    tokens = draw(probs.log().expand(num_draws, -1), uniforms([7], num_draws).T)
    counts = torch.bincount(tokens.squeeze(1), minlength=len(probs)).double()
    assert counts[1] == 0
    expected = (probs.double() * num_draws)[probs > 0]
    chi2 = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    assert chi2 < 24.3  # 0.999 quantile for 6 degrees of freedom


def test_draw_survives_bad_numbers() -> None:
    log_probs = torch.full((2, 5), torch.nan)
    tokens = draw(log_probs, torch.tensor([[0.0], [0.9]], dtype=torch.float64))
    assert ((tokens >= 0) & (tokens < 5)).all()


def test_requests_as_columns_are_the_requests() -> None:
    requests = [Request([1, 2], 5), Request([3], 6, 2), Request([1, 2], 7, 9)]
    columns = Requests.of(requests)
    assert [*columns] == requests
    assert [columns[-1], *columns[:2]] == [requests[-1], *requests[:2]]
    assert columns[1:].limits(Sampling(4)) == [request.limit(Sampling(4)) for request in requests[1:]]
    assert Requests.of(columns) is columns


def test_uniforms_of_a_request_depend_on_its_seed_alone() -> None:
    """Not on the other requests, nor on how many there are: they are torch's own for the seed."""
    seeds = [3, 2**62 + 5, 3, 0]
    for row, seed in zip(uniforms(seeds, 5), seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(row, torch.rand(5, dtype=torch.float64, generator=generator))
    assert torch.equal(uniforms(seeds[1:], 2), uniforms(seeds, 5)[1:, :2])


def test_uniforms_belong_to_requests_and_are_independent() -> None:
    """First numbers of turns of a batch: uniform together, though each has a generator of its own."""
    first = uniforms([turn_seed(1, group, member) for group in range(500) for member in range(8)], 2)
    assert 0.0 <= first.min() < first.max() < 1.0
    counts = torch.histc(first[:, 0], 20, 0.0, 1.0)
    assert ((counts - 200) ** 2 / 200).sum() < 43.9  # 0.999 quantile for 19 degrees of freedom
    assert torch.corrcoef(first.T)[0, 1].abs() < 0.06


def test_the_sampler_counts_what_it_chose_and_says_why_a_turn_ended() -> None:
    """Tokens chosen for a row after its end or limit are not counted, whatever they are."""
    chosen = torch.tensor([[5, 9, 6], [5, 6, 7], [8, 9, 9], [4, 4, 9], [4, 9, 4]])
    requests = Requests([[1]] * 5, range(5), [None, None, None, 2, 2])
    sampler = RecordingSampler(requests, Sampling(3, greedy=True), [9, 8])
    for place in range(3):
        given = torch.nn.functional.one_hot(chosen[:, place], 10).float()
        forced = sampler(chosen[:, :place], given).argmax(-1)
    assert forced.tolist() == [9, 7, 9, 9, 9]  # what `generate` sees: rows that are done have ended
    turns = sampler.turns(6)
    assert [turn.token_ids.tolist() for turn in turns] == [[5, 9], [5, 6, 7], [8], [4, 4], [4, 9]]
    assert [turn.finish_reason for turn in turns] == ["stop", "length", "stop", "length", "stop"]
    assert [turn.versions.tolist() for turn in turns] == [[6] * 2, [6] * 3, [6], [6] * 2, [6] * 2]


def test_step_seeds_differ_and_are_stable() -> None:
    seeds = {
        step_seed(seed, step, purpose)
        for seed in range(4)
        for step in range(9)
        for purpose in ("train", "val")
    }
    assert len(seeds) == 4 * 9 * 2
    assert step_seed(1, 2) == step_seed(1, 2, "train") == 770980916916002369
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0, 40.0])
def test_draw_agrees_with_a_plain_float64_cdf(spread: float) -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = (torch.randn(2000, 33, generator=generator) * spread).log_softmax(-1)
    uniforms = torch.rand(2000, 1, dtype=torch.float64, generator=generator)
    cdf = log_probs.double().exp().cumsum(-1)
    expected = (cdf <= uniforms * cdf[:, -1:]).sum(-1, keepdim=True)
    # float32 `exp` moves each step of the CDF by about 1e-7: a draw in 10⁵ may fall to a neighbour.
    assert (draw(log_probs, uniforms) == expected).float().mean() > 0.999
