"""Triton's kernels that a run launches on GPUs, compared with formulas in torch, or compiled, without a GPU.

    make gpu-kernels                                  both, on a machine with Triton and vLLM
    python benchmarks/gpu_kernels.py                  compares: on the GPU; where there is none, interpreted
    python benchmarks/gpu_kernels.py --compile 80 90 100 120       compiles for these compute capabilities

The kernels are launched by the libraries' own functions: those of vLLM's Model Runner V2 that sample, report
log-probs and keep the tables of cached blocks, those that apply adapters, and Liger's. `--compile` replaces
only the launch: Triton specializes the kernels for their arguments as on a GPU, and the assembler of its
wheel makes the machine code, from which registers, shared memory and spilled bytes are read.
The last line is JSON. Exit codes: 0 all agree or are compiled, 1 some do not, 4 a library is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Makes vLLM's CPU build import Triton, and fills gaps of Triton's interpreter.
BACKEND = ROOT / "tests/triton_on_cpu"
NEEDED = ("torch", "triton", "vllm", "liger_kernel")
#: By how much probability the kernel of top-p may keep more or less than sorting does.
LARGEST_EDGE = 1e-3


@dataclass(frozen=True)
class Found:
    """One result of a kernel and what a formula in torch gives; `limit`: on the largest difference."""

    what: str
    found: Any
    wanted: Any
    limit: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Where and how large: `vocabulary` tokens, `wide` elements of a hidden state."""

    device: str
    vocabulary: int
    wide: int
    dtypes: tuple[Any, ...]


def main() -> int:
    options = _arguments()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing: {', '.join(missing)}")
        return 4
    on_gpu = not options.compile and _has_gpu()
    if not on_gpu and os.environ.get(_STARTED) != "1":
        return _restart(interpret=not options.compile)
    rows = list(_compiled(options) if options.compile else _compared(options, on_gpu=on_gpu))
    failed = [row for row in rows if row.get("failed")]
    for row in rows:
        print(" ".join(f"{key} {value}" for key, value in row.items()), file=sys.stderr)
    print(json.dumps({"rows": rows, "failed": len(failed)}))
    return int(bool(failed) or not rows)


_STARTED = "RLCTL_GPU_KERNELS"


