"""Triton kernels of vLLM's sampler and of Liger, without a GPU: interpreted and compared, and compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from benchmarks.gpu_kernels import CASES, NEEDED, Found, _difference
from tests.processes import ROOT

needs_all = pytest.mark.skipif(None in map(find_spec, NEEDED), reason="vLLM, Triton or Liger is missing")


def rows_of(*options: str) -> list[dict]:
    command = [sys.executable, "benchmarks/gpu_kernels.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip(), done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["failed"] == done.returncode == 0, done.stderr[-4000:]
    return result["rows"]


@needs_all
def test_they_compute_what_the_formulas_say() -> None:
    rows = rows_of()
    assert {row["case"] for row in rows} == set(CASES)
    assert all(row["values"] for row in rows)


@needs_all
def test_they_compile() -> None:
    """With the true types and a vocabulary of 151,936; `make gpu-kernels` compiles for other cards too."""
    rows = rows_of("--compile", "90")
    launched = {row["kernel"].split()[0] for row in rows}
    assert {"_gumbel_sample_kernel", "_topk_log_softmax_kernel", "_topk_topp_kernel"} < launched
    assert {"_lora_shrink_kernel", "_lora_expand_kernel", "_compute_slot_mappings_kernel"} < launched
    assert {row["sm"] for row in rows} == {90}
    assert min(row["bytes"] for row in rows) > 1000
    assert all(row["registers"] <= 255 for row in rows)


@pytest.mark.parametrize(
    ("found", "wanted", "agree"),
    [
        ([1.0, 2.0], [1.0, 2.05], True),
        ([1.0, 2.0], [1.0, 2.2], False),
        ([1.0, float("-inf")], [1.0, float("-inf")], True),
        ([1.0, float("-inf")], [1.0, 2.0], False),
        ([1.0, float("nan")], [1.0, 2.0], False),
    ],
)
def test_a_difference_is_a_failure(found: list[float], wanted: list[float], agree: bool) -> None:
    row = _difference(Found("numbers", torch.tensor(found), torch.tensor(wanted), 0.1))
    assert row["failed"] is not agree
