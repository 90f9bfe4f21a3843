"""A checkpoint of one number of ranks, loaded on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import on_ranks_each
from tests.sweeps import asked_for, swept
from tests.unit.engine import resharding_jobs

FSDP = resharding_jobs.FSDP
CASES = [("llama", 1, "bf16"), ("llama", 2, "fp32"), ("llama", 3, "bf16"), ("lora", 3, "bf16")]
CASES += [("llama", 0, "fp32"), ("critic", 2, "fp32")]
CASES += [("llama", FSDP, "bf16"), ("lora", FSDP, "bf16"), ("critic", FSDP, "fp32")]
#: Both engines, a model whole and with an adapter, a critic, sharded states and sharded weights.
SAMPLE = [("llama", 1, "bf16"), ("lora", 3, "bf16"), ("critic", 2, "fp32"), ("llama", FSDP, "bf16")]


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_commands: Path):
    """(Ranks, case) → for each rank the state as loaded and as saved: on 2, 1 and 3 ranks."""
    where = tmp_path_factory.mktemp("states")
    found = {}
    asked = {case for (case,) in asked_for(request, "case")}
    for count, before in ((2, 0), (1, 2), (3, 1)):
        python = str(forked_commands / "python")
        cases = [(*case, str(where), before, python) for case in CASES if case in asked]
        results = on_ranks_each(count, resharding_jobs.moved, cases, where=where)
        found |= {(count, case[:3]): ranks for case, ranks in results.items()}
    return found


@pytest.mark.parametrize("case", swept(CASES, SAMPLE, one=True))
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_the_state_is_equal_on_any_number_of_ranks(states, case, before: int, after: int) -> None:
    (_, saved), *_ = states[before, case]
    for loaded, _ in states[after, case]:
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    assert case[1] == 0 or any(name.endswith("exp_avg_sq") and tensor.any() for name, tensor in saved.items())
