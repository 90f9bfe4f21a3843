"""Runs all that can be measured on a machine with a CUDA GPU as it is: nothing is installed or fetched.

    python benchmarks/gpu_offline.py [--json FILE] [--budget SECONDS] [--only WORD ...] [--rehearse] [--list]

Needs a torch with CUDA and the packages of `NEEDED`; cases whose further packages are missing are skipped.
Every case is a separate process with a time limit: a case that runs out of memory, hangs or fails does not
end the others, and one that does not fit by the dry run's estimate is skipped. They run in order of value.
After each case one JSON line is appended to FILE: name, state (passed, failed, out of memory, timed out,
skipped), seconds, figures, end of the output, and the card. Cases of FILE that ended are not repeated: the
next call continues, so that several short sessions suffice.
`--rehearse` runs the same mechanism on the CPU with tiny models. `--list` runs nothing: it prints the cases
of `--gpus` cards in their order, the seconds to expect, which are estimates, and the limit of each.

Exit codes: 0 every case passed or was skipped, 1 some did not, 4 the machine lacks what all cases need.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: Modules without which no case runs → the distribution that has them.
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "deepspeed": "deepspeed",
    "hjson": "hjson",
    "pydantic": "pydantic",
    "orjson": "orjson",
    "platformdirs": "platformdirs",
    "math_verify": "math-verify",
    "latex2sympy2_extended": "latex2sympy2-extended",
    "filelock": "filelock",
    "peft": "peft",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "pytest": "pytest",
    "rich": "rich",
    "typer": "typer",
    "yaml": "PyYAML",
}
#: Ends of output that mean that memory ran out, in the process or on the card.
OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError", "Cannot allocate memory")
GPU_TESTS = "tests/gpu"
#: How several ranks share the work: name, settings, further modules that it needs.
WAYS_TO_SHARE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    *((f"ZeRO {stage}", (f"engine.zero_stage={stage}",), ()) for stage in (1, 2, 3)),
    ("FSDP2", ("engine.name=fsdp",), ()),
    ("sequence parallel", ("engine.sequence_parallel=2", "engine.zero_stage=2"), ()),
    (
        "one vLLM engine over two",
        ("rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "engine.zero_stage=2"),
        ("vllm",),
    ),
)


@dataclass
class Case:
    """One process. `needs` are modules beyond `NEEDED`; `limit` in seconds.

    `expected`: seconds on one H100, a rough estimate: imports and start as on two CPU cores, loading and
    steps by the size of the model. No case was timed on a GPU.
    """

    name: str
    command: list[str]
    limit: float = 300.0
    expected: float = 60.0
    needs: tuple[str, ...] = ()
    figures: bool = False  # the last line of the output is JSON
    good: tuple[int, ...] = (0,)  # exit codes


def main() -> int:
    options = _arguments()
    if options.list:
        print_expected(_cases(options.rehearse, options.gpus))
        return 0
    missing = sorted(name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None)
    if missing:
        print(f"missing: {', '.join(missing)}\ncarry them, for example as wheels into a directory DIR:")
        print("  pip install --no-index --no-deps --target DIR *.whl; PYTHONPATH=DIR make gpu-offline")
        return 4
    card = _card()
    if options.rehearse:
        card, os.environ["CUDA_VISIBLE_DEVICES"] = "CPU", ""
    if card is None:
        print(
            "torch found no CUDA GPU on this machine: nothing was run; --rehearse runs tiny cases on the CPU"
        )
        return 4
    cases = _cases(options.rehearse, int(card.split()[-2]) if "visible" in card else 0)
    return run(cases, card, options.json, options.budget, options.only)


def print_expected(cases: list[Case]) -> None:
    """Prints each case with the seconds to expect, how long it takes with all before it, and its limit."""
    total = 0.0
    print("seconds to expect on one H100 (estimates: no case was timed), with all before it, limit; case")
    for case in cases:
        total += case.expected
        print(f"{case.expected:7.0f} {total:7.0f} {case.limit:7.0f}  {case.name}")


def run(cases: list[Case], card: str, results: Path, budget: float, only: list[str]) -> int:
    """Runs the cases that did not end before, in order, within `budget` seconds; returns the exit code."""
    ended = {row["case"] for row in _rows(results)}
    deadline = time.monotonic() + budget
    print(f"{card}; results: {results}", flush=True)
    for case in cases:
        if case.name in ended or not all(word in case.name for word in only):
            continue
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{'not started':<14} {case.name}: {budget:g} s are spent; the next call continues")
            continue
        row = {"case": case.name, "card": card} | _outcome(case, left)
        if row["state"] == "cut off":  # by the budget, not by its own limit: it runs again
            print(f"{'cut off':<14} {case.name}: by the budget; the next call repeats it", flush=True)
            continue
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['state']:<14} {case.name}, {row['seconds']:.0f} s", flush=True)
    return int(any(row["state"] not in ("passed", "skipped") for row in _rows(results)))


def _outcome(case: Case, left: float) -> dict[str, Any]:
    absent = [module for module in case.needs if importlib.util.find_spec(module) is None]
    if absent:
        return {"state": "skipped", "seconds": 0.0, "why": f"{', '.join(absent)} is not installed"}
    limit, start = min(case.limit, left), time.monotonic()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    process = subprocess.Popen(
        case.command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all processes of a case end with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
        state = "passed" if process.returncode in case.good else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        state = "timed out" if limit == case.limit else "cut off"
    if state == "failed" and any(text in output for text in OUT_OF_MEMORY):
        state = "out of memory"
    if state == "passed" and _only_skipped(output):
        state = "skipped"
    row = {"state": state, "seconds": round(time.monotonic() - start, 1), "end": output[-4000:]}
    if case.figures and state == "passed":
        row["figures"] = json.loads(output.strip().splitlines()[-1])
        if isinstance(row["figures"], dict) and "skipped" in row["figures"]:  # it does not fit into this card
            row |= {"state": "skipped", "why": row["figures"]["skipped"]}
    return row


def _only_skipped(output: str) -> bool:
    """Whether pytest's last line has skipped tests and none that passed."""
    last = output.strip().splitlines()[-1:] or [""]
    return "skipped" in last[0] and "passed" not in last[0]


