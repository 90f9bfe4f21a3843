"""Passes of training on CUDA tensors that have shapes and no memory: no GPU, but a CUDA build of torch.

    make cuda-trace                                   in an environment of its own
    python benchmarks/cuda_trace.py                   with a CUDA build of torch, its Triton wheel and gcc

Every operation is checked for tensors of two devices, and torch chooses the kernels of attention as on an
H100, by the masks and sizes of a pass at true size. For each case: whether all scored log-probs and
gradients are on the GPU, the kernels of attention with how often each was called, and the peak of memory
beside weights and their gradients, next to the estimate of `--dry-run`. Nothing is computed: values, speed
and the kernels themselves are not tested. `cuda_stub.c` stands for the driver.

Exit codes: 0 all cases pass, 1 some do not, 4 torch's CUDA build, its headers or a C compiler is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
_STUB = "libcuda.so.1"
PROMPT, RESPONSE, ROWS, LAYERS = 512, 1536, 8, 4
GPU_BYTES = 80 * 2**30
#: Name → settings, and the kernels of attention that are expected.
CASES: dict[str, tuple[list[str], set[str]]] = {
    "dense mask": ([], {"cudnn"}),
    "varlen": (["model.attn_implementation=varlen"], {"varlen"}),
    "varlen, recomputed layers": (
        ["model.attn_implementation=varlen", "model.enable_gradient_checkpointing=true"],
        {"varlen"},
    ),
    "varlen, adapters": (["model.attn_implementation=varlen", "model.lora_rank=16"], {"varlen"}),
    "eager": (["model.attn_implementation=eager"], set()),
}


def main() -> int:
    if os.environ.get("LD_PRELOAD", "").endswith(_STUB):
        return trace()
    missing = what_is_missing()
    if missing:
        print(f"nothing was traced: {missing}")
        return 4
    with tempfile.TemporaryDirectory(prefix="rlctl-cuda-") as directory:
        library = Path(directory) / _STUB
        command = ["gcc", "-shared", "-fPIC", "-w", f"-I{headers()}", f"-Wl,-soname,{_STUB}"]
        subprocess.run([*command, str(Path(__file__).with_name("cuda_stub.c")), "-o", library], check=True)
        paths = os.pathsep.join(filter(None, [directory, os.environ.get("LD_LIBRARY_PATH")]))
        env = os.environ | {"LD_LIBRARY_PATH": paths, "LD_PRELOAD": str(library), "DS_ACCELERATOR": "cpu"}
        return subprocess.run([sys.executable, __file__], env=env, check=False).returncode


def what_is_missing() -> str:
    """What the trace needs and is not here; empty if all is."""
    if importlib.util.find_spec("torch") is None or not cuda_of_torch():
        return "this torch has no CUDA (make cuda-trace installs one, several GB)"
    if shutil.which("gcc") is None:
        return "there is no gcc"
    return "" if headers() else "Triton's wheel, which has the headers of CUDA, is not installed"


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch was built for."""
    from torch.version import cuda

    return cuda


def headers() -> Path | None:
    """The directory with CUDA's headers in Triton's wheel."""
    found = importlib.util.find_spec("triton")
    if found is None or found.origin is None:
        return None
    where = Path(found.origin).parent / "backends/nvidia/include"
    return where if (where / "cuda_runtime_api.h").exists() else None


def trace() -> int:
    """Runs all cases; prints a table in Markdown."""
    print("| case | attention | peak, GiB | estimate, GiB | |\n|---|---|---|---|---|")
    good = True
    for name, (settings, kernels) in CASES.items():
        try:
            called, peak, estimate = traced(settings)
        except Exception as error:  # of any operation; the other cases run
            print(f"| {name} | | | | failed: {type(error).__name__}: {str(error).splitlines()[0]} |")
            good = False
            continue
        found = {
            kernel
            for kernel in ("varlen", "flash", "efficient", "cudnn")
            if any(kernel in op for op in called)
        }
        good &= found == kernels
        listed = ", ".join(f"{op} {count}" for op, count in sorted(called.items())) or "none"
        result = "as expected" if found == kernels else f"expected {', '.join(kernels) or 'none'}"
        print(f"| {name} | {listed} | {peak / 2**30:.2f} | {estimate / 2**30:.2f} | {result} |", flush=True)
    return 0 if good else 1


