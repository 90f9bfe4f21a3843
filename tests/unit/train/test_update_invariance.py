"""One update on the real engine: the same weights and metrics however it is cut into passes and ranks."""

from __future__ import annotations

import pytest
import torch

from tests.models import tiny_model
from tests.processes import on_ranks
from tests.rounding import assert_same_steps
from tests.sweeps import asked_for, swept
from tests.unit.train import updates

#: A few rows a pass, or most of them: a row has 2 to 11 tokens.
BUDGETS = ("30 tokens", "120 tokens")
NAMES = [*updates.CASES, *updates.CENTERED]
#: Number of ranks → what a pass holds; on one rank, the whole batch is what the others are compared with.
PASSES: dict[int, tuple[updates.Micro, ...]] = {1: (4, 1, *BUDGETS), 2: (8, 2, BUDGETS[0])}
#: Every case at two of these sizes.
CUTS = [
    (ranks, name, passes[(place + more) % len(passes)])
    for ranks, passes in PASSES.items()
    for place, name in enumerate(NAMES)
    for more in (0, 1)
]
#: Every case once on one rank and once on two, and every size of a pass with every third or fourth case.
SAMPLE = [
    (ranks, name, passes[place % len(passes)])
    for ranks, passes in PASSES.items()
    for place, name in enumerate(NAMES)
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("updates")
    plans: dict[int, list[tuple[str, updates.Micro]]] = {1: [(name, 16) for name in NAMES], 2: []}
    for ranks, *case in asked_for(request, "world_size", "name", "micro"):
        plans[ranks].append(tuple(case))
    return {
        n: on_ranks(n, updates.invariance, sorted(plan, key=str), where=where) for n, plan in plans.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_case_does_something(found, name: str) -> None:
    whole = found[1][0][name, 16]
    start = {n: p.detach() for n, p in tiny_model().named_parameters()}
    assert max(float((whole["weights"][n] - t).abs().max()) for n, t in start.items()) > 1e-3
    case = (updates.CASES | updates.CENTERED)[name]
    assert whole["num_updates"] == case.epochs * updates.ROWS // case.mini_rows
    if "rollout_rs" in case.correction:
        assert 0.05 < whole["metrics"]["rollout_corr/rollout_rs_masked_fraction"] < 0.9
    assert whole["metrics"]["rollout_corr/rollout_is_raw_std"] > 0.1


@pytest.mark.parametrize(("world_size", "name", "micro"), swept(CUTS, SAMPLE))
def test_same_result_however_cut(found, world_size: int, name: str, micro: updates.Micro) -> None:
    whole = found[1][0][name, 16]
    for got in [result[name, micro] for result in found[world_size]]:
        assert got["metrics"].keys() == whole["metrics"].keys()
        for key, value in whole["metrics"].items():
            assert got["metrics"][key] == pytest.approx(value, rel=2e-4, abs=2e-6), key
        lrs = map(updates.lr_of, range(whole["num_updates"]))
        assert_same_steps(got["weights"], whole["weights"], lrs, whole["num_tokens"])
        for ours, wanted in zip(got["seen"], whole["seen"], strict=True):
            there = [wanted[row] for row in got["rows"]]
            torch.testing.assert_close(list(ours), there, rtol=2e-4, atol=2e-5)


#: Weights and survivors of a mini-batch depend on all of its rows. In bf16 a case without rejection, and
#: one sequence's room for fractions: a ratio at a bound falls on either side.
STAGES = [
    *[("survivors", 4, stage, torch.float32) for stage in (1, 2, 3)],
    *[("zero advantages", 2, stage, torch.float32) for stage in (1, 2, 3)],
    *[("survivors", BUDGETS[0], 3, torch.float32), ("zero advantages", BUDGETS[0], 2, torch.float32)],
    *[("centered weights", 4, stage, torch.float32) for stage in (1, 3)],
    ("taught", 4, 3, torch.float32),
    *[("token", BUDGETS[0], stage, torch.bfloat16) for stage in range(4)],
]


@pytest.fixture(scope="module")
def over_stages(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("stages")
    return {n: on_ranks(n, updates.invariance, STAGES, where=where) for n in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", STAGES)
def test_same_result_at_every_stage(found, over_stages, world_size: int, case: tuple) -> None:
    name, _, _, dtype = case
    whole = found[1][0][name, 16]
    is_exact = dtype == torch.float32
    for got in [result[case] for result in over_stages[world_size]]:
        assert got["metrics"].keys() == whole["metrics"].keys()
        wrong = {}
        for key, value in whole["metrics"].items():
            room = 1.01 / updates.ROWS if "fraction" in key else 0.02
            within = {"rel": 2e-4, "abs": 2e-6} if is_exact else {"rel": 0.05, "abs": room}
            if got["metrics"][key] != pytest.approx(value, **within):
                wrong[key] = (got["metrics"][key], value)
        assert not wrong
        if is_exact:
            lrs = map(updates.lr_of, range(whole["num_updates"]))
            assert_same_steps(got["weights"], whole["weights"], lrs, whole["num_tokens"])
        else:  # Adam turns the sign of a gradient near zero into a full step: compare means
            gaps = [(got["weights"][name] - tensor).abs() for name, tensor in whole["weights"].items()]
            assert max(float(gap.mean()) for gap in gaps) < 2e-3
