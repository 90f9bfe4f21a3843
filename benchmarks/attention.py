"""Compares attention over packed sequences by a dense mask, as sdpa needs it, and by torch's varlen kernel.

    python benchmarks/attention.py [--tokens 8192 16384 32768] [--sequence 2048]

One layer with the heads of Qwen2.5 7B in bf16, forward and backward. Prints one line of JSON: for each number
of tokens the milliseconds and peak MiB of each way, and the largest difference of the outputs. Without a CUDA
GPU only the dense way runs, in float32, which tests the script itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlctl.engine.layout import separations
from rlctl.engine.varlen import attention

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """(1, heads, N, D) → (1, N, heads, D)."""
    rows = torch.repeat_interleave(
        torch.arange(len(lengths), device=query.device), torch.tensor(lengths).to(query.device)
    )
    mask = (rows[:, None] == rows).tril()
    keys, values = (states.repeat_interleave(HEADS // KV_HEADS, 1) for states in (key, value))
    return scaled_dot_product_attention(query, keys, values, mask).transpose(1, 2)


def measured(run: Callable[[], Tensor], states: list[Tensor]) -> dict[str, float]:
    """Median milliseconds of forward and backward pass, and peak MiB."""
    on_gpu, times = states[0].is_cuda, []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(5):
        start = time.perf_counter()
        run().float().square().sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0
    return {"ms": 1000 * statistics.median(times[1:]), "peak_mib": peak}


def compare(tokens: int, sequence: int) -> dict[str, object]:
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    lengths = [sequence] * (tokens // sequence)
    torch.manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    sizes = separations(torch.tensor(lengths), torch.device(device))

    def varlen() -> Tensor:
        return attention(None, *states, None, **sizes)[0]

    found: dict[str, object] = {"dense": measured(lambda: dense(*states, lengths), states)}
    if on_gpu:
        found["varlen"] = measured(varlen, states)
        with torch.no_grad():
            found["largest_difference"] = float((dense(*states, lengths) - varlen()).abs().max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384, 32_768])
    parser.add_argument("--sequence", type=int, default=2048, help="tokens per sequence")
    options = parser.parse_args()
    found: dict[int, object] = {}
    for tokens in options.tokens:
        try:
            found[tokens] = compare(tokens, options.sequence)
        except torch.OutOfMemoryError as error:
            found[tokens] = str(error).splitlines()[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
