"""`make gpu-offline` on a machine as it is: few packages, no pip, no network; up to CUDA itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from benchmarks import gpu_offline
from benchmarks.gpu_offline import NEEDED, ROOT, WAYS_TO_SHARE, Case, run
from rlctl.run_spec.load import load_spec

#: On such a machine beside `NEEDED`: tools of tests, and packages that come with its image.
ALSO_THERE = (
    *("pytest-timeout", "tokenizers", "safetensors", "jinja2", "httpx", "numpy", "scipy", "sympy"),
    *("accelerate", "setuptools"),  # imported by PEFT, DeepSpeed
)

_NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000000)';;
--query-gpu=name) echo 'NVIDIA H100 80GB HBM3';;
--query-gpu=*) echo '0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 81559 MiB';;
esac
"""


def _python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def _states(results: Path) -> dict[str, str]:
    return {row["case"]: row["state"] for row in map(json.loads, results.read_text().splitlines())}


def test_a_case_that_fails_hangs_or_lacks_memory_does_not_end_the_others(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    memory = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**28, 2**28)); bytearray(2**30)"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    cases = [
        Case("memory", _python(memory)),
        Case("hangs", _python(child), limit=1.0),
        Case("fails", _python("raise ValueError('of the case')")),
        Case("killed", _python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")),
        Case("absent", _python("pass"), needs=("no_such_module",)),
        Case("skips", _python("print('1 skipped in 0.1s')")),
        Case("good", _python("print('text'); print('{\"seconds\": 2}')"), figures=True),
    ]
    assert run(cases, "a card", results, 60.0, []) == 1
    assert _states(results) == {
        "memory": "out of memory",
        "hangs": "timed out",
        "fails": "failed",
        "killed": "failed",
        "absent": "skipped",
        "skips": "skipped",
        "good": "passed",
    }
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert rows[-1]["figures"] == {"seconds": 2}
    assert rows[-1]["card"] == "a card"
    assert "of the case" in rows[2]["end"]


def test_the_next_call_continues_where_the_budget_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    results = tmp_path / "results.jsonl"
    counter = tmp_path / "count"
    first = Case("first", _python(f"open({str(counter)!r}, 'a').write('x')"))
    cut = Case("second", _python("import time; time.sleep(600)"), limit=900.0)
    start = time.monotonic()
    assert run([first, cut, Case("third", _python("pass"))], "a card", results, 3.0, []) == 0
    assert time.monotonic() - start < 120
    assert _states(results) == {"first": "passed"}
    assert "cut off" in capsys.readouterr().out
    again = [first, Case("second", _python("pass")), Case("third", _python("pass"))]
    assert run(again, "a card", results, 60.0, []) == 0
    assert _states(results) == {"first": "passed", "second": "passed", "third": "passed"}
    assert counter.read_text() == "x"


