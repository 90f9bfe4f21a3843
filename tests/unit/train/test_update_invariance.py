"""One update on the real engine: the same weights and metrics however it is cut into passes and ranks."""

from __future__ import annotations

import pytest
import torch

from tests.models import tiny_model
from tests.processes import on_ranks
from tests.unit.train import updates

#: From one row a pass to most of them: a row has 2 to 11 tokens.
BUDGETS = ("11 tokens", "30 tokens", "120 tokens")
PLANS = {1: [(name, micro) for name in updates.CASES for micro in (16, 8, 4, 2, 1, *BUDGETS)]}
PLANS[2] = [(name, micro) for name in updates.CASES for micro in (8, 2, BUDGETS[1])]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("updates")
    return {n: on_ranks(n, updates.invariance, plan, where=where) for n, plan in PLANS.items()}


@pytest.mark.parametrize("name", updates.CASES)
def test_the_case_does_something(found, name: str) -> None:
    whole = found[1][0][name, 16]
    start = {n: p.detach() for n, p in tiny_model().named_parameters()}
    assert max(float((whole["weights"][n] - t).abs().max()) for n, t in start.items()) > 1e-3
    case = updates.CASES[name]
    assert whole["num_updates"] == case.epochs * updates.ROWS // case.mini_rows
    if "rollout_rs" in case.correction:
        assert 0.05 < whole["metrics"]["rollout_corr/rollout_rs_masked_fraction"] < 0.9
    assert whole["metrics"]["rollout_corr/rollout_is_raw_std"] > 0.1


@pytest.mark.parametrize(("world_size", "name", "micro"), [(n, *case) for n in PLANS for case in PLANS[n]])
def test_same_result_however_cut(found, world_size: int, name: str, micro: updates.Micro) -> None:
    whole = found[1][0][name, 16]
    for got in [result[name, micro] for result in found[world_size]]:
        assert got["metrics"].keys() == whole["metrics"].keys()
        for key, value in whole["metrics"].items():
            assert got["metrics"][key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
        for parameter, tensor in whole["weights"].items():
            torch.testing.assert_close(got["weights"][parameter], tensor, rtol=0, atol=3e-5)
        for ours, wanted in zip(got["seen"], whole["seen"], strict=True):
            torch.testing.assert_close(ours, wanted[got["rows"]], rtol=2e-4, atol=2e-5)
