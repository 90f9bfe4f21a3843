"""Every advantage estimator, by its name in the spec, on responses of different lengths with one ungraded
sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlctl.batch import ScoredBatch
from rlctl.errors import RunFailure
from rlctl.registry import ADVANTAGE_ESTIMATORS as ESTIMATORS
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import estimate, with_advantages
from tests.processes import on_ranks
from tests.reference import advantages as slow
from tests.unit.train.scored import (
    GROUPS,
    HORIZON,
    INVALID,
    LENGTHS,
    ROWS,
    algorithm_of,
    on_each_rank,
    scored_batch,
)
from tests.unit.train.updates import alone

Table = list[list[float]]


def outcomes(scored: ScoredBatch) -> list[float]:
    return scored.token_level_rewards.double().sum(-1).tolist()


def spread(advantages: list[float]) -> Table:
    """The same for each token of a response."""
    return [[a if t < n else 0.0 for t in range(HORIZON)] for a, n in zip(advantages, LENGTHS, strict=True)]


def whitened(table: Table) -> Table:
    places = [(row, t) for row in range(ROWS) if row != INVALID for t in range(LENGTHS[row])]
    values = slow.whitened([table[row][t] for row, t in places])
    found = [[0.0] * HORIZON for _ in range(ROWS)]
    for (row, t), value in zip(places, values, strict=True):
        found[row][t] = value
    return found


def by_token(scored: ScoredBatch, one_row: Callable[..., list[float]]) -> Table:
    mask = scored.rollouts.response_mask.tolist()
    return [
        one_row(r, v, m)
        for r, v, m in zip(scored.token_level_rewards.tolist(), scored.values.tolist(), mask, strict=True)
    ]


def remax(scored: ScoredBatch) -> list[float]:
    valid, baseline = scored.score_valid.tolist(), scored.baseline_scores.tolist()
    return [r - b if ok else 0.0 for r, b, ok in zip(outcomes(scored), baseline, valid, strict=True)]


def token_baseline(scored: ScoredBatch) -> Table:
    certain = torch.full_like(scored.score_norms, -torch.inf)  # π = 0: the norm is 1 + Σπ²
    return slow.optimal_token_baseline(
        scored.token_level_rewards.tolist(),
        scored.rollouts.response_mask.tolist(),
        GROUPS,
        scored.score_valid.tolist(),
        certain.tolist(),
        (scored.score_norms - 1.0).tolist(),
    )


def influence(scored: ScoredBatch) -> list[float]:
    """W² · Σ_t ‖∇ log π_t‖² of each response."""
    mask, norms = scored.rollouts.response_mask.tolist(), scored.score_norms.tolist()
    sums = [
        sum(x for x, ok in zip(row, some, strict=True) if ok) for row, some in zip(norms, mask, strict=True)
    ]
    return [w * w * x for w, x in zip(scored.sequence_weights.tolist(), sums, strict=True)]


def wanted(estimator: str, scored: ScoredBatch, algorithm: AlgorithmSpec) -> Table:
    """What the papers say, one response or token at a time."""
    grouped = outcomes(scored), GROUPS, scored.score_valid.tolist()
    gamma, lam = algorithm.gamma, algorithm.lam
    return {
        "rloo": lambda: spread(slow.rloo(*grouped)),
        "grpo": lambda: spread(slow.grpo(*grouped)),
        "dr_grpo": lambda: spread(slow.grpo(*grouped, divide_by_std=False)),
        "maxrl": lambda: spread(slow.maxrl(*grouped)),
        "gpg": lambda: spread(slow.gpg(*grouped)),
        "opo": lambda: spread(slow.opo(grouped[0], LENGTHS, *grouped[1:])),
        "off_policy_optimal_baseline": lambda: spread(
            slow.best_constant(grouped[0], influence(scored), *grouped[1:])
        ),
        "remax": lambda: spread(remax(scored)),
        "reinforce_plus_plus": lambda: whitened(
            by_token(scored, lambda r, v, m: slow.reward_to_go(r, m, gamma))
        ),
        "reinforce_plus_plus_baseline": lambda: whitened(spread(slow.grpo(*grouped, divide_by_std=False))),
        "optimal_token_baseline": lambda: token_baseline(scored),
        "gae": lambda: whitened(by_token(scored, lambda r, v, m: slow.gae(r, v, m, gamma, lam)[0])),
    }[estimator]()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_gives_what_the_formula_gives(estimator: str) -> None:
    scored, algorithm = scored_batch(), algorithm_of(estimator)
    batch = with_advantages(scored, algorithm, alone())
    assert batch.advantages.dtype == torch.float32
    torch.testing.assert_close(
        batch.advantages.double(),
        torch.tensor(wanted(estimator, scored, algorithm), dtype=torch.float64),
        rtol=1e-4,
        atol=1e-5,
    )
    assert (batch.advantages[~batch.valid_mask] == 0.0).all()
    assert (batch.advantages[batch.valid_mask] != 0.0).float().mean() > 0.7
    assert torch.equal(batch.sample_mask, scored.score_valid)
    for name in ("old_log_probs", "ref_log_probs", "values"):
        assert getattr(batch, name) is getattr(scored, name)


def test_returns_are_what_the_critic_should_have_said() -> None:
    scored, algorithm = scored_batch(), algorithm_of("gae")
    batch = with_advantages(scored, algorithm, alone())
    returns = by_token(scored, lambda r, v, m: slow.gae(r, v, m, algorithm.gamma, algorithm.lam)[1])
    torch.testing.assert_close(batch.returns.double(), torch.tensor(returns).double(), rtol=1e-5, atol=1e-6)
    for estimator in ESTIMATORS.keys() - {"gae"}:
        assert with_advantages(scored, algorithm_of(estimator), alone()).returns is None


def test_grpo_without_the_standard_deviation_is_dr_grpo() -> None:
    bare = with_advantages(
        scored_batch(), algorithm_of("grpo", norm_adv_by_std_in_grpo=False), alone()
    ).advantages
    assert torch.equal(bare, with_advantages(scored_batch(), algorithm_of("dr_grpo"), alone()).advantages)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_ungraded_sample_has_no_say(estimator: str) -> None:
    scored = scored_batch()
    wild = {}
    names = ("token_level_rewards", "values", "score_norms", "sequence_weights", "baseline_scores")
    for name in names:
        wild[name] = getattr(scored, name).clone()
        wild[name][INVALID] = 1e6
    clean = with_advantages(scored, algorithm_of(estimator), alone()).advantages
    assert torch.equal(
        with_advantages(replace(scored, **wild), algorithm_of(estimator), alone()).advantages, clean
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    where: Path = tmp_path_factory.mktemp("estimators")
    return on_ranks(2, on_each_rank, list(ESTIMATORS), where=where)  # type: ignore[return-value]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_two_ranks_give_the_same(two_ranks: list[dict], estimator: str) -> None:
    """Whitening is over the whole batch, not over each rank's share."""
    whole = with_advantages(scored_batch(), algorithm_of(estimator), alone())
    seen: list[int] = []
    for found in two_ranks:
        mine, advantages, returns = found[estimator]
        torch.testing.assert_close(advantages, whole.advantages[mine], rtol=1e-6, atol=1e-7)
        assert (returns is None) == (whole.returns is None)
        if returns is not None:
            assert torch.equal(returns, whole.returns[mine])
        seen += mine
    assert sorted(seen) == list(range(ROWS))


def test_advantages_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def divided(batch):\n"
        "    scores = batch.token_level_rewards.sum(1)\n"
        "    return scores / (scores - scores)\n"
    )
    algorithm = AlgorithmSpec(adv_estimator=f"{file}:divided")
    with pytest.raises(RunFailure, match="NaN or infinite advantages to") as caught:
        estimate(scored_batch(), algorithm, alone())
    assert "divided" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("inputs.rewards", "returned no target values for the critic"),
        ("Estimate(inputs.rewards, inputs.rewards)", r"\(returns\) returned a tensor of shape \(12,\)"),
    ],
)
def test_an_estimator_that_reads_values_returns_their_targets(
    tmp_path: Path, returned: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlctl.algos.estimators import Estimate\nfrom rlctl.registry import ADVANTAGE_ESTIMATORS\n\n"
        f"@ADVANTAGE_ESTIMATORS.register(needs={{'values'}})\ndef part(inputs):\n    return {returned}\n"
    )
    with pytest.raises(RunFailure, match=words):
        estimate(scored_batch(), AlgorithmSpec(adv_estimator=f"{file}:part"), alone())
