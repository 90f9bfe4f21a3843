"""The precision of a run follows the hardware, unless a spec names one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.run_spec import machine as machine_module
from rlctl.run_spec.load import dump_spec, load_spec
from rlctl.train.start import _as_on_main

MODEL = ("model.path=org/name", "data.train_files=train.parquet")
GPUS = {"H100": "9.0", "T4": "7.5"}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine with these GPUs and these flags of its CPU."""

    def make(flags: str = "fpu sse2 avx512f", gpus: tuple[str, ...] = (), hidden: str | None = None) -> None:
        info = tmp_path / "cpuinfo"
        info.write_text(f"processor : 0\nflags\t\t: {flags}\n")
        monkeypatch.setattr(machine_module, "_CPU_INFO", info)
        monkeypatch.setattr(machine_module, "_query_driver", lambda query: [GPUS[gpu] for gpu in gpus])
        machine_module._cpu_flags.cache_clear()
        if hidden is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)

    yield make
    machine_module._cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("made", "dtype", "why"),
    [
        ({}, "fp32", "no bf16"),
        ({"flags": "avx512f avx512_bf16"}, "bf16", "AVX512-BF16"),
        ({"flags": "amx_bf16 amx_tile avx512_bf16"}, "bf16", "AMX-BF16"),
        ({"gpus": ("H100",)}, "bf16", "GPU"),
        ({"gpus": ("H100",), "hidden": ""}, "fp32", "no bf16"),
        ({"gpus": ("H100",), "hidden": "0"}, "bf16", "GPU"),
        ({"gpus": ("T4",), "flags": "avx512_bf16"}, "fp32", "7.5"),
        ({"gpus": ("H100", "T4")}, "fp32", "7.5"),
    ],
    ids=str,
)
def test_the_default_is_what_the_hardware_computes(machine, made, dtype: str, why: str) -> None:
    machine(**made)
    loaded = load_spec([], [], [*MODEL])
    assert loaded.spec.engine.dtype == dtype
    origin = loaded.origins["engine.dtype"]
    assert origin.layer == "hardware"
    assert why in str(origin)


def test_a_named_precision_stays_and_a_run_keeps_its_own(machine, tmp_path: Path) -> None:
    machine()
    for layers in (([], [], [*MODEL, "engine.dtype=bf16"]), (["qwen2.5-7b"], [], [MODEL[1]])):
        assert load_spec(*layers).spec.engine.dtype == "bf16"
    assert load_spec([], [], []).spec.engine.dtype == "fp32"  # the embedded model's
    file = tmp_path / "spec.yaml"
    file.write_text(dump_spec(load_spec([], [], [*MODEL]).spec))
    machine(flags="avx512_bf16")  # resumed on another machine
    assert load_spec([], [file], []).spec.engine.dtype == "fp32"


@pytest.mark.parametrize("is_main", [True, False])
def test_all_ranks_have_the_precision_of_the_main_one(is_main: bool) -> None:
    """Ranks on several machines load the spec each by itself, and may decide differently."""
    spec = load_spec([], [], [*MODEL, "engine.dtype=bf16", "engine.zero_stage=2"]).spec
    said = "bf16" if is_main else "fp32"  # by the main rank
    ranks = SimpleNamespace(is_main=is_main, first=lambda text: text or said)
    found = _as_on_main(spec, ranks)
    assert found.engine.dtype == said
    assert found.engine.zero_stage == 2
