"""A state that someone else has changed runs nothing when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import on_ranks, on_ranks_each
from tests.unit.engine import plain_state_jobs
from tests.unit.engine.engine_jobs import FSDP

CASES = [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16"), (FSDP, "fp32")]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory):
    where = tmp_path_factory.mktemp("states")
    cases = [(*case, str(where)) for case in CASES]
    results = on_ranks_each(1, plain_state_jobs.refused, cases, where=where)
    return {case[:2]: found for case, (found,) in results.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_state_with_code_is_refused(errors, case) -> None:
    assert errors[case]
    assert any(name == ".metadata" or name.endswith("_states.pt") for name in errors[case])
    assert all("cannot load its state" in error for error in errors[case].values())


def test_a_state_with_code_is_not_converted(tmp_path: Path, forked_commands: Path) -> None:
    python = str(forked_commands / "python")
    [error] = on_ranks(1, plain_state_jobs.converted, str(tmp_path), python, where=tmp_path)
    assert "convert" in str(error)
