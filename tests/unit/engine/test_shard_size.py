"""Weights that are sharded within groups of ranks, and replicated across them, train as they do otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import on_ranks_each
from tests.sweeps import asked_for, swept
from tests.unit.engine import shard_jobs
from tests.unit.engine.engine_jobs import FSDP

#: Those without groups first: DeepSpeed keeps its groups for later engines of a process.
CASES = [(stage, dtype, size) for size in (None, 2) for stage in (3, FSDP) for dtype in ("fp32", "bf16")]
#: `make test` tries float32, in which differences are not hidden by rounding; `make test-all` bf16.
DTYPES = swept(["fp32", "bf16"], ["fp32"])
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("sharded")
    asked = {dtype for (dtype,) in asked_for(request, "dtype")} | {"fp32" for _ in asked_for(request, "size")}
    cases = [(*case, str(where)) for case in CASES if case[1] in asked]
    results = on_ranks_each(4, shard_jobs.trained, cases, where=where)
    return {case[:3]: ranks for case, ranks in results.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [3, FSDP])
def test_gradients_and_weights_are_those_of_one_group(trained, stage: int, dtype: str) -> None:
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for plain, grouped in zip(trained[stage, dtype, None], trained[stage, dtype, 2], strict=True):
        assert grouped["norms"] == pytest.approx(plain["norms"], rel=TOLERANCE[dtype])
        for name in ("log_probs", "weights"):
            torch.testing.assert_close(grouped[name], plain[name], **close)
    assert trained[stage, dtype, None][0]["norms"][0] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_group_holds_one_copy(trained, dtype: str) -> None:
    """FSDP2: of weights and moments; DeepSpeed: a second one of the weights, while moments stay sharded."""
    for plain, grouped in zip(trained[FSDP, dtype, None], trained[FSDP, dtype, 2], strict=True):
        for name in ("own", "moment"):
            assert grouped[name] == pytest.approx(2 * plain[name], rel=0.02)
    for plain, grouped in zip(trained[3, dtype, None], trained[3, dtype, 2], strict=True):
        assert (grouped["own"], grouped["moment"]) == (plain["own"], plain["moment"])
        assert plain["second"] == 0
        assert grouped["second"] == pytest.approx(2 * plain["own"], rel=0.02)


@pytest.mark.parametrize("size", [None, 2])
def test_a_state_continues_in_the_other_layout(trained, size: int | None) -> None:
    for found in trained[FSDP, "fp32", size]:
        own, other = found["continued"]
        torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-5)


def test_a_reference_is_the_same_model(tmp_path: Path) -> None:
    cases = [(stage, size) for size in (None, 2) for stage in (3, FSDP)]
    results = on_ranks_each(4, shard_jobs.reference, cases, where=tmp_path)
    for ranks in results.values():
        for log_probs in ranks:
            torch.testing.assert_close(log_probs, results[3, None][0], rtol=1e-5, atol=1e-5)