def _cases(rehearse: bool, num_gpus: int = 1) -> list[Case]:
    """All cases, the most valuable first."""
    python = [sys.executable]

    def card(size: str, engine: str, limit: float, name: str = "", *more: str) -> Case:
        command = [*python, "benchmarks/card.py", "--case", size, engine, "--steps", "1" if rehearse else "5"]
        command += ["--set", *more] if more else []
        needs = ("vllm",) if engine == "vllm" else ()
        # Loading, six steps, vLLM's graphs of CUDA where it samples, and compilers.
        expected = {"tiny": 30, "0.5b": 60, "1.5b": 100, "7b": 240}[size] + 60 * (engine == "vllm")
        expected += 60 * ("compiled" in name)
        name = f"card {size} {engine} {name}".strip()
        return Case(name, command, limit, expected, needs, figures=True)

    def ranks(count: int, name: str, *how: str, needs: tuple[str, ...] = ()) -> Case:
        words = [f"trainer.n_gpus_per_node={count}", "engine.dtype=bf16", *how]
        words += ["trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.logger=[console]"]
        train = [*python, "-m", "rlctl", "train", "--preset", "rloo-seq-is", *words]
        return Case(f"{count} ranks, {name}", train, 300, 80, needs)

    def attention(*options: str) -> Case:
        command = [*python, "benchmarks/attention.py", *options]
        return Case("attention: dense and varlen", command, 240, 60, figures=True)

    presets = sorted(path.stem for path in (ROOT / "presets/hardware").glob("*.yaml"))
    planned = [_planned(python, preset) for preset in presets]
    offload = ("engine.zero_stage=3", "engine.offload=optimizer")

    kernels = Case(
        "Triton kernels: vLLM's and Liger's",
        [*python, "benchmarks/gpu_kernels.py"],
        300,
        120,  # most of it compiles
        needs=("triton", "vllm", "liger_kernel"),
        figures=True,
    )
    doctor = Case(
        "doctor", [*python, "-m", "rlctl", "doctor", *(["--quick"] if rehearse else [])], 240, 45, good=(0, 4)
    )
    if rehearse:
        tiny = ("--tokens", "64", "--sequence", "16")
        return [
            doctor,
            *_tests(python, by_file=True),
            card("tiny", "hf", 300),
            attention(*tiny),
            *planned[:1],
        ]
    return [
        doctor,
        *_tests(python),
        kernels,
        card("0.5b", "hf", 300),
        card("1.5b", "hf", 420),
        attention(),
        card("1.5b", "hf", 420, "varlen", "model.attn_implementation=varlen"),
        card(
            "1.5b",
            "hf",
            420,
            "varlen compiled",
            "model.attn_implementation=varlen",
            "model.compile_layers=true",
        ),
        card("1.5b", "hf", 420, "offload", *offload),
        Case("kill and resume", [*python, "-m", "benchmarks.chaos", "--kills", "2"], 420, 180),
        *(
            ranks(count, name, *how, needs=needs)
            for count in sorted({2, num_gpus})
            if 1 < count <= num_gpus
            for name, how, needs in WAYS_TO_SHARE
        ),
        *planned,
        card("0.5b", "vllm", 420),
        card("1.5b", "vllm", 420),
        card("7b", "hf", 600),
        card("7b", "vllm", 600),
        card("7b", "vllm", 600, "offload_base", "engine.offload_base=true"),
    ]


