"""The commands that the documentation gives for GSM8K, as written there, with a small model and files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests import runs
from tests.own_model import save_tiny_qwen2

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "evaluate.md"
#: Settings that reduce the run time to a minute, in addition to those of the documentation.
SMALL = {
    "prepare-data": [],
    "evaluate": ["--limit", "3", "--batch-size", "8"],
    "train": [
        *("data.max_prompt_length=400", "data.train_batch_size=4", "rollout.n=2", "engine.dtype=fp32"),
        *("trainer.total_training_steps=1", "trainer.test_freq=-1"),
    ],
    "compare": [],
}


def commands() -> list[list[str]]:
    section = DOCS.read_text(encoding="utf-8").partition("## Complete example: GSM8K")[2]
    found = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return [shlex.split(line)[1:] for line in found[1].splitlines()]


@pytest.mark.slow
def test_the_whole_way_with_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(i: int) -> str:
        worked = f"{i}+2=<<{i}+2={i + 2}>>{i + 2}\n#### {i + 2}"
        return (
            json.dumps({"question": f"Tom has {i} pens and buys 2. How many now?", "answer": worked}) + "\n"
        )

    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("".join(map(row, range(2000, 2040))))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gsm8k.jsonl").write_text("".join(map(row, range(1319))))
    save_tiny_qwen2(tmp_path / "MODEL", context=1024)
    monkeypatch.setenv("RLCTL_BENCHMARKS", str(tmp_path / "benchmarks"))
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for arguments in commands():
        kind = "compare" if arguments[1] == "compare" else arguments[0]
        length = "--max-response-length"
        if length in arguments:  # a random model writes to the end
            arguments[arguments.index(length) + 1] = "8"
        short = [
            each.replace("data.max_response_length=512", "data.max_response_length=8") for each in arguments
        ]
        job = runs.start(*short, *SMALL[kind], log=tmp_path / "log")
        assert job.wait() == 0, (short, job.output)
    results = json.loads((tmp_path / "evaluations" / "after" / "results.json").read_text())
    assert results["data"]["benchmarks"][0]["name"] == "gsm8k"
    assert results["model"]["step"] == 1
    assert "Is B better than A?" in (tmp_path / "compared.html").read_text()
