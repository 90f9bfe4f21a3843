"""The trace on CUDA tensors says what it needs, and what it places on the GPU comes from `meta` alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.cuda_trace import _on_gpu, cuda_of_torch, one_group
from tests.processes import ROOT


@pytest.mark.skipif(cuda_of_torch() is not None, reason="this torch has CUDA")
def test_without_a_cuda_build_it_says_what_to_install() -> None:
    command = [sys.executable, "benchmarks/cuda_trace.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "make cuda-trace" in done.stdout


def test_a_tensor_that_stays_on_the_host_is_found() -> None:
    with pytest.raises(AssertionError, match="stays on cpu"):
        _on_gpu(torch.zeros(2))


def test_the_batch_is_one_group_of_different_responses() -> None:
    inputs = one_group()
    rows = inputs.token_ids.view(len(inputs.lengths), -1)
    scored = inputs.scored.view_as(rows)
    assert len({tuple(row[~of.bool()].tolist()) for row, of in zip(rows, scored, strict=True)}) == 1
    assert len(set(rows[:, -1].tolist())) == len(rows)
    assert not scored[:, 0].any()
