"""The preflight with vLLM for real, on the CPU, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.forked_python import run_in
from tests.unit.mismatch.planted import MODEL, ROWS, TOKENIZER

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def ask(model: str, data: str, answers: str) -> int:
    """One preflight in each precision; what was reported, as JSON."""
    from rlctl.mismatch.mismatch_run import MismatchRequest, as_document, run_preflight

    request = MismatchRequest(model, engine="vllm", data_files=[data], temperature=0.7, top_p=0.8)
    found = {
        "fp32": run_preflight(request),
        "bf16": run_preflight(replace(request, engine_dtype="bf16", top_p=1.0)),
    }
    Path(answers).write_text(json.dumps({name: as_document(report) for name, report in found.items()}))
    return 0


@pytest.fixture(scope="module")
def answers(forked_vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from rlctl.data.schema import write_rows

    directory = tmp_path_factory.mktemp("vllm-mismatch")
    MODEL.save_pretrained(directory / "model")
    TOKENIZER.save_pretrained(directory / "model")
    write_rows(directory / "rows.parquet", "test", ROWS)
    paths = [directory / name for name in ("model", "rows.parquet", "answers")]
    run_in(forked_vllm, ask, *paths, log=directory / "log")
    loaded: dict[str, Any] = json.loads((directory / "answers").read_text())
    return loaded


@pytest.mark.slow
def test_in_float32_only_the_truncation_asked_for_is_between_them(answers: dict[str, Any]) -> None:
    (cause,) = answers["fp32"]["causes"]
    assert cause["name"] == "truncation"
    assert "as requested" in cause["what"]
    assert cause["after"]["abs_max"] < 1e-4
    assert cause["share"] > 0.999


@pytest.mark.slow
def test_bfloat16_is_told_by_running_the_engine_in_float32(answers: dict[str, Any]) -> None:
    causes = answers["bf16"]["causes"]
    assert {cause["name"] for cause in causes} == {"dtype"}
    assert causes[-1]["after"]["abs_max"] < 1e-4
    assert sum(cause["share"] for cause in causes) > 0.99
    assert answers["bf16"]["remainder"] is None