def _restart(*, interpret: bool) -> int:
    """This script again, with the variables that Triton reads when it is imported."""
    path = os.pathsep.join([str(BACKEND), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {_STARTED: "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | variables
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory(prefix="rlctl-triton-") as cache:
        command = [sys.executable, *sys.argv]
        return subprocess.run(command, env=env | {"TRITON_CACHE_DIR": cache}, check=False).returncode


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _compared(options: argparse.Namespace, *, on_gpu: bool) -> Iterator[dict[str, Any]]:
    import torch

    if not on_gpu:
        from rlctl_triton_on_cpu.interpreter import fill_liger  # type: ignore[import-not-found]

        fill_liger()
        _use_host_buffers()
    # The interpreter computes with NumPy, which has no bf16.
    setting = (
        Setting("cuda", 151_936, 3584, (torch.float32, torch.bfloat16))
        if on_gpu
        else Setting("cpu", 3_001, 256, (torch.float32,))
    )
    for name, case in CASES.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        try:
            for each in case(setting):
                yield {"case": name} | _difference(each)
        except Exception as error:  # of the libraries: the other cases go on
            yield {"case": name, "failed": f"{type(error).__name__}: {error}"[:300]}


def _difference(each: Found) -> dict[str, Any]:
    import torch

    found, wanted = each.found.double(), each.wanted.double()
    finite = wanted.isfinite()
    apart = (found - wanted)[finite & found.isfinite()].abs()
    largest = float(apart.max()) if len(apart) else 0.0
    agree = torch.equal(found.isfinite(), finite) and largest <= each.limit
    row = {"what": each.what, "largest_difference": largest, "limit": each.limit, "values": found.numel()}
    return row | {"failed": not agree}


def _compiled(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    setting = Setting("cpu", 151_936, 3584, (torch.float32, torch.bfloat16))
    _use_host_buffers()
    for capability in options.compile:
        kernels: dict[str, Any] = {}
        with _instead_of_launches(capability, kernels):
            for name, case in CASES.items():
                if options.only in name:
                    torch.manual_seed(0)
                    try:
                        list(case(setting))
                    except Exception as error:
                        yield {
                            "case": name,
                            "sm": capability,
                            "failed": f"{type(error).__name__}: {error}"[:300],
                        }
        for name, kernel in kernels.items():
            cubin = kernel.asm.get("cubin", b"")
            row = {"kernel": name, "sm": capability, "bytes": len(cubin)} | _registers(cubin)
            row |= {"shared_bytes": kernel.metadata.shared}
            yield row | {"failed": not cubin.startswith(b"\x7fELF")}


def _use_host_buffers() -> None:
    """As vLLM's CPU worker at its start: buffers that a GPU would share with the host are the host's."""
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils

    buffer_utils.UvaBuffer = UvaBuffer


class _instead_of_launches:  # noqa: N801
    """Kernels are compiled for the capability and put into `kernels`, under name and specialization."""

    def __init__(self, capability: int, kernels: dict[str, Any]) -> None:
        self._capability, self._kernels = capability, kernels

    def __enter__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        capability, kernels = self._capability, self._kernels

        class Driver:
            """Answers what a launch asks before the kernel is compiled."""

            def get_current_target(self) -> GPUTarget:
                return GPUTarget("cuda", capability, 32)

            def get_current_device(self) -> int:
                return capability  # each has its own cache of compiled kernels

            def get_current_stream(self, device: int) -> int:
                return 0

        self._driver, self._function = driver, JITFunction
        self._before = (driver._active, JITFunction.run)
        run = JITFunction.run

        def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            kernels[f"{function.__name__} {kernel.hash[:8]}"] = kernel
            return kernel

        driver._active = Driver()
        JITFunction.run = compile_only

    def __exit__(self, *_: object) -> None:
        self._driver._active, self._function.run = self._before


def _registers(cubin: bytes) -> dict[str, int]:
    """What a thread of the kernel needs, from the machine code; nothing where the tool is missing."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    names = {"REG": "registers", "LOCAL": "spilled_bytes", "STACK": "stack_bytes"}
    return {
        name: int(number) for key, name in names.items() for number in re.findall(rf"\b{key}:(\d+)", said)[:1]
    }


def _logits(setting: Setting, rows: int, dtype: Any = None) -> Any:
    import torch

    return (3 * torch.randn(rows, setting.vocabulary, device=setting.device)).to(dtype or torch.float32)


def _mapping(setting: Setting, rows: int) -> Any:
    """Row of the batch → the request's place in the tables; another order than that of the rows."""
    import torch

    return torch.arange(rows, device=setting.device).flip(0)


def temperature(setting: Setting) -> Iterator[Found]:
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3], device=setting.device)
    logits, places = _logits(setting, 4), _mapping(setting, 4)
    each = temperatures[places][:, None]
    wanted = torch.where(each == 0, logits, logits / torch.where(each == 0, 1.0, each))
    apply_temperature(logits, places, temperatures)
    yield Found("logits over temperature, 0: unchanged", logits, wanted, 2e-6)


def min_p(setting: Setting) -> Iterator[Found]:
    import torch
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    fractions = torch.tensor([0.0, 0.05, 0.3], device=setting.device)
    logits, places = _logits(setting, 3), _mapping(setting, 3)
    shares = logits.softmax(-1)
    limits = fractions[places][:, None] * shares.amax(-1, keepdim=True)
    wanted = logits.masked_fill(shares < limits, -torch.inf)
    apply_min_p(logits, places, fractions)
    yield Found("logits of the tokens that are kept", logits, wanted)


def top_k_top_p(setting: Setting) -> Iterator[Found]:
    """Against the function of Model Runner V1, which sorts; the kernels search for the smallest one kept."""
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.sample.ops.topk_topp_triton import _apply_topp_split, apply_top_k_top_p_triton

    k = torch.tensor([1, 2, 5, 50, 200, 7, 1000, 3, 20], dtype=torch.int32, device=setting.device)
    p = torch.tensor([0.9, 0.95, 0.5, 0.99, 0.8, 0.1, 0.999, 0.7, 1.0], device=setting.device)

    def split(logits: Any, _: Any, limits: Any) -> Any:
        """The way for at most 64 rows on a GPU: several blocks share a row."""
        _apply_topp_split(logits, None, limits, -torch.inf, 132)
        return logits

    whole = apply_top_k_top_p_triton
    ways = (("top-k", whole, k, None), ("top-k and top-p", whole, k, p), ("top-p", whole, None, p))
    for what, function, ks, ps in (*ways, ("top-p over several blocks", split, None, p)):
        logits = _logits(setting, len(p))
        wanted = apply_top_k_top_p_pytorch(logits.clone(), ks, ps, allow_cpu_sync=True)
        found = function(logits.clone(), ks, ps)
        shares = logits.double().softmax(-1)
        mass, exact = ((shares * each.isfinite()).sum(-1) for each in (found, wanted))
        # Of tokens at the edge of p one way keeps some more.
        yield Found(f"{what}: probability that is kept", mass, exact, 1e-6 if ps is None else LARGEST_EDGE)
        same = torch.where(found.isfinite(), found == logits, True)
        yield Found(f"{what}: logits that are kept are unchanged", same, torch.ones_like(same))


def _murmur3(words: list[Any]) -> Any:
    """MurmurHash3 (x86, 32 bits, seed 0) of arrays of 32-bit words."""
    import numpy as np

    def rotated(value: Any, by: int) -> Any:
        return (value << np.uint32(by)) | (value >> np.uint32(32 - by))

    state = np.zeros_like(words[-1])
    with np.errstate(over="ignore"):
        for word in words:
            mixed = rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            state = rotated(state ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        state = state ^ np.uint32(4 * len(words))
        state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def _noise(seed: int, position: int, vocabulary: int) -> Any:
    """(V,) float64: −log(−log(1 − u)), u from the hash of seed, position and token."""
    import numpy as np

    ids = np.arange(vocabulary, dtype=np.uint32)
    words = [np.full_like(ids, number & 0xFFFFFFFF) for number in (seed, seed >> 32, position)]
    uniform = (_murmur3([*words, ids]).astype(np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


def sampled_tokens(setting: Setting) -> Iterator[Found]:
    """The token of a request follows from its seed and position alone."""
    import torch
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows, device = 16, setting.device
    seeds = torch.randint(-(2**62), 2**62, (rows,))
    positions, places = torch.randint(0, 30_000, (rows,)), _mapping(setting, rows).cpu()
    temperatures = torch.full((rows,), 0.7)
    temperatures[::4] = 0.0
    for dtype in setting.dtypes:
        logits = _logits(setting, rows, dtype)
        arguments = [tensor.to(device) for tensor in (places, temperatures, seeds, positions)]
        found = gumbel_sample(logits, *arguments, True, False)
        wanted = []
        for row, place in enumerate(places.tolist()):
            scores = logits[row].cpu().double()
            if temperatures[place] > 0:
                noise = _noise(int(seeds[place]), int(positions[row]), setting.vocabulary)
                scores = scores / float(temperatures[place]) + torch.from_numpy(noise)
            chosen = int(found[row])
            best = float(scores.max())
            wanted.append(best - float(scores[min(max(chosen, 0), setting.vocabulary - 1)]))
        behind = torch.tensor(wanted)
        yield Found(f"{dtype}: score behind the best one", behind, torch.zeros(rows), 1e-4)


def log_probs(setting: Setting) -> Iterator[Found]:
    """Against log-softmax in float32, which is what Model Runner V1 reports."""
    import torch
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    rows, listed = 6, 20
    for dtype in setting.dtypes:
        logits = _logits(setting, rows, dtype)
        tokens = torch.randint(setting.vocabulary, (rows,), device=setting.device)
        tokens[0] = logits[0].argmax()
        for number in (0, listed):
            found = compute_topk_scores(logits, number, tokens)
            everything = logits.float().log_softmax(-1)
            own = everything.gather(1, tokens[:, None])
            most = everything.topk(max(number, 1)).values[:, :number]
            yield Found(
                f"{dtype}: sampled and {number} listed", found.logprobs, torch.cat([own, most], 1), 2e-5
            )
            rank = (logits.float() >= logits.float().gather(1, tokens[:, None])).sum(1)
            yield Found(f"{dtype}: ranks, {number} listed", found.selected_token_ranks, rank)


def block_tables(setting: Setting) -> Iterator[Found]:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

    device = torch.device(setting.device)
    for groups in ([16], [16, 32]):
        tables = BlockTables(groups, 8, 256, [64 // size * 8 for size in groups], device)
        blocks = {2: [5, 9, 3, 11], 6: [7, 1, 2, 8]}
        for place, ids in blocks.items():
            tables.append_block_ids(
                place, tuple(ids[: len(ids) * 16 // size] for size in groups), overwrite=True
            )
        tables.apply_staged_writes()
        places = torch.tensor([6, 2], device=device)
        starts = torch.tensor([0, 30, 33], dtype=torch.int32, device=device)
        positions = torch.tensor([*range(30), *range(40, 43)], device=device)
        gathered = tables.gather_block_tables(places, 3)
        slots = tables.compute_slot_mappings(places, starts, positions, 40)
        for group, size in enumerate(groups):
            kept = {place: ids[: len(ids) * 16 // size] for place, ids in blocks.items()}
            width = len(kept[6])
            wanted = torch.tensor([kept[6], kept[2], [0] * width])
            yield Found(f"{groups}: blocks", gathered[group][:, :width].cpu(), wanted)
            of_row = [6] * 30 + [2] * 3
            where = [
                kept[place][position // size] * size + position % size
                for place, position in zip(of_row, positions.tolist(), strict=True)
            ]
            yield Found(f"{groups}: slots", slots[group].cpu(), torch.tensor(where + [-1] * 7))


def inputs_of_a_step(setting: Setting) -> Iterator[Found]:
    """A request whose prompt is read in two parts, beside one that samples."""
    import torch
    from vllm.v1.worker.gpu import input_batch as module

    device, longest = setting.device, 64

    def ints(*numbers: int, dtype: Any = torch.int32) -> Any:
        return torch.tensor(numbers, dtype=dtype, device=device)

    tokens = torch.arange(4 * longest, dtype=torch.int32, device=device).view(4, longest)
    places = ints(3, 1, dtype=torch.int64)
    starts, prompts = ints(0, 10, 11), ints(0, 7, 0, 25)
    read, ids = ints(0, 7, 0, 5), torch.zeros(16, dtype=torch.int32, device=device)
    following = torch.zeros(1, 4, dtype=torch.int32, device=device)
    module.prepare_prefill_inputs(ids, following, places, starts, tokens, prompts, read)
    positions, lengths = torch.zeros(16, dtype=torch.int64, device=device), ints(9, 9, 9, 9)
    module.prepare_pos_seq_lens(places, starts, read, positions, lengths)
    last = ints(0, 77, 0, 0, dtype=torch.int64)[:, None]
    drafts = torch.zeros(4, 0, dtype=torch.int64, device=device)
    ends = ints(0, 1, 2)
    chosen = module.combine_sampled_and_draft_tokens(
        ids, places, last, starts, lengths, prompts, drafts, ends, 2
    )
    yield Found("tokens", ids[:11].cpu(), torch.tensor([*range(3 * longest + 5, 3 * longest + 15), 77]))
    yield Found("positions", positions[:11].cpu(), torch.tensor([*range(5, 15), 7]))
    yield Found("lengths", lengths.cpu(), torch.tensor([15, 8, 0, 0]))
    yield Found("rows with logits", chosen.cpu(), torch.tensor([9, 10]))
    sampled, rejected = module.get_num_sampled_and_rejected(ints(1, 1), lengths[:2], ends, places, prompts)
    yield Found("sampled: none within a prompt", sampled.cpu(), torch.tensor([0, 1]))
    yield Found("rejected", rejected.cpu(), torch.tensor([0, 0]))
    total = ints(0, 8, 0, 25)
    new = torch.tensor([[5], [88]], device=device)
    module.post_update(places, read, last, None, new, sampled, rejected, starts, tokens, total)
    yield Found("read after the step", read.cpu(), torch.tensor([0, 8, 0, 15]))
    yield Found("lengths after the step", total.cpu(), torch.tensor([0, 9, 0, 25]))
    yield Found(
        "the token that was sampled", torch.stack([tokens[1, 8], last[1, 0]]).cpu(), torch.tensor([88, 88])
    )


def adapters(setting: Setting) -> Iterator[Found]:
    """x A^T B^T of each token's adapter; those without one are left alone."""
    import torch
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    rows, rank, device = 24, 16, setting.device
    # vLLM computes adapters in 16 bits; the interpreter has float16.
    dtype = torch.float16 if device == "cpu" and len(setting.dtypes) == 1 else torch.bfloat16
    down = torch.randn(2, rank, setting.wide, device=device).to(dtype) / setting.wide**0.5
    up = torch.randn(2, setting.wide, rank, device=device).to(dtype) / rank**0.5
    states = torch.randn(rows, setting.wide, device=device).to(dtype)
    of_token = torch.tensor([0, 1, -1] * (rows // 3), dtype=torch.int32, device=device)
    meta = LoRAKernelMeta.make(2, rows, device=torch.device(device))
    meta.prepare_tensors(of_token)
    arguments = meta.meta_args(rows, False)
    narrow = torch.zeros(1, rows, rank, dtype=torch.float32, device=device)
    _lora_shrink(states, [down], narrow, *arguments, 0.5)
    chosen = of_token.clamp(min=0).long()
    has = (of_token >= 0)[:, None]
    wanted = 0.5 * torch.einsum("td,trd->tr", states.float(), down.float()[chosen]) * has
    yield Found("down", narrow[0], wanted, 2e-3)
    output = torch.ones(rows, setting.wide, dtype=dtype, device=device)
    _lora_expand(wanted[None].contiguous(), [up], output, *arguments, 0, True)
    wide = 1 + torch.einsum("tr,tdr->td", wanted.to(dtype).float(), up.float()[chosen]) * has
    yield Found("up, added", output.float(), wide, 3e-2)


def liger_norm(setting: Setting) -> Iterator[Found]:
    import torch
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def plain(x: Any, weight: Any, offset: float) -> Any:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (offset + weight.float())).to(x.dtype)

    for dtype in setting.dtypes:
        for mode, offset in (("llama", 0.0), ("gemma", 1.0)):
            x = torch.randn(6, setting.wide, device=setting.device).to(dtype)
            weight = torch.randn(setting.wide, device=setting.device).to(dtype)
            yield from _with_gradients(
                f"{dtype} {mode}",
                lambda x, w, mode=mode, offset=offset: LigerRMSNormFunction.apply(x, w, 1e-6, offset, mode),
                lambda x, w, offset=offset: plain(x, w, offset),
                x,
                weight,
            )


def liger_rotary(setting: Setting) -> Iterator[Found]:
    import torch
    from liger_kernel.ops.rope import LigerRopeFunction

    def turned(states: Any, cos: Any, sin: Any) -> Any:
        half = states.shape[-1] // 2
        other = torch.cat([-states[..., half:], states[..., :half]], -1)
        return states * cos[:, None] + other * sin[:, None]

    length, size = 7, 64
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
    for dtype in setting.dtypes:
        cosines, sines = (f(angles)[None].to(setting.device, dtype) for f in (torch.cos, torch.sin))
        q, k = (torch.randn(2, heads, length, size, device=setting.device).to(dtype) for heads in (4, 2))
        yield from _with_gradients(
            f"{dtype}",
            lambda q, k, c=cosines, s=sines: torch.cat(LigerRopeFunction.apply(q, k, c, s), 1),
            lambda q, k, c=cosines, s=sines: torch.cat([turned(q, c, s), turned(k, c, s)], 1),
            q,
            k,
        )


def liger_feed_forward(setting: Setting) -> Iterator[Found]:
    import torch
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from torch.nn import functional

    for dtype in setting.dtypes:
        gate, up = (torch.randn(5, setting.wide, device=setting.device).to(dtype) for _ in range(2))
        yield from _with_gradients(
            f"{dtype} silu", LigerSiLUMulFunction.apply, lambda a, b: functional.silu(a) * b, gate, up
        )
        gelu = lambda a, b: functional.gelu(a, approximate="tanh") * b  # noqa: E731
        yield from _with_gradients(f"{dtype} gelu", LigerGELUMulFunction.apply, gelu, gate, up)


def _with_gradients(what: str, kernel: Any, plain: Any, *inputs: Any) -> Iterator[Found]:
    """Result and gradients of both for the same random gradient of the result."""
    import torch

    results = []
    for function in (kernel, plain):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        # Liger's kernels write into their inputs where autograd allows it: not into leaves.
        output = function(*(leaf * 1 for leaf in leaves))
        torch.manual_seed(1)
        output.backward(torch.randn_like(output))
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    # bf16 has 8 bits: one of 128 of values up to about 10.
    limit = 2e-4 if inputs[0].dtype == torch.float32 else 0.15
    for name, found, wanted in zip(("output", "first gradient", "second gradient"), *results, strict=True):
        yield Found(f"{what}: {name}", found, wanted, limit)


CASES: dict[str, Callable[[Setting], Iterator[Found]]] = {
    "vLLM temperature": temperature,
    "vLLM min-p": min_p,
    "vLLM top-k and top-p": top_k_top_p,
    "vLLM sampled tokens": sampled_tokens,
    "vLLM log-probs": log_probs,
    "vLLM block tables": block_tables,
    "vLLM inputs of a step": inputs_of_a_step,
    "vLLM adapters": adapters,
    "Liger norm": liger_norm,
    "Liger rotary embedding": liger_rotary,
    "Liger feed-forward": liger_feed_forward,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", nargs="+", type=int, default=[], help="compute capabilities, such as 90")
    parser.add_argument("--only", default="", help="a part of the names of cases")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
