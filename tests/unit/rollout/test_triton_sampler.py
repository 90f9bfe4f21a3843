"""The Triton kernels by which vLLM samples on GPUs, interpreted on the CPU, against softmax."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.processes import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in map(find_spec, ("vllm", "triton")), reason="vLLM or Triton is not installed"),
]

#: Draws from five tokens, and the quantile 0.999 of chi-squared with four degrees of freedom.
DRAWS, LARGEST = 300, 18.5


def kernels(result: str) -> None:
    import triton
    import triton.language

    found = ModuleType("vllm.triton_utils")  # vLLM's own has placeholders where it finds no GPU
    found.__dict__.update(HAS_TRITON=True, triton=triton, tl=triton.language, tldevice=None)
    sys.modules["vllm.triton_utils"] = found
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    torch.manual_seed(0)
    logits, tokens = 3 * torch.randn(4, 1500), torch.randint(1500, (4, 3))
    log_probs = compute_token_logprobs(logits, tokens)
    wanted = logits.log_softmax(-1).gather(1, tokens)

    def sampled(rows: torch.Tensor, temperature: float) -> torch.Tensor:
        requests = torch.zeros(len(rows), dtype=torch.int32)
        seeds, positions = torch.full((1,), 7), torch.arange(len(rows))
        return gumbel_sample(rows, requests, torch.tensor([temperature]), seeds, positions, True, False)

    few = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = sampled(few.repeat(DRAWS, 1), 0.7)
    torch.save(
        (log_probs, wanted, draws, (few / 0.7).softmax(0), sampled(logits, 0.0), logits.argmax(1)), result
    )


def test_tokens_and_log_probs_are_those_of_softmax(tmp_path: Path) -> None:
    # Not a fork: Triton reads the variable when it is imported.
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, str(tmp_path / "result")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    log_probs, wanted, draws, probabilities, greedy, best = torch.load(tmp_path / "result")
    torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-5)
    expected = DRAWS * probabilities
    counts = torch.bincount(draws, minlength=len(probabilities))
    assert float(((counts - expected) ** 2 / expected).sum()) < LARGEST
    assert torch.equal(greedy, best)


if __name__ == "__main__":
    kernels(sys.argv[1])