def traced(settings: list[str]) -> tuple[Counter[str], float, float]:
    """Kernels of attention of a forward and a backward pass, its peak in bytes, and the estimated one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from rlctl.engine import layout
    from rlctl.engine.log_probs import ChunkedHead
    from rlctl.prefix import body_of
    from rlctl.run_spec.load import load_spec
    from rlctl.run_spec.memory import logits_at_once, memory_parts, memory_total
    from rlctl.run_spec.model_size import ModelSize, Shape
    from tests.peak_memory import PeakMemory

    sizes = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"]
    sizes += [f"actor.ppo_micro_batch_size_per_gpu={ROWS}", f"rollout.n={ROWS}", "engine.dtype=bf16"]
    spec = load_spec([], [], ["data.train_files=x", "model.path=org/traced", *sizes, *settings]).spec
    shape = Shape(LAYERS, 3584, 18_944, 28, 4, 128, 152_064)
    mode = FakeTensorMode()
    model = model_on_gpu(spec, shape, mode)
    body = body_of(model)
    head = ChunkedHead(model, 1.0)
    head._logits_at_once = logits_at_once(GPU_BYTES)  # else torch asks the driver
    # The layout needs the values of its inputs: its results are placed on `meta`, so that one that stays on
    # the host is found, and get the GPU's device here.
    on_meta = _OnMeta(body.config)
    tokens = layout._tokens_read(one_group())
    rows = layout.packed_rows(on_meta, tokens, layout._packing(tokens, layout.row_width(body.config)))
    with mode, PeakMemory() as memory, _attention_counter() as attention:
        given = {name: _on_gpu(value) for name, value in rows.inputs.items()}
        states = layout.states_of(body, layout.Rows(given, _on_gpu(rows.states_at)))
        found = head(states, torch.zeros(len(states), dtype=torch.int64, device="cuda"))
        found[0].sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert found.is_cuda
    assert all(parameter.grad.is_cuda for parameter in trained)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parts = memory_parts(spec, ModelSize("traced", parameters, shape), GPU_BYTES)
    passes = [part for part in parts if "head" in part.phases or "layers" in part.phases]
    return attention.called, memory.peak, memory_total(passes, ("head", "layers"))


def one_group() -> Any:
    """Responses of full length to one prompt; all their tokens are scored."""
    import torch

    from rlctl.batch import ModelInputs

    length = PROMPT + RESPONSE
    sequence, place = torch.arange(ROWS).repeat_interleave(length), torch.arange(length).repeat(ROWS)
    is_response = place >= PROMPT
    return ModelInputs(sequence * is_response, is_response, torch.full((ROWS,), length))


def model_on_gpu(spec: Any, shape: Any, mode: Any) -> Any:
    """A model of this shape with fake weights and gradients on the GPU, as the spec trains it."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlctl.engine import varlen
    from rlctl.engine.deepspeed_setup import recompute_layers
    from rlctl.engine.lora import add_lora
    from tests.models import config_of

    config = config_of("qwen2", shape, pad_token_id=None)
    if spec.model.attn_implementation == varlen.NAME:
        varlen.register()
    options: Any = {"dtype": torch.bfloat16, "attn_implementation": spec.model.attn_implementation}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options).eval()
        if spec.model.lora_rank:
            add_lora(model, spec.model.lora_rank, spec.model.lora_alpha, spec.model.target_modules)
    if spec.model.enable_gradient_checkpointing:
        recompute_layers(model)
    with mode:
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                placed = torch.nn.Parameter(_on_gpu(weight, torch.bfloat16), weight.requires_grad)
                placed.grad = torch.zeros_like(placed) if placed.requires_grad else None
                module.register_parameter(name, placed)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, _on_gpu(buffer))
    return model


class _OnMeta:
    """Stands for a model's body where rows are made: its config, and weights on `meta`."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def parameters(self) -> Any:
        import torch

        return iter([torch.empty(1, dtype=torch.bfloat16, device="meta")])


def _on_gpu(value: Any, dtype: Any = None) -> Any:
    """A fake tensor on the GPU like this one on `meta`; other values as they are."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type != "meta":
        raise AssertionError(f"a tensor of the layout stays on {value.device}")
    return torch.empty(value.shape, dtype=dtype or value.dtype, device="cuda")


def _attention_counter() -> Any:
    """A mode that counts calls of attention kernels, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Attention(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition("::")[2].partition(".")[0]
            if "attention" in name or "attn" in name:
                self.called[name.strip("_")] += 1
            return func(*args, **(kwargs or {}))

    return Attention()


if __name__ == "__main__":
    sys.exit(main())