def _planned(python: list[str], preset: str) -> Case:
    """The dry run of a hardware preset on this machine; exit code 2: it does not fit, with the reason."""
    words = ["--preset", "qwen2.5-7b", "--preset", "rloo-seq-is", "--preset", preset]
    command = [*python, "-m", "rlctl", "train", *words, "data.train_files=absent.parquet", "--dry-run"]
    return Case(f"dry run {preset}", command, 60, 8, good=(0, 2))


def _tests(python: list[str], *, by_file: bool = False) -> list[Case]:
    """One case per test of `tests/gpu`, as pytest collects them; or per file, where all are skipped."""
    command = (
        *python,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        GPU_TESTS,
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
    )
    names = _collected(command)
    if not names:
        return [Case("collect tests/gpu", list(command), 120)]  # shows the error
    if by_file:
        names = tuple(dict.fromkeys(name.partition("::")[0] for name in names))
    run = [*python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    # vLLM also compiles, and captures graphs of CUDA.
    compile_too = ("vllm", "compiled")
    return [
        Case(name, [*run, name], 300, 90 if any(word in name for word in compile_too) else 30)
        for name in names
    ]


@cache
def _collected(command: tuple[str, ...]) -> tuple[str, ...]:
    """The tests that a command lists."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return tuple(line for line in found.stdout.splitlines() if line.startswith(GPU_TESTS) and "::" in line)


def _card() -> str | None:
    """Name and memory of the first card; a separate process, because CUDA forbids forks after it started."""
    code = (
        "import torch\n"
        "if torch.cuda.is_available():\n"
        "    found = torch.cuda.get_device_properties(0)\n"
        "    memory = f'{found.total_memory / 2**30:.0f} GiB'\n"
        "    print(f'{found.name}, {memory}, {torch.cuda.device_count()} visible')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _rows(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [
        json.loads(line) for line in results.read_text(encoding="utf-8").splitlines() if line.endswith("}")
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=Path("gpu-offline.jsonl"), help="results, one line per case"
    )
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds of this call")
    parser.add_argument("--only", nargs="*", default=[], help="words that the name of a case must contain")
    parser.add_argument("--rehearse", action="store_true", help="tiny cases on the CPU")
    parser.add_argument("--list", action="store_true", help="the cases and the seconds to expect; runs none")
    parser.add_argument("--gpus", type=int, default=1, help="cards that --list assumes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