def test_cases_are_in_the_order_of_value_and_each_gpu_test_is_one() -> None:
    names = [case.name for case in gpu_offline._cases(False)]
    assert names[0] == "doctor"
    tests = [name for name in names if name.startswith("tests/gpu")]
    source = "".join(path.read_text() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    assert {re.sub(r".*::|\[.*", "", name) for name in tests} == set(
        re.findall(r"^def (test_\w+)", source, re.M)
    )
    assert names.index("card 0.5b hf") > names.index(tests[-1])
    assert names.index("card 0.5b hf") < names.index("card 1.5b hf") < names.index("card 7b hf")
    for name in ("attention: dense and varlen", "card 1.5b hf offload", "kill and resume"):
        assert names.index("card 1.5b hf") < names.index(name) < names.index("card 7b hf")
    presets = {path.stem for path in (ROOT / "presets/hardware").glob("*.yaml")}
    assert {f"dry run {preset}" for preset in presets} <= set(names)
    assert len(names) == len(set(names))


def test_what_a_case_needs_are_names_of_modules() -> None:
    """A string instead of a tuple is one module per letter: such a case is skipped on every machine."""
    cases = {case.name: case for case in gpu_offline._cases(False, 2)}
    assert cases["card 7b vllm"].needs == ("vllm",)
    assert {type(case.needs) for case in cases.values()} == {tuple}


def test_every_case_has_seconds_to_expect_below_its_limit(capsys: pytest.CaptureFixture) -> None:
    cases = gpu_offline._cases(False, 2)
    gpu_offline.print_expected(cases)
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "estimates" in heading
    assert [line.split(maxsplit=3)[3] for line in lines] == [case.name for case in cases]
    assert all(0 < case.expected < case.limit for case in cases)
    assert float(lines[-1].split()[1]) == sum(case.expected for case in cases)


@pytest.mark.parametrize(("num_gpus", "counts"), [(1, set()), (2, {2}), (8, {2, 8})])
def test_ranks_are_tried_as_far_as_there_are_cards(num_gpus: int, counts: set[int]) -> None:
    names = [case.name for case in gpu_offline._cases(False, num_gpus)]
    assert {name for name in names if "ZeRO" in name} == {
        f"{count} ranks, ZeRO {stage}" for count in counts for stage in (1, 2, 3)
    }


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_every_way_to_share_work_is_tried_and_its_settings_are_accepted(num_gpus: int) -> None:
    cases = [case for case in gpu_offline._cases(False, num_gpus) if " ranks, " in case.name]
    assert {case.name.partition(", ")[2] for case in cases} == {name for name, _, _ in WAYS_TO_SHARE}
    for case in cases:
        words = case.command[case.command.index("--preset") + 2 :]
        spec = load_spec(["rloo-seq-is"], [], words).spec
        assert spec.trainer.n_gpus_per_node == int(case.name.split()[0])


def _requirements(names: set[str]) -> set[str]:
    """Distributions that `names` need, without extras, as installed here."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    left = {canonicalize_name(name) for name in names}
    while left:
        name = left.pop()
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        parsed = [
            need for need in map(Requirement, needs) if not need.marker or need.marker.evaluate({"extra": ""})
        ]
        left |= {canonicalize_name(need.name) for need in parsed} - found
    return found


@pytest.fixture(scope="module")
def bare_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a Python with only `NEEDED` and `ALSO_THERE`; pip and downloads end with an error."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root / "venv", with_pip=False)
    site = root / "site"
    site.mkdir()
    for name in _requirements({*NEEDED.values(), *ALSO_THERE}):
        files = importlib.metadata.files(name) or []
        for first in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / first).exists():
                (site / first).symlink_to(
                    Path(str(files[0].locate())).parents[len(files[0].parts) - 1] / first
                )
    (site / "pip.py").write_text(
        f"open({str(root / 'pip-was-called')!r}, 'w'); raise SystemExit('no pip here')"
    )
    programs = root / "bin"
    programs.mkdir()
    for name in ("pip", "pip3", "uv", "curl", "apt-get"):
        (programs / name).write_text(f"#!/bin/sh\ntouch {root}/pip-was-called\nexit 1\n")
    (programs / "nvidia-smi").write_text(_NVIDIA_SMI)
    for program in programs.iterdir():
        program.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key in ("HOME", "LANG", "OMP_NUM_THREADS")}
    return kept | {
        "PATH": f"{programs}:{root / 'venv' / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(site),
        "DS_ACCELERATOR": "cpu",
        "RLCTL_CACHE": str(root / "cache"),
        "ROOT": str(root),
    }


def _make(env: dict[str, str], *settings: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "gpu-offline", f"PYTHON={env['ROOT']}/venv/bin/python", *settings]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert not Path(env["ROOT"], "pip-was-called").exists()
    return done


def test_the_target_needs_no_setup_and_stops_where_torch_has_no_cuda(bare_machine: dict[str, str]) -> None:
    done = _make(bare_machine)
    assert "torch found no CUDA GPU" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 2  # make's own code for a recipe that failed
    assert not (ROOT / "gpu-offline.jsonl").exists()


def test_a_missing_package_is_named_with_the_command(bare_machine: dict[str, str], tmp_path: Path) -> None:
    fewer = tmp_path / "site"
    shutil.copytree(bare_machine["PYTHONPATH"], fewer, symlinks=True)
    for path in fewer.glob("deepspeed*"):
        path.unlink()
    done = _make(bare_machine | {"PYTHONPATH": str(fewer)})
    assert "missing: deepspeed" in done.stdout
    assert "pip install --no-index" in done.stdout


@pytest.mark.slow
def test_every_case_runs_with_the_packages_of_such_a_machine(
    bare_machine: dict[str, str], tmp_path: Path
) -> None:
    """On the CPU: tests are collected and skip where they ask for CUDA; a tiny training step is measured."""
    results = tmp_path / "results.jsonl"
    done = _make(bare_machine, f"OPTIONS=--rehearse --json {results} --budget 500")
    states = _states(results)
    why = done.stdout + done.stderr + results.read_text()
    assert states["card tiny hf"] == "passed", why
    assert {state for name, state in states.items() if name.startswith("tests/gpu")} == {"skipped"}, why
    figures = {
        json.loads(line)["case"]: json.loads(line).get("figures") for line in results.read_text().splitlines()
    }
    assert figures["card tiny hf"]
    assert figures["attention: dense and varlen"]["64"]["dense"]["ms"] > 0
    assert states["dry run 1gpu-24gb"] == "passed"
