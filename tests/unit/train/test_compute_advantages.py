"""Every advantage estimator, by its name in the spec, on responses of different lengths; one is missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlctl.batch import TokenBatch
from rlctl.errors import RunFailure
from rlctl.registry import ADVANTAGE_ESTIMATORS as ESTIMATORS
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import with_advantages
from rlctl.train.settings import EstimatorSettings
from tests.processes import on_ranks
from tests.reference import advantages as slow
from tests.unit.train.scored import GROUPS, LENGTHS, ROWS, TOKENS, algorithm_of, on_each_rank, scored_batch
from tests.unit.train.updates import alone

Table = list[list[float]]
EVERY = [[True] * n for n in LENGTHS]
GRADED = [True] * ROWS


def rows_of(column: Tensor) -> Table:
    return [part.tolist() for part in column.split(LENGTHS)]


def outcomes(scored: TokenBatch) -> list[float]:
    return [math.fsum(row) for row in rows_of(scored.rewards)]


def spread(advantages: list[float]) -> Table:
    """The same for each token of a response."""
    return [[a] * n for a, n in zip(advantages, LENGTHS, strict=True)]


def whitened(table: Table) -> Table:
    values = iter(slow.whitened([value for row in table for value in row]))
    return [[next(values) for _ in row] for row in table]


def by_token(scored: TokenBatch, one_row: Callable[..., list[float]]) -> Table:
    rows = zip(rows_of(scored.rewards), rows_of(scored.column("values")), EVERY, strict=True)
    return [one_row(*row) for row in rows]


def remax(scored: TokenBatch) -> list[float]:
    return [r - b for r, b in zip(outcomes(scored), scored.column("baseline_scores").tolist(), strict=True)]


def token_baseline(scored: TokenBatch) -> Table:
    unit = scored.units.episode
    rewards, squares = (unit.padded(x).tolist() for x in (scored.rewards, scored.column("score_norms") - 1.0))
    mask = unit.padded(torch.ones_like(scored.turns, dtype=torch.bool), False).tolist()
    certain = [[-math.inf] * len(row) for row in mask]  # π = 0: the norm is 1 + Σπ²
    found = slow.optimal_token_baseline(rewards, mask, GROUPS, GRADED, certain, squares)
    return [row[:n] for row, n in zip(found, LENGTHS, strict=True)]


def influence(scored: TokenBatch) -> list[float]:
    """W² · Σ_t ‖∇ log π_t‖² of each response."""
    sums = map(sum, rows_of(scored.column("score_norms")))
    return [w * w * x for w, x in zip(scored.column("sequence_weights").tolist(), sums, strict=True)]


def wanted(estimator: str, scored: TokenBatch, algorithm: AlgorithmSpec) -> Table:
    """What the papers say, one response or token at a time."""
    grouped = outcomes(scored), GROUPS, GRADED
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


def flat(table: Table) -> Tensor:
    return torch.tensor([value for row in table for value in row], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_gives_what_the_formula_gives(estimator: str) -> None:
    scored, algorithm = scored_batch(), algorithm_of(estimator)
    batch = with_advantages(scored, EstimatorSettings.of(algorithm), alone())
    assert batch.advantages.dtype == torch.float32
    expected = flat(wanted(estimator, scored, algorithm))
    torch.testing.assert_close(batch.advantages.double(), expected, rtol=1e-4, atol=1e-5)
    assert (batch.advantages != 0.0).float().mean() > 0.7
    for name in ("old_log_probs", "ref_log_probs", "values"):
        assert batch.column(name) is scored.column(name)


def test_the_weight_of_a_prompt_multiplies_its_advantages() -> None:
    scored, algorithm = scored_batch(), algorithm_of("rloo")
    plain = with_advantages(scored, EstimatorSettings.of(algorithm), alone()).advantages
    weights = torch.arange(1.0, ROWS + 1)
    weighted = with_advantages(
        replace(scored, prompt_weights=weights), EstimatorSettings.of(algorithm), alone()
    ).advantages
    torch.testing.assert_close(weighted, plain * scored.units.episode.spread(weights))


def test_returns_are_what_the_critic_should_have_said() -> None:
    scored, algorithm = scored_batch(), algorithm_of("gae")
    batch = with_advantages(scored, EstimatorSettings.of(algorithm), alone())
    returns = by_token(scored, lambda r, v, m: slow.gae(r, v, m, algorithm.gamma, algorithm.lam)[1])
    torch.testing.assert_close(batch.column("returns").double(), flat(returns), rtol=1e-5, atol=1e-6)
    for estimator in ESTIMATORS.keys() - {"gae"}:
        assert (
            "returns"
            not in with_advantages(scored, EstimatorSettings.of(algorithm_of(estimator)), alone()).columns
        )


def test_grpo_without_the_standard_deviation_is_dr_grpo() -> None:
    bare = with_advantages(
        scored_batch(), EstimatorSettings.of(algorithm_of("grpo", norm_adv_by_std_in_grpo=False)), alone()
    ).advantages
    assert torch.equal(
        bare,
        with_advantages(scored_batch(), EstimatorSettings.of(algorithm_of("dr_grpo")), alone()).advantages,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    where: Path = tmp_path_factory.mktemp("estimators")
    return on_ranks(2, on_each_rank, list(ESTIMATORS), where=where)  # type: ignore[return-value]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_two_ranks_give_the_same(two_ranks: list[dict], estimator: str) -> None:
    """To the last bit, with siblings on different ranks; whitening is over the whole batch."""
    whole = with_advantages(scored_batch(), EstimatorSettings.of(algorithm_of(estimator)), alone())
    seen: list[int] = []
    for found in two_ranks:
        mine, advantages, returns = found[estimator]
        assert torch.equal(advantages, whole.advantages[mine])
        assert (returns is None) == ("returns" not in whole.columns)
        if returns is not None:
            assert torch.equal(returns, whole.column("returns")[mine])
        seen += mine.tolist()
    assert sorted(seen) == list(range(TOKENS))


def test_advantages_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def divided(batch):\n    return batch.rewards / (batch.rewards - batch.rewards)\n")
    algorithm = AlgorithmSpec(adv_estimator=f"{file}:divided")
    with pytest.raises(RunFailure, match="NaN or infinite advantages to") as caught:
        with_advantages(scored_batch(), EstimatorSettings.of(algorithm), alone())
    assert "divided" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("inputs.rewards", "returned no target values for the critic"),
        ("Estimate(inputs.values, inputs.rewards)", r"\(returns\) returned a tensor of shape \(11,\)"),
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
        with_advantages(
            scored_batch(), EstimatorSettings.of(AlgorithmSpec(adv_estimator=f"{file}:part")), alone()
        )
